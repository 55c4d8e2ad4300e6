"""Backends of decoder programs: decoding operations in torch or Triton, and native calls."""

from __future__ import annotations

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
    has_embedding_tables,
)
from transduce.kernels.add_norm import ResidualStream
from transduce.kernels.attention_decode import MAX_QUERIES
from transduce.kernels.decode_step import EmbeddingTables, FusedLinear, KeysValues, TorchOperations, TritonOperations
from transduce.kernels.native.block_step import ACTIVATIONS as NATIVE_ACTIVATIONS
from transduce.kernels.native.block_step import BlockLayers, NativeBlock, StepStruct
from transduce.kernels.native.decoder_step import NativeDecoder
from transduce.kernels.native.library import library
from transduce.kernels.native.linear import NativeLinear
from transduce.kernels.native.top_k import TopKBuffers, shortlists_struct
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
    """Runs a program operation by operation, eight for each block: in torch on a CPU, in Triton on a GPU"""

    supports_shortlists = False

    def __init__(self, program: DecoderProgram, operations: TorchOperations, tables: EmbeddingTables | None) -> None:
        """tables: entry and output by single operations; None: by the modules of the decoder."""
        self.operations, self.tables = operations, tables
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
        logits, hidden = self.operations.linear(FusedLinear(decoder.output.projection, self.final_norm, True), rows)
        return Step(logits[:, None], state, None, hidden[:, None])

    def top_k(self, decoder: LoweredDecoder, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        step = decoder.advance(tokens, state)
        log_probs, best = self.operations.top_k(step.logits[:, -1], request.k, request.suppressed)
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
        entered = self.operations.embed(self.tables, tokens[:, 0], slots)
        rows = entered.rows if self.entry_norm is None else self.entry_norm(entered.rows)
        past = {"next_position": entered.next_positions, "indirection": entered.indirection}
        return rows, past, replace(slots, indirection=entered.indirection)

    def _block(
        self, block: BlockOperations, rows: Tensor, cache: KeysValues, memory: Any, mask: Tensor, slots: CacheSlots
    ) -> Tensor:
        """R D -> R D: self-attention, cross-attention, feed-forward."""
        ops = self.operations
        query, rows = ops.qkv(block.qkv, rows, cache, slots)
        rows, _ = ops.linear(block.attention_out, ops.attend_cache(query, cache, slots, block.scale), rows)
        if block.cross_query is not None and block.cross_out is not None:
            query, rows = ops.linear(block.cross_query, rows)
            rows, _ = ops.linear(block.cross_out, ops.attend_memory(query, memory, mask, block.cross_scale), rows)
        hidden, rows = ops.linear(block.up, rows)
        return ops.linear(block.down, hidden, rows)[0]


def torch_backend(program: DecoderProgram) -> OperationsBackend:
    """Torch operations between packed linear layers, on a CPU."""
    return OperationsBackend(program, TorchOperations(), None)


def gpu_backend(
    program: DecoderProgram, decoder: TransformerDecoder, operations: TorchOperations | None = None
) -> OperationsBackend | None:
    """Triton kernels, where the GPU has them; None: the kernels do not support this decoder."""
    if not has_embedding_tables(decoder) or any(block.head_width not in (32, 64, 128) for block in program.blocks):
        return None
    embedding: Any = decoder.embedding
    tables = EmbeddingTables(embedding.weight, embedding.scale, _position_table(decoder))
    return OperationsBackend(program, operations or TritonOperations(), tables)


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
    finds_top_k = output.transform is None and getattr(output.projection, "native", None) is not None
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
