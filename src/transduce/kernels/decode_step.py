"""Operations of one decoding step: token embedding, fused linear layers, attention over the KV cache and the memory.

A kernel costs about a microsecond on a GPU however little it does. So a linear layer includes the norm of its input,
the activation, the gate, the residual sum and the write into the KV cache. On a GPU each operation is one Triton
kernel; elsewhere the torch reference runs. Top-k is in beam_update.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.flow import CacheSlots, additive_mask
from transduce.kernels import dispatch
from transduce.kernels.attention import DECODE_HEAD_WIDTHS, MAX_QUERIES, decode_attention
from transduce.kernels.dispatch import Backend, Operation
from transduce.kernels.linear import ACTIVATIONS, LinearFunction, PackedLinear

MAX_ROWS_WITHOUT_MMA = 4  # up to here a product is faster without the matrix unit, which takes sixteen rows
REGISTER_NUMBERS = 8192  # numbers that the 128 threads of a program hold in registers

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FusedLinear:
    """f(W norm(x) + b), times a gate, plus a residual: all that a block does between two attentions."""

    layer: nn.Module  # nn.Linear or PackedLinear
    norm: nn.LayerNorm | None = None
    returns_norm: bool = False  # True: norm(x) is returned too, as the next residual
    activation: str = ""
    gate: nn.Module | None = None

    @cached_property
    def compute(self) -> LinearFunction:
        """f(W x + b); ReLU in the same pass where the layer can."""
        if isinstance(self.layer, PackedLinear) and self.activation == "relu":
            return self.layer.function(relu=True)
        linear = _function(self.layer)
        if not self.activation:
            return linear
        activation = ACTIVATIONS[self.activation]
        return lambda values: activation(linear(values))

    @cached_property
    def compute_gate(self) -> LinearFunction | None:
        return None if self.gate is None else _function(self.gate)


def _function(layer: nn.Module) -> LinearFunction:
    if isinstance(layer, PackedLinear):
        return layer.function()
    return lambda values: F.linear(values, layer.weight, layer.bias)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EmbeddingTables:
    """Token and position embeddings: s E[token] + P[position]."""

    tokens: Tensor  # V D
    scale: float
    positions: Tensor | None  # P D


@dataclass(frozen=True)
class EmbeddedStep:
    """Input of the first block, and the cache bookkeeping of the next step."""

    rows: Tensor  # R D
    next_positions: Tensor  # R
    indirection: Tensor  # R L: `CacheSlots.indirection` with the new token


def decode_linear_reference(op: FusedLinear, rows: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """R I -> R O, and the residual (R I) for what follows."""
    norm, read = op.norm, rows
    if norm is not None:
        read = torch.layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    output = op.compute(read)
    if op.compute_gate is not None:
        output = output * op.compute_gate(read)
    return output if residual is None else output.add_(residual), read if op.returns_norm else rows


def decode_qkv_reference(op: FusedLinear, rows: Tensor, cache: KeysValues, slots: CacheSlots) -> tuple[Tensor, Tensor]:
    """Queries R H*K of rows, and the residual; keys and values are written into the cache (B N L G K)."""
    output, residual = decode_linear_reference(op, rows)
    size = cache[0].size(3) * cache[0].size(4)
    query, keys, values = output.split((output.size(1) - 2 * size, size, size), 1)
    for part, new in zip(cache, (keys, values), strict=True):
        part.view(-1, size).index_copy_(0, slots.rows, new)
    return query, residual


def _accepts_linear(op: FusedLinear, rows: Tensor, *_: Any) -> bool:
    return dispatch.fused_decoding(rows) and not isinstance(op.layer, PackedLinear)


def triton_linear(op: FusedLinear, rows: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _launch_linear(op, rows, op.layer.out_features, residual)  # type: ignore[arg-type]


def triton_qkv(op: FusedLinear, rows: Tensor, cache: KeysValues, slots: CacheSlots) -> tuple[Tensor, Tensor]:
    outputs: Any = op.layer.out_features
    width = outputs - 2 * cache[0].size(3) * cache[0].size(4)
    return _launch_linear(op, rows, width, None, (*cache, slots.positions, cache[0].size(2)))


def _launch_linear(
    op: FusedLinear, rows: Tensor, width: int, residual: Tensor | None, cache: tuple[Any, ...] | None = None
) -> tuple[Tensor, Tensor]:
    from transduce.kernels.triton.decode_step import fused_linear

    layer: Any = op.layer
    gate: Any = op.gate
    number, inputs = rows.shape
    outputs = layer.out_features
    result = rows.new_empty(number, width)
    normed = torch.empty_like(rows) if op.returns_norm else None
    keys, values, positions, capacity = cache or (None, None, None, 1)
    tile_rows, tile_out, tile_in = tile_sizes(number, inputs, outputs)
    fused_linear[(-(-outputs // tile_out), -(-number // tile_rows))](
        rows, layer.weight, layer.bias,
        *((None, None) if gate is None else (gate.weight, gate.bias)),
        *((None, None) if op.norm is None else (op.norm.weight, op.norm.bias)),
        residual, normed, result, keys, values, positions, number, outputs, width, capacity,
        0.0 if op.norm is None else op.norm.eps,
        inputs=inputs, activation=op.activation, use_mma=number > MAX_ROWS_WITHOUT_MMA,
        tile_rows=tile_rows, tile_out=tile_out, tile_in=tile_in, num_warps=4,
    )  # fmt: skip
    return result, rows if normed is None else normed


def tile_sizes(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Rows, outputs and inputs of the tile of one program.

    Few outputs per tile where there are few in all: memory bandwidth needs a hundred programs or more.
    """
    if rows <= MAX_ROWS_WITHOUT_MMA:
        high = _tile(rows, 1, MAX_ROWS_WITHOUT_MMA)
        out = 4 if outputs <= 1024 else 8 if outputs <= 4096 else 16
        return high, out, _tile(inputs, 16, REGISTER_NUMBERS // (high * out))
    high = _tile(rows, 16, 64)
    return high, 16 if outputs <= 2048 else 32, _tile(inputs, 16, REGISTER_NUMBERS // 2 // high)


def _tile(size: int, least: int, most: int) -> int:
    """The smallest power of two not below the size, within bounds."""
    return min(most, max(least, 1 << max(size - 1, 0).bit_length()))


DECODE_LINEAR = Operation(
    "decode_linear", decode_linear_reference, (Backend("triton", _accepts_linear, triton_linear),)
)
DECODE_QKV = Operation("decode_qkv", decode_qkv_reference, (Backend("triton", _accepts_linear, triton_qkv),))


def empty_cache(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU from numpy, whose pages the system clears on first use: most of a cache is never used."""
    if like.is_cpu and like.dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, np.float32))
    return like.new_zeros(shape)


def memory_bias(mask: Tensor) -> Tensor | None:
    """The memory mask (B S) as a bias of the scores (B 1 1 S) where kernels need one, on a CPU: computed once per
    search, not per layer and step. None: they read the boolean mask."""
    return additive_mask(mask[:, None, None]) if mask.is_cpu else None


def cache_attention_reference(query: Tensor, cache: KeysValues, slots: CacheSlots, scale: float) -> Tensor:
    """Queries R H*K over caches B N L G K, each beam over the slots that hold its tokens -> R H*K"""
    keys, values = (part.flatten(1, 2).transpose(1, 2) for part in cache)  # B G N*L K
    queries = query.unflatten(1, (-1, keys.size(3))).unflatten(0, (-1, slots.beams)).transpose(1, 2)  # B H N K
    additive = query.is_cpu and query.dtype == torch.float32  # made once for all blocks: CPU kernels add masks
    mask = slots.additive_mask if additive else slots.mask
    return _merge_heads(_grouped_attention(queries, keys, values, mask, scale))


def memory_attention_reference(query: Tensor, memory: KeysValues, mask: Tensor, scale: float) -> Tensor:
    """Queries R H*K over the memory of their source, B G S K -> R H*K; mask (B 1 1 S) is boolean or additive."""
    return _merge_heads(_grouped_attention(_queries_of_sources(query, memory), *memory, mask, scale))


def _grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Several heads of queries may share one of keys and values (Ainslie 2023)."""
    grouped = keys.size(1) < query.size(1)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


def _queries_of_sources(query: Tensor, memory: KeysValues) -> Tensor:
    """R H*K -> B H N K"""
    keys = memory[0]
    return query.unflatten(1, (-1, keys.size(3))).unflatten(0, (len(keys), -1)).transpose(1, 2)


def _merge_heads(context: Tensor) -> Tensor:
    """B H N K -> R H*K"""
    return context.transpose(1, 2).flatten(2).flatten(0, 1)


def _accepts_cache(query: Tensor, cache: KeysValues, slots: CacheSlots, scale: float) -> bool:
    return dispatch.fused_decoding(query) and slots.beams <= MAX_QUERIES and cache[0].size(4) in DECODE_HEAD_WIDTHS


def triton_cache_attention(query: Tensor, cache: KeysValues, slots: CacheSlots, scale: float) -> Tensor:
    from transduce.kernels.triton.attention import cache_attention

    keys, values = cache
    capacity, groups, width = keys.shape[2:]
    heads, result = query.size(1) // width, torch.empty_like(query)
    indirection = slots.indirection if slots.beams > 1 else None
    cache_attention[(len(keys) * heads,)](
        query, keys, values, slots.positions, indirection, result, scale, slots.window, heads, heads // groups,
        slots.beams, capacity, width=width, block=_tile(slots.beams * capacity, 16, 128), max_queries=MAX_QUERIES,
    )  # fmt: skip
    return result


def _accepts_memory(query: Tensor, memory: KeysValues, mask: Tensor, scale: float) -> bool:
    keys = memory[0]
    few = len(query) <= MAX_QUERIES * len(keys) and keys.size(3) in DECODE_HEAD_WIDTHS
    return few and mask.dtype == torch.bool and dispatch.fused_decoding(query)


def triton_memory_attention(query: Tensor, memory: KeysValues, mask: Tensor, scale: float) -> Tensor:
    return _merge_heads(decode_attention(_queries_of_sources(query, memory), *memory, mask, scale))


def _accepts_bmm(query: Tensor, memory: KeysValues, mask: Tensor, scale: float) -> bool:
    keys = memory[0]
    return mask.dtype != torch.bool and len(keys) > 1 and keys.size(1) * keys.size(3) == query.size(1)


def bmm_memory_attention(query: Tensor, memory: KeysValues, mask: Tensor, scale: float) -> Tensor:
    """By batched matrix products, for the few queries of many sources and an additive mask.

    Torch's fused CPU kernel has an overhead for each source and head: 402 instead of 202 microseconds for 32 sources of
    32 tokens.
    """
    queries = _queries_of_sources(query, memory)
    sources, heads, rows, width = queries.shape
    keys, values = (part.reshape(sources * heads, -1, width) for part in memory)
    scores = torch.bmm(queries.reshape(sources * heads, rows, width), keys.transpose(1, 2)).mul_(scale)
    weights = scores.view(sources, heads, rows, -1).add_(mask).softmax(-1)
    return _merge_heads(torch.bmm(weights.flatten(0, 1), values).view(queries.shape))


CACHE_ATTENTION = Operation(
    "cache_attention", cache_attention_reference, (Backend("triton", _accepts_cache, triton_cache_attention),)
)
MEMORY_ATTENTION = Operation(
    "memory_attention",
    memory_attention_reference,
    (
        Backend("triton", _accepts_memory, triton_memory_attention),
        Backend("bmm", _accepts_bmm, bmm_memory_attention),
    ),
)


def decode_embedding_reference(tables: EmbeddingTables, tokens: Tensor, slots: CacheSlots) -> EmbeddedStep:
    """Tokens (R) at their positions."""
    positions, indirection = slots.positions, slots.indirection
    rows = tables.tokens[tokens] * tables.scale
    if tables.positions is not None:
        rows = rows + tables.positions[positions.clamp(max=len(tables.positions) - 1)]
    if slots.beams > 1:
        beam = torch.arange(slots.beams, dtype=indirection.dtype, device=positions.device)  # N
        beam = beam.repeat(len(positions) // slots.beams)
        indirection = indirection.scatter(1, positions[:, None], beam[:, None])
    return EmbeddedStep(rows, (positions + 1).clamp(max=indirection.size(1) - 1), indirection)


def _accepts_embedding(tables: EmbeddingTables, tokens: Tensor, slots: CacheSlots) -> bool:
    return dispatch.fused_decoding(tables.tokens)


def triton_embedding(tables: EmbeddingTables, tokens: Tensor, slots: CacheSlots) -> EmbeddedStep:
    from transduce.kernels.triton.decode_step import embed

    positions, indirection = slots.positions, slots.indirection
    number, width = len(tokens), tables.tokens.size(1)
    rows = tables.tokens.new_empty(number, width)
    next_positions, several = torch.empty_like(positions), slots.beams > 1
    updated = torch.empty_like(indirection) if several else indirection
    last = 0 if tables.positions is None else len(tables.positions) - 1
    embed[(number,)](
        tokens, tables.tokens, tables.positions, positions, indirection if several else None, rows,
        next_positions, updated, tables.scale, tokens.stride(0), width, indirection.size(1), last, slots.beams,
        tile=_tile(width, 16, 1024),
    )  # fmt: skip
    return EmbeddedStep(rows, next_positions, updated)


DECODE_EMBEDDING = Operation(
    "decode_embedding", decode_embedding_reference, (Backend("triton", _accepts_embedding, triton_embedding),)
)
