"""Kernels: operations with a torch reference and faster backends in Triton and C.

One row of the table is one operation. `dispatch` holds the conditions under which a backend applies.

Three units are larger than an operation and not in the table. They read weights that were packed in advance, so they
are built once for a network (inference/lowering.py) instead of chosen for each call: `PackedLinear` (linear.py),
`NativeBlock` and `NativeDecoder` (native/inference.py: a block, or all blocks and the top-k, as one call). The backends
of lowered decoders are in `inference/lowering.py`. The cells of recurrent layers are torch's.
"""

from transduce.kernels.add_norm import DROPOUT, DROPOUT_ADD, NORM, POST_NORM, PRE_NORM
from transduce.kernels.attention import ADDITIVE_CONTEXT, ADDITIVE_SCORES, ATTENTION
from transduce.kernels.beam_update import BEAM_UPDATE, TOP_K, TOP_K_TOKENS
from transduce.kernels.cross_entropy import CROSS_ENTROPY
from transduce.kernels.decode_step import CACHE_ATTENTION, DECODE_EMBEDDING, DECODE_LINEAR, DECODE_QKV, MEMORY_ATTENTION
from transduce.kernels.dispatch import Operation
from transduce.kernels.linear import LINEAR, OUTPUT_PROJECTION, SPLIT, WEIGHT_CAST
from transduce.kernels.recurrent import RECURRENT_LAYER

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        # training
        LINEAR,  # f(W x + b), of one layer or of several over the same rows
        SPLIT,  # the outputs of joint projections
        OUTPUT_PROJECTION,  # logits of a vocabulary
        WEIGHT_CAST,  # weights in the precision of matrix products
        NORM,  # layer and RMS norm
        PRE_NORM,  # residual + dropout(x), and its norm
        POST_NORM,  # norm(residual + dropout(x)), for two readers
        DROPOUT,
        DROPOUT_ADD,  # residual + dropout(x)
        ATTENTION,  # softmax(scale q k^T + bias) v; in generation too
        ADDITIVE_SCORES,  # v . tanh(q + k)
        ADDITIVE_CONTEXT,  # softmax(v . tanh(q + k)) values
        RECURRENT_LAYER,  # RNN, GRU or LSTM over padded sequences; in generation too
        CROSS_ENTROPY,  # label-smoothed, of logits
        # decoding
        DECODE_EMBEDDING,  # token and position embeddings of a step
        DECODE_LINEAR,  # f(W norm(x) + b), with gate and residual
        DECODE_QKV,  # the same for queries, keys and values; writes the KV cache
        CACHE_ATTENTION,  # self-attention over the KV cache, which beams share
        MEMORY_ATTENTION,  # cross-attention over the memory
        TOP_K,  # the best scores of each row
        TOP_K_TOKENS,  # the best tokens of logits, with log-probabilities
        BEAM_UPDATE,  # appends, finishes and prunes hypotheses
    )
}

__all__ = ["OPERATIONS", "Operation"]
