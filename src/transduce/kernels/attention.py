"""Attention kernels: scaled dot-product in training and decoding, and additive attention (Bahdanau 2015).

General kernels read a row in blocks of 64 to 128: a sentence of 30 tokens takes as long as a full block. In the
training kernels each row and head is one program (Triton) or one task (C) with a tile as large as the row. It holds all
attention weights, so the backward pass is one kernel as well, and nothing is stored between them. With 32 rows of 32
tokens and four heads torch took 8.8 ms forward and backward on a CPU in bf16, the C kernel 2.6.

In a decoding step general kernels wait more than they read, because they are made for many queries. There each source
and head is one program, which reads every key and value once for all queries (the beams).

Written with torch's operations, each step of a decoder stores five tensors of B S Q numbers, forward and backward. The
C kernels store none of them: tanh is computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, is_plain_linear, native_kernels
from transduce.kernels.linear import LinearOutput, adjacent, column_sums, plain
from transduce.kernels.native import training as native
from transduce.kernels.native.training import AdditiveInput, attention_backward, attention_forward

MAX_LENGTH = 128  # queries or keys of one tile in training
HEAD_WIDTHS = (16, 32, 64, 128)
MAX_QUERIES = 16  # of a decoding step: one tile of the matrix unit
DECODE_HEAD_WIDTHS = (32, 64, 128)


class AttentionInput(NamedTuple):
    query: Tensor  # B H T K
    keys: Tensor  # B H S K
    values: Tensor  # B H S K
    mask: Tensor | None  # broadcastable to B H T S, True: may attend
    bias: Tensor | None  # added to the scores
    scale: float
    causal: bool  # T = S, and a query attends to its own position and those before it
    dropout: float  # of the attention weights


def attention_reference(given: AttentionInput) -> Tensor:
    """softmax(scale q k^T + bias) v, by torch's fused attention: B H T K"""
    query, keys, values, mask, bias, scale, causal, dropout = given
    if bias is not None and causal:
        size = query.size(-2)
        mask, causal = torch.ones(size, size, dtype=torch.bool, device=query.device).tril(), False
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if query.dtype == torch.bfloat16 and query.is_cpu and torch.is_grad_enabled():
        # Torch's backward pass of attention on a CPU takes five times as long in bf16 as in fp32.
        wide = query.float(), keys.float(), values.float()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(*wide, mask, dropout, causal, scale=scale).to(query.dtype)
    if query.dim() == 3 and torch.compiler.is_exporting():  # ONNX knows attention with heads alone
        query, keys, values = query[:, None], keys[:, None], values[:, None]
        mask = mask if mask is None else mask[:, None]
        return F.scaled_dot_product_attention(query, keys, values, mask, dropout, causal, scale=scale)[:, 0]
    return F.scaled_dot_product_attention(query, keys, values, mask, dropout, causal, scale=scale)


def shared_by_heads(mask: Tensor | None) -> bool:
    """Whether a mask (B H T S) is the same for all heads of a row."""
    return mask is None or (mask.dtype == torch.bool and mask.size(1) == 1 and mask.stride(3) == 1)


def masks_keys(mask: Tensor | None) -> bool:
    """Whether a mask (B H T S) is the same for all heads and queries of a row."""
    return shared_by_heads(mask) and (mask is None or mask.size(2) == 1)


