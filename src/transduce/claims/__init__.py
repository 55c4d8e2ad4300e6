"""Registry of the claims of the subject that can be measured."""

from transduce.claims.bottleneck import BOTTLENECK
from transduce.claims.causality import CAUSALITY
from transduce.claims.claim import Claim
from transduce.claims.complexity import COMPLEXITY
from transduce.claims.context import CONTEXT, MAP
from transduce.claims.context_vector import CONTEXT_VECTOR, RECENCY
from transduce.claims.exposure_bias import EXPOSURE_BIAS
from transduce.claims.gradient import GRADIENT
from transduce.claims.heads import HEADS
from transduce.claims.order import ASYMMETRY, ORDER
from transduce.claims.scaling import EQUAL_TIME, SCALING

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
