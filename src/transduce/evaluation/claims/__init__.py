"""Registry of the claims of the subject that can be measured."""

from transduce.evaluation.claims.bottleneck import BOTTLENECK, CONTEXT_VECTOR, RECENCY
from transduce.evaluation.claims.claim import Claim
from transduce.evaluation.claims.complexity import COMPLEXITY
from transduce.evaluation.claims.context import CONTEXT, MAP
from transduce.evaluation.claims.self_attention import ASYMMETRY, CAUSALITY, HEADS, ORDER
from transduce.evaluation.claims.training import EQUAL_TIME, EXPOSURE_BIAS, GRADIENT, SCALING

# In the order of a course.
CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        GRADIENT,
        EXPOSURE_BIAS,
        BOTTLENECK,
        RECENCY,
        CONTEXT_VECTOR,
        MAP,
        ASYMMETRY,
        ORDER,
        CAUSALITY,
        COMPLEXITY,
        CONTEXT,
        HEADS,
        EQUAL_TIME,
        SCALING,
    )
}