def accepts_decode(given: AttentionInput) -> bool:
    """Few queries and a mask that all heads share, in generation on a GPU."""
    query, keys, values, mask = given[:4]
    if mask is None or given.bias is not None or given.causal or given.dropout or not dispatch.fused_decoding(query):
        return False
    shaped = query.dim() == 4 and query.size(2) <= MAX_QUERIES and query.size(3) in DECODE_HEAD_WIDTHS
    contiguous = all(part.stride(-1) == 1 for part in (query, keys, values))
    return shaped and contiguous and mask.dtype == torch.bool and mask.size(1) == 1


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query B H T K, keys and values B G S K (any strides, K contiguous), mask broadcastable to B 1 T S -> B H T K"""
    from transduce.kernels.triton.attention import decode_attention as kernel

    sources, heads, steps, width = query.shape
    groups, slots = keys.shape[1:3]
    visible = mask.expand(sources, 1, steps, slots)
    result = torch.empty(sources, steps, heads, width, device=query.device, dtype=query.dtype).transpose(1, 2)
    block = min(128, max(16, 1 << (slots - 1).bit_length()))
    kernel[(sources * heads,)](
        query, keys, values, visible, result, scale, heads, heads // groups, steps, slots,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], visible.stride(0), *visible.stride()[2:],
        *result.stride()[:3], width=width, block=block, max_queries=MAX_QUERIES, num_warps=4,
    )  # fmt: skip
    return result


def _decode(given: AttentionInput) -> Tensor:
    assert given.mask is not None
    return decode_attention(given.query, given.keys, given.values, given.mask, given.scale)


def accepts_triton(given: AttentionInput) -> bool:
    """Short rows and a mask that all heads share, in a captured training pass."""
    if given.bias is not None or given.dropout or not dispatch.fused_training(given.query):
        return False
    return given.query.dim() == 4 and given.query.dtype in dispatch.TENSOR_CORE_DTYPES and fits_tile(given)


def fits_tile(given: AttentionInput) -> bool:
    query, keys = given.query, given.keys
    short = max(query.size(2), keys.size(2)) <= MAX_LENGTH and query.size(3) in HEAD_WIDTHS
    return short and shared_by_heads(given.mask) and query.shape[:2] == keys.shape[:2]


def triton_attention(given: AttentionInput) -> Tensor:
    """Any strides; mask: . 1 . S"""
    raw, biases = _projections(given)
    result: Tensor = _TileAttention.apply(*raw, given.mask, given.scale, given.causal, *biases)
    return result


def accepts_native(given: AttentionInput) -> bool:
    """Short rows and one mask for all queries and heads of a row, in training on a CPU."""
    query, keys, values = given[:3]
    if given.bias is not None or given.dropout or query.dim() != 4 or not query.is_cpu or not torch.is_grad_enabled():
        return False
    alike = query.shape[:2] == keys.shape[:2] and query.dtype == keys.dtype == values.dtype
    if not alike or max(query.size(2), keys.size(2)) > MAX_LENGTH:
        return False
    contiguous = all(part.stride(3) == 1 and part.numel() for part in (query, keys, values))
    same = query.size(3) == keys.size(3) == values.size(3)
    return masks_keys(given.mask) and contiguous and same and native_kernels(query, keys, values) is not None


def native_attention(given: AttentionInput) -> Tensor:
    """mask: . 1 1 S"""
    result: Tensor = _NativeAttention.apply(*given[:4], given.scale, given.causal)
    return result


ATTENTION = Operation(
    "attention",
    attention_reference,
    (
        Backend("triton_decode", accepts_decode, _decode),
        Backend("triton", accepts_triton, triton_attention),
        Backend("native", accepts_native, native_attention),
    ),
)


def attention(given: AttentionInput) -> Tensor:
    """softmax(scale q k^T + bias) v: B H T K"""
    result: Tensor = ATTENTION(given)
    return result


def _projections(given: AttentionInput) -> tuple[list[Tensor], list[Tensor | None]]:
    """Queries, keys and values, and the biases of their projections where the kernel is to compute their gradients.

    A joint projection is read raw as a whole or not at all: otherwise its gradient would be the sum of two tensors.
    """
    raw = [plain(x) for x in given[:3]]
    biases: list[Tensor | None] = [None, None, None]
    joint: dict[int, list[tuple[int, LinearOutput]]] = {}
    for number, x in enumerate(given[:3]):
        if isinstance(x, LinearOutput) and _heads_are_adjacent(x):
            joint.setdefault(x.parts, []).append((number, x))
    for parts, found in joint.items():
        if len(found) == parts:
            for number, x in found:
                raw[number], biases[number] = x.raw, x.biases[0]
    return raw, biases


def _heads_are_adjacent(x: LinearOutput) -> bool:
    """Whether the columns of the projection are the heads, one after the other."""
    heads, width = x.size(1), x.size(3)
    return len(x.biases) == 1 and len(x.biases[0]) == heads * width and (heads == 1 or x.stride(1) == width)


class _TileAttention(torch.autograd.Function):
    """The biases are those of the projections: they are part of q, k and v, and only their gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
        *biases: Tensor | None,
    ) -> Tensor:
        from transduce.kernels.triton.attention import attention_forward as kernel

        query, keys, values = (_unit_stride(part) for part in (query, keys, values))
        result = _empty_heads(query)[0]
        sources, heads, steps, width = query.shape
        kernel[(sources * heads,)](
            query, keys, values, mask, result, scale, heads, steps, keys.size(2), *_mask_strides(mask),
            *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *result.stride()[:3],
            causal=causal, by_query=_by_query(mask), **_tile(steps, keys.size(2), width),
        )  # fmt: skip
        ctx.save_for_backward(query, keys, values, mask)
        ctx.scale, ctx.causal = scale, causal
        ctx.bias_dtypes = [bias.dtype if bias is not None and bias.requires_grad else None for bias in biases]
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from transduce.kernels.triton.attention import attention_backward as kernel

        query, keys, values, mask = ctx.saved_tensors
        grad, results = _unit_stride(grads[0]), _gradient_buffers(query, keys, values)
        sources, heads, steps, width = query.shape
        sums = None
        if any(dtype is not None for dtype in ctx.bias_dtypes):
            sums = query.new_empty(sources, 3 * heads * width, dtype=torch.float32)
        parts = (query, keys, values, grad, *results)
        kernel[(sources * heads,)](
            query, keys, values, mask, grad, *results, sums, ctx.scale, heads, steps, keys.size(2),
            *_mask_strides(mask), *(step for part in parts for step in part.stride()[:3]),
            causal=ctx.causal, by_query=_by_query(mask), **_tile(steps, keys.size(2), width),
        )  # fmt: skip
        bias_grads: list[Tensor | None] = [None] * len(ctx.bias_dtypes)
        if sums is not None:
            totals = column_sums(sums)[1].split(heads * width)
            pairs = zip(totals, ctx.bias_dtypes, strict=True)
            bias_grads = [None if dtype is None else total.to(dtype) for total, dtype in pairs]
        return *results, None, None, None, *bias_grads


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        kernels = native_kernels(query)
        assert kernels is not None
        ctx.save_for_backward(query, keys, values, mask)
        ctx.scale, ctx.causal = scale, causal
        return attention_forward(kernels, (query, keys, values), mask, scale, causal)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mask = ctx.saved_tensors
        kernels = native_kernels(query)
        assert kernels is not None
        grad = _unit_stride(grads[0].to(query.dtype))
        parts = (query, keys, values)
        return *attention_backward(kernels, parts, mask, ctx.scale, ctx.causal, grad), None, None, None


