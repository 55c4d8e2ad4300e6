"""Backends of decoder programs: operations of kernels/decode_step.py, or native calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transduce.attention.positions import Learned, Sinusoidal
from transduce.contracts import SequenceContext
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import CacheSlots, State, Step, TopK, TopKRequest, Tree, additive_mask
from transduce.inference.lowering.program import (
    BlockProgram,
    DecoderProgram,
    LoweredDecoder,
    StepBackend,
    has_embedding_tables,
)
from transduce.kernels.add_norm import ResidualStream
from transduce.kernels.attention import DECODE_HEAD_WIDTHS, MAX_QUERIES
from transduce.kernels.decode_step import (
    CACHE_ATTENTION,
    DECODE_EMBEDDING,
    DECODE_LINEAR,
    DECODE_QKV,
    MEMORY_ATTENTION,
    EmbeddingTables,
    FusedLinear,
    KeysValues,
)
from transduce.kernels.native.inference import ACTIVATIONS as NATIVE_ACTIVATIONS
from transduce.kernels.native.inference import (
    BlockLayers,
    NativeBlock,
    NativeDecoder,
    NativeLinear,
    StepStruct,
    TopKBuffers,
    shortlists_struct,
)
from transduce.kernels.native.library import library
from transduce.kernels.top_k import TOP_K_TOKENS
from transduce.layers.norm import LayerNorm
from transduce.layers.transformer import TransformerLayer

MAX_ROWS = 64  # up to which small kernels are limited by launches; beyond it torch's own matrix products are faster
MAX_POSITIONS = 4096  # sinusoidal embeddings in a table; a search with larger caches runs the modules


@dataclass(frozen=True)
class BlockOperations:
    """The fused linear layers of a block."""

    qkv: FusedLinear
    attention_out: FusedLinear
    cross_query: FusedLinear | None
    cross_out: FusedLinear | None
    up: FusedLinear
    down: FusedLinear
    scale: float
    cross_scale: float


def block_operations(block: BlockProgram, pending: nn.LayerNorm | None) -> BlockOperations:
    """`pending`: the norm of the input, where the previous block of a post-norm decoder left it to this one.

    A norm needs a whole row, which no kernel that computes a part of it has. So a post-norm sum is passed on as it is,
    and the linear layers that read it apply the norm; the first of them stores it as the next residual.
    """
    # pre-norm: each sublayer has its own norm; post-norm: the norm of the sublayer before, whose output it reads.
    norms = list(block.norms) if block.pre_norm else [pending, *block.norms[:-1]]
    stores = [not block.pre_norm and norm is not None for norm in norms]
    cross_query, cross_out = block.cross_query, block.cross_out
    return BlockOperations(
        qkv=FusedLinear(block.qkv, norms[0], stores[0]),
        attention_out=FusedLinear(block.attention_out),
        cross_query=None if cross_query is None else FusedLinear(cross_query, norms[1], stores[1]),
        cross_out=None if cross_out is None else FusedLinear(cross_out),
        up=FusedLinear(block.up, norms[-1], stores[-1], block.activation, block.gate),
        down=FusedLinear(block.down),
        scale=block.scale,
        cross_scale=block.cross_scale,
    )


class OperationsBackend:
    """Runs a program operation by operation, eight for each block"""

    supports_shortlists = False

    def __init__(self, program: DecoderProgram, tables: EmbeddingTables | None) -> None:
        """tables: entry and output by single operations; None: by the modules of the decoder."""
        self.tables = tables
        self.finds_top_k = tables is not None
        # The table entry leaves the embedding norm of a post-norm decoder to the first block.
        self.entry_norm = program.entry_norm if program.pre_norm and tables is not None else None
        pending = program.entry_norm if not program.pre_norm and tables is not None else None
        self.blocks: list[BlockOperations] = []
        for block in program.blocks:
            self.blocks.append(block_operations(block, pending))
            pending = None if program.pre_norm else block.norms[-1]
        self.final_norm = program.final_norm or pending

    def supports(self, tokens: Tensor, state: State) -> bool:
        if self.tables is None:
            return not torch.is_grad_enabled()
        fits = len(tokens) <= MAX_ROWS and state.beams <= MAX_QUERIES and not torch.is_grad_enabled()
        positions = self.tables.positions
        return fits and (positions is None or state.past["indirection"].size(1) <= max(len(positions), MAX_POSITIONS))

    def advance(self, decoder: LoweredDecoder, tokens: Tensor, state: State) -> Step:
        rows, past, slots = self._embed(decoder, tokens, state)
        fixed = state.fixed
        mask = fixed["mask"][:, None, None]
        if rows.is_cpu and rows.dtype == torch.float32:
            mask = fixed["additive_mask"]
        for number, block in enumerate(self.blocks):
            memory = fixed["memory"][number] if block.cross_query is not None else None
            rows = self._block(block, rows, fixed["kv_cache"][number], memory, mask, slots)
        state = replace(state, past=past)
        if self.tables is None:
            norm = self.final_norm
            assert norm is not None
            hidden = torch.layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps)[:, None]
            return Step(decoder.output(hidden), state, None, hidden)
        logits, hidden = DECODE_LINEAR(FusedLinear(decoder.output.projection, self.final_norm, True), rows)
        return Step(logits[:, None], state, None, hidden[:, None])

    def top_k(self, decoder: LoweredDecoder, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        step = decoder.advance(tokens, state)
        log_probs, best = TOP_K_TOKENS(step.logits[:, -1], request.k, request.suppressed)
        return TopK(log_probs, best, step.state)

    def _embed(
        self, decoder: LoweredDecoder, tokens: Tensor, state: State
    ) -> tuple[Tensor, dict[str, Tree], CacheSlots]:
        """Embeddings R D, the next `past`, and where the rows stand."""
        if self.tables is None:
            view, past = decoder.slot_context(state)
            assert view.slots is not None
            return decoder.embed(decoder.embedding(tokens), view.queries, None)[:, 0], past, view.slots
        slots = CacheSlots(state.past["next_position"], state.past["indirection"], state.beams, decoder.window)
        embedded = DECODE_EMBEDDING(self.tables, tokens[:, 0], slots)
        rows = embedded.rows if self.entry_norm is None else self.entry_norm(embedded.rows)
        past = {"next_position": embedded.next_positions, "indirection": embedded.indirection}
        return rows, past, replace(slots, indirection=embedded.indirection)

    def _block(
        self, block: BlockOperations, rows: Tensor, cache: KeysValues, memory: Any, mask: Tensor, slots: CacheSlots
    ) -> Tensor:
        """R D -> R D: self-attention, cross-attention, feed-forward."""
        query, rows = DECODE_QKV(block.qkv, rows, cache, slots)
        rows, _ = DECODE_LINEAR(block.attention_out, CACHE_ATTENTION(query, cache, slots, block.scale), rows)
        if block.cross_query is not None and block.cross_out is not None:
            query, rows = DECODE_LINEAR(block.cross_query, rows)
            context = MEMORY_ATTENTION(query, memory, mask, block.cross_scale)
            rows, _ = DECODE_LINEAR(block.cross_out, context, rows)
        hidden, rows = DECODE_LINEAR(block.up, rows)
        result: Tensor = DECODE_LINEAR(block.down, hidden, rows)[0]
        return result


def packed_backend(program: DecoderProgram, decoder: TransformerDecoder) -> OperationsBackend:
    """Operations around packed linear layers, on a CPU; the entry and the output are those of the decoder."""
    return OperationsBackend(program, None)


def fused_backend(program: DecoderProgram, decoder: TransformerDecoder) -> OperationsBackend | None:
    """Operations alone, for the Triton kernels of a GPU; None: the kernels do not support this decoder."""
    supported = all(block.head_width in DECODE_HEAD_WIDTHS for block in program.blocks)
    if not supported or not has_embedding_tables(decoder):
        return None
    embedding: Any = decoder.embedding
    return OperationsBackend(program, EmbeddingTables(embedding.weight, embedding.scale, _position_table(decoder)))


def _position_table(decoder: TransformerDecoder) -> Tensor | None:
    """P D: the position embeddings."""
    position = decoder.position
    if isinstance(position, Learned):
        return position.embed_positions.weight
    if not isinstance(position, Sinusoidal):
        return None
    weight: Any = decoder.output.projection.weight
    with torch.no_grad():
        empty = weight.new_zeros(1, MAX_POSITIONS, decoder.width)
        return position.add(empty, torch.arange(MAX_POSITIONS, device=weight.device))[0]


class NativeBackend:
    """Runs each block of a program as one native call; a step with top-k is one call for the whole decoder"""

    supports_shortlists = True

    def __init__(self, program: DecoderProgram, blocks: list[NativeBlock], *, finds_top_k: bool) -> None:
        norm = program.final_norm
        self.blocks, self.finds_top_k = blocks, finds_top_k
        self.decoder = NativeDecoder(blocks, None if norm is None else (norm.weight, norm.bias, norm.eps))

    def supports(self, tokens: Tensor, state: State) -> bool:
        parts = [part for layer in state.fixed["memory"] for part in layer]
        return state.fixed["kv_cache"][0][0].dtype == torch.float32 and all(part.is_contiguous() for part in parts)

    def advance(self, decoder: LoweredDecoder, tokens: Tensor, state: State) -> Step:
        view, past = decoder.slot_context(state)
        slots, fixed = view.slots, state.fixed
        assert slots is not None
        values = decoder.embed(decoder.embedding(tokens), view.queries, None)
        for number, block in enumerate(self.blocks):
            memory = (*fixed["memory"][number], view.source) if fixed["memory"] else None
            cache = fixed["kv_cache"][number]
            values = block(values, cache, slots.positions, slots.indirection, slots.beams, slots.window, memory)
        hidden = values if decoder.final_norm is None else decoder.final_norm(values)
        return Step(decoder.output(hidden), replace(state, past=past), None, hidden)

    def top_k(self, decoder: LoweredDecoder, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        """Inactive rows are skipped, and the logits are never stored: they are scanned as they are computed."""
        view, past = decoder.slot_context(state)
        positions, indirection, fixed = state.past["next_position"], past["indirection"], state.fixed
        rows = None if bool(request.active.all()) else request.active.nonzero().flatten()  # R'
        if rows is not None:
            tokens = tokens[rows]
        # As a rule all rows stand at one position.
        queries = positions[:1, None] if bool((positions == positions[0]).all()) else positions[:, None]
        if rows is not None and len(queries) > 1:
            queries = queries[rows]
        values = decoder.embed(decoder.embedding(tokens), queries, None).contiguous()  # R' 1 D
        memories: list[KeysValues] = list(fixed["memory"])
        mask_bias = view.source if memories else None
        step = StepStruct(
            len(values), state.beams, indirection.size(1), -1 if decoder.window is None else decoder.window,
            None if rows is None else rows.data_ptr(), positions.data_ptr(), indirection.data_ptr(), None, None,
            0 if mask_bias is None else mask_bias.size(-1), None, None,
            None if mask_bias is None else mask_bias.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        layer: Any = decoder.output.projection  # read now: a shortlist replaces it
        shortlists = shortlists_struct(layer.native, request.shortlists)
        result = TopKBuffers(len(values), request.k, request.suppressed, shortlists)
        self.decoder(values, step, fixed["kv_cache"], memories, layer.native, result)
        log_probs, best = result.log_probs, result.tokens
        if rows is not None:
            log_probs = log_probs.new_full((len(positions), request.k), -torch.inf).index_copy_(0, rows, log_probs)
            best = best.new_zeros(len(positions), request.k).index_copy_(0, rows, best)
        return TopK(log_probs, best, State(fixed, past, state.beams))


def native_backend(program: DecoderProgram, decoder: TransformerDecoder) -> NativeBackend | None:
    """None: no native library, or it does not support this decoder."""
    blocks = [native for block in program.blocks if (native := native_block(block)) is not None]
    if len(blocks) < len(program.blocks) or not _all_fp32(program.final_norm):
        return None
    output = decoder.output
    finds_top_k = output.is_linear and getattr(output.projection, "native", None) is not None
    return NativeBackend(program, blocks, finds_top_k=finds_top_k)


def native_block(block: BlockProgram) -> NativeBlock | None:
    """A block for the native library; None: it is not there, or does not support the block."""
    layers: list[NativeLinear | None] = [getattr(layer, "native", None) for layer in block.linears]
    supported = block.activation in NATIVE_ACTIVATIONS and block.heads == block.kv_heads
    if library() is None or not supported or None in layers or not all(_all_fp32(norm) for norm in block.norms):
        return None

    def native(layer: nn.Module | None) -> Any:
        return None if layer is None else layer.native

    return NativeBlock(
        BlockLayers(
            self_attention=(native(block.qkv), native(block.attention_out)),
            cross_attention=None if block.cross_query is None else (native(block.cross_query), native(block.cross_out)),
            feed_forward=(native(block.up), native(block.gate), native(block.down)),
            norms=[(norm.weight, norm.bias, norm.eps) for norm in block.norms],
            pre_norm=block.pre_norm,
            heads=block.heads,
            head_width=block.head_width,
            activation=block.activation,
            scale=block.scale,
            memory_scale=block.cross_scale,
        )
    )


def _all_fp32(norm: LayerNorm | None) -> bool:
    return norm is None or all(one.dtype == torch.float32 for one in norm.parameters())


BackendFactory = Callable[[DecoderProgram, TransformerDecoder], StepBackend | None]
# By device, in order of preference; the first one that supports the decoder runs its steps.
CPU_BACKENDS: dict[str, BackendFactory] = {"native": native_backend, "packed": packed_backend}
GPU_BACKENDS: dict[str, BackendFactory] = {"fused": fused_backend}


class NativeEncoderBlock(TransformerLayer):
    """An encoder block that takes whole sources through one native call"""

    def __init__(self, plain: TransformerLayer, native: NativeBlock) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(plain))
        self.native = native

    def run(
        self, values: ResidualStream, past: Tree, view: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        mask = view.mask  # B 1 1 S
        if mask is None or view.with_attention or not isinstance(values, Tensor) or values.dtype != torch.float32:
            return super().run(values, past, view, source)
        return self.native.encode(values, additive_mask(mask[:, 0, 0])), past, None, None
