"""Registry of the claims of the subject that can be measured."""

from transduce.claims.causality import CAUSALITY
from transduce.claims.claim import Claim
from transduce.claims.complexity import COMPLEXITY
from transduce.claims.gradient import GRADIENT
from transduce.claims.order import ASYMMETRY, ORDER

# In the order of a course.
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in (GRADIENT, CAUSALITY, ORDER, ASYMMETRY, COMPLEXITY)}
