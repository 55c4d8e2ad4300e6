"""Kernels: operations with a torch reference and faster backends in Triton and C.

One row of the table is one operation of training. `dispatch` holds the conditions under which a backend applies.
"""

from transduce.kernels import fork  # noqa: F401 (it registers what a forked child does)
from transduce.kernels.add_norm import NORM, POST_NORM, PRE_NORM
from transduce.kernels.additive_attention import ADDITIVE_CONTEXT, ADDITIVE_SCORES
from transduce.kernels.attention import ATTENTION
from transduce.kernels.cross_entropy import CROSS_ENTROPY
from transduce.kernels.dispatch import Operation
from transduce.kernels.dropout import DROPOUT, DROPOUT_ADD
from transduce.kernels.linear import LINEAR, OUTPUT_PROJECTION, SPLIT
from transduce.kernels.weight_cast import WEIGHT_CAST

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        LINEAR,  # f(W x + b), of one layer or of several over the same rows
        SPLIT,  # the outputs of joint projections
        OUTPUT_PROJECTION,  # logits of a vocabulary
        WEIGHT_CAST,  # weights in the precision of matrix products
        NORM,  # layer and RMS norm
        PRE_NORM,  # residual + dropout(x), and its norm
        POST_NORM,  # norm(residual + dropout(x)), for two readers
        DROPOUT,
        DROPOUT_ADD,  # residual + dropout(x)
        ATTENTION,  # softmax(scale q k^T + bias) v
        ADDITIVE_SCORES,  # v . tanh(q + k)
        ADDITIVE_CONTEXT,  # softmax(v . tanh(q + k)) values
        CROSS_ENTROPY,  # label-smoothed, of logits
    )
}

__all__ = ["OPERATIONS", "Operation"]