def _unit_stride(part: Tensor) -> Tensor:
    return part if part.stride(3) == 1 else part.contiguous()


def _gradient_buffers(query: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Gradients are laid out as their tensors are: adjacent, where one product computed several of them."""
    if adjacent((query, keys, values)):
        return [*_empty_heads(query, keys, values)]
    if adjacent((keys, values)):
        return [*_empty_heads(query), *_empty_heads(keys, values)]
    return [*_empty_heads(query), *_empty_heads(keys), *_empty_heads(values)]


def _empty_heads(*parts: Tensor) -> tuple[Tensor, ...]:
    """Tensors like each of these, B H T K: the heads of a row are adjacent, and so are the parts."""
    sources, heads, steps, width = parts[0].shape
    made = parts[0].new_empty(sources, steps, len(parts), heads, width)
    return tuple(part.transpose(1, 2) for part in made.unbind(2))


def _mask_strides(mask: Tensor | None) -> tuple[int, int]:
    """From one source to the next, and from one query to the next; 0: all have the same mask."""
    if mask is None:
        return 0, 0
    return mask.stride(0) if mask.size(0) > 1 else 0, mask.stride(2) if mask.size(2) > 1 else 0


def _by_query(mask: Tensor | None) -> bool:
    return mask is not None and mask.size(2) > 1


def _tile(queries: int, keys: int, width: int) -> dict[str, int]:
    query_block, key_block = (max(16, 1 << (size - 1).bit_length()) for size in (queries, keys))
    return {"width": width, "query_block": query_block, "key_block": key_block, "num_warps": 4}


def additive_scores_reference(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    """v . tanh(q + k), v the weights of a linear layer with one output: ... N Q, ... S Q -> ... N S"""
    scores: Tensor = layer(torch.tanh(query.unsqueeze(-2) + keys.unsqueeze(-3))).squeeze(-1)
    return scores


def additive_context_reference(
    query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None
) -> Tensor:
    """softmax(v . tanh(q + k)) values: ... N D"""
    scores = additive_scores_reference(query, keys, layer)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ values


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
        kernels = native_kernels(query, keys, vector)
        assert kernels is not None
        ctx.save_for_backward(query, keys, vector)
        return native.additive_scores_forward(kernels, query, keys, vector).to(query.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, vector = ctx.saved_tensors
        kernels = native_kernels(query, keys, vector)
        assert kernels is not None
        results = native.additive_scores_backward(kernels, query, keys, vector, grads[0].float().contiguous())
        return results[0].to(query.dtype), results[1].to(keys.dtype), results[2].view_as(vector)


class _AdditiveContext(torch.autograd.Function):
    """Only the attention weights are stored."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, vector: Tensor, mask: Tensor | None) -> Tensor:
        kernels = native_kernels(query, keys, values, vector)
        assert kernels is not None
        weights = torch.empty(*query.shape[:2], keys.size(1))
        ctx.save_for_backward(query, keys, values, vector, mask, weights)
        return native.additive_context_forward(kernels, AdditiveInput(query, keys, values, vector, mask, weights))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, vector, mask, weights = ctx.saved_tensors
        kernels = native_kernels(query, keys, values, vector)
        assert kernels is not None
        given = AdditiveInput(query, keys, values, vector, mask, weights)
        *results, for_vector = native.additive_context_backward(kernels, given, grads[0].to(query.dtype).contiguous())
        return *results, for_vector.view_as(vector), None


def accepts_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> bool:
    """B N Q and B S Q, contiguous and in one precision, the vector in fp32, in training on a CPU."""
    if not torch.is_grad_enabled() or not is_plain_linear(layer):
        return False
    vector: Any = layer.weight
    shaped = query.dim() == keys.dim() == 3 and len(query) == len(keys) and query.dtype == keys.dtype
    contiguous = all(one.is_contiguous() for one in (query, keys, vector)) and vector.dtype == torch.float32
    return shaped and contiguous and native_kernels(query, keys, vector) is not None


def accepts_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> bool:
    """As `accepts_scores`, with a mask that is the same for all queries of a source."""
    if not accepts_scores(query, keys, layer):
        return False
    masks = mask is None or (mask.dtype == torch.bool and mask.dim() == 3 and mask.size(1) == 1 and mask.stride(2) == 1)
    same = values.dtype == keys.dtype or (keys.dtype == torch.bfloat16 and values.dtype == torch.float32)
    shaped = values.dim() == 3 and values.shape[:2] == keys.shape[:2] and values.is_contiguous() and values.numel() > 0
    return masks and same and shaped and native_kernels(values) is not None


def native_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    scores: Tensor = _AdditiveScores.apply(query, keys, layer.weight)
    return scores


def native_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> Tensor:
    context: Tensor = _AdditiveContext.apply(query, keys, values, layer.weight, mask)
    return context


ADDITIVE_SCORES = Operation(
    "additive_scores", additive_scores_reference, (Backend("native", accepts_scores, native_scores),)
)
ADDITIVE_CONTEXT = Operation(
    "additive_context", additive_context_reference, (Backend("native", accepts_context, native_context),)
)


def additive_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    """v . tanh(q + k), v the weights of a linear layer with one output: ... N Q, ... S Q -> ... N S"""
    scores: Tensor = ADDITIVE_SCORES(query, keys, layer)
    return scores


def additive_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> Tensor:
    """softmax(v . tanh(q + k)) values: ... N D; mask: broadcastable to ... N S"""
    context: Tensor = ADDITIVE_CONTEXT(query, keys, values, layer, mask)
    return context
