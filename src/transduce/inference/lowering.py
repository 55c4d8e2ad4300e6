"""Lowering: a trained network for inference, with packed layers, and backends of decoder programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from transduce.attention.multihead import CrossAttention
from transduce.attention.positions import Learned, Rotary, Sinusoidal, position_in_embedding
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import SequenceContext
from transduce.decoders.transformer import TransformerDecoder
from transduce.errors import InputError
from transduce.flow import CacheSlots, State, Step, TopK, TopKRequest, Tree, additive_mask
from transduce.inference.decoder_program import (
    BlockProgram,
    DecoderProgram,
    JointCrossAttention,
    JointSelfAttention,
    LoweredDecoder,
    StepBackend,
    has_embedding_tables,
    has_projections,
    lower_block,
    lower_decoder,
    with_backend,
)
from transduce.kernels.add_norm import ResidualStream
from transduce.kernels.attention import DECODE_HEAD_WIDTHS, MAX_QUERIES
from transduce.kernels.beam_update import TOP_K_TOKENS
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
from transduce.kernels.dispatch import TENSOR_CORE_DTYPES
from transduce.kernels.linear import PackedBFloat16, PackedFloat32, PackedInt8, PackedLinear
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
from transduce.kernels.recurrent import reverse
from transduce.layers.norm import LayerNorm
from transduce.layers.recurrent import STEPS, LayerState
from transduce.layers.transformer import TransformerLayer, TransformerStack
from transduce.model import Transducer

MAX_ROWS = 64  # up to which small kernels are limited by launches; beyond it torch's own matrix products are faster
MAX_POSITIONS = 4096  # sinusoidal embeddings in a table; a search with larger caches runs the modules
Precision = Literal["auto", "fp32", "bf16", "int8"]
PACKED: dict[str, type[PackedLinear]] = {"fp32": PackedFloat32, "bf16": PackedBFloat16, "int8": PackedInt8}


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
    table = position_table(decoder, embedding.weight)
    return OperationsBackend(program, EmbeddingTables(embedding.weight, embedding.scale, table))


def position_table(stack: TransformerStack, weight: Tensor) -> Tensor | None:
    """P D: the position embeddings, like the token embeddings `weight`."""
    position = stack.position
    if isinstance(position, Learned):
        return position.embed_positions.weight
    if not isinstance(position, Sinusoidal):
        return None
    with torch.no_grad():
        empty = weight.new_zeros(1, MAX_POSITIONS, stack.width)
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


def choose_precision(precision: Precision, device: torch.device, weight_dtype: str = "fp32") -> Precision:
    """The precision that `auto` stands for: the fastest one that is safe on the device.

    CPU: int8 where the stored weights are int8 already, so that nothing more is rounded; else fp32. GPU: bf16 where the
    hardware has it, which the fused decoding kernels need; else fp32. bf16 has the range of fp32, so nothing overflows.
    """
    if precision not in get_args(Precision):
        raise InputError(f"unknown precision {precision!r}", remedy=f"use {', '.join(get_args(Precision))}")
    if precision == "int8" and device.type != "cpu":
        raise InputError(f"int8 is for the CPU, not for {device.type}", remedy="use precision bf16 or auto")
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "int8" if weight_dtype == "int8" else "fp32"
    return "bf16" if has_fast_bf16(device) else "fp32"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether a GPU multiplies bf16 matrices in hardware: NVIDIA's from compute capability 8.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def lower_network(
    network: Transducer,
    precision: Precision = "auto",
    *,
    weight_dtype: str = "fp32",  # of the stored weights
    device: torch.device | None = None,  # that it runs on; None: where its weights are
) -> Transducer:
    """A copy of the network for inference only, in a precision.

    On a CPU the precision is that of linear layers: embeddings, norms, attention and scores stay in fp32. On a GPU it
    is that of all weights and activations; sums are in fp32. There `auto` uses bf16 only for a decoder that the fused
    kernels support: others would gain little from it.
    """
    device = device or next(network.parameters()).device
    chosen = choose_precision(precision, device, weight_dtype)
    if device.type == "cpu":
        return lower_for_cpu(network, chosen)
    lowered = lower_for_gpu(network, chosen)
    fused = any(isinstance(part, LoweredDecoder) for part in lowered.modules())
    return lowered if fused or precision != "auto" else lower_for_gpu(network, "fp32")


def weight_versions(parts: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Address and version of every weight of these modules: while they stay the same, a lowered copy is up to date.

    Read from the modules themselves: `parameters()` of a network takes longer than the encoder of a small one.
    """
    tables = [table for part in parts for table in (part._parameters, part._buffers) if table]
    weights = [weight for table in tables for weight in table.values() if weight is not None]
    return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights]


def lower_for_cpu(network: Transducer, precision: Precision) -> Transducer:
    """Packed linear layers; decoding steps and encoder blocks in native calls, where the library supports them."""
    kind = PACKED[precision]
    if not _can_pack(kind):
        if precision == "bf16":
            raise InputError("this build of torch packs no bf16 matrices", remedy="use precision fp32 or int8")
        return network
    lowered = copy.deepcopy(network).eval().requires_grad_(False)
    _replace(lowered, _join_projections)
    _replace(lowered, lambda part: _pack(part, kind))
    for stack in lowered.modules():
        if isinstance(stack, TransformerStack) and not stack.causal:
            _lower_encoder_blocks(stack)
    lower_decoders(lowered, CPU_BACKENDS.values())
    return lowered


def lower_for_gpu(network: Transducer, precision: Precision) -> Transducer:
    """Joint projections; in 16 bits decoding steps of few kernels."""
    lowered = copy.deepcopy(network).eval().requires_grad_(False)
    _replace(lowered, _join_projections)
    if precision == "bf16":
        exact = [(part, part.frequencies) for part in lowered.modules() if isinstance(part, Rotary | Sinusoidal)]
        lowered = lowered.bfloat16()
        for part, frequencies in exact:  # in bf16 neighbouring positions from 256 on would be equal
            part.frequencies = frequencies
    if next(lowered.parameters()).dtype in TENSOR_CORE_DTYPES:
        lower_decoders(lowered, GPU_BACKENDS.values())
    return lowered


def lower_decoders(network: nn.Module, backends: Iterable[BackendFactory]) -> None:
    """Lowers every decoder to the first of these backends that supports it."""
    backends = tuple(backends)

    def lowered(part: nn.Module) -> nn.Module:
        program = lower_decoder(part)
        if program is None:
            return part
        assert isinstance(part, TransformerDecoder)
        found = (backend for make in backends if (backend := make(program, part)) is not None)
        backend = next(found, None)
        return part if backend is None else with_backend(part, backend)

    _replace(network, lowered)


def _lower_encoder_blocks(stack: TransformerStack) -> None:
    """Blocks whose rows attend to their whole source become native calls."""
    if stack.window is not None or not position_in_embedding(stack.position):
        return
    for number, block in enumerate(stack.layers):
        program = lower_block(block)
        native = None if program is None else native_block(program)
        if native is not None:
            stack.layers[number] = NativeEncoderBlock(block, native)  # type: ignore[index]


def _can_pack(kind: type[PackedLinear]) -> bool:
    """Torch packs floating-point weights only with oneDNN; the native library packs fp32 everywhere."""
    by_torch = not issubclass(kind, PackedFloat32) or torch.backends.mkldnn.is_available()
    return by_torch or (kind is PackedFloat32 and library() is not None)


def _replace(network: nn.Module, change: Callable[[nn.Module], nn.Module]) -> None:
    """Replaces every module by `change(module)`; modules shared by two parents stay shared."""
    known: dict[nn.Module, nn.Module] = {}
    for parent in list(network.modules()):
        for name, part in list(parent._modules.items()):
            if part is not None:
                if part not in known:
                    known[part] = change(part)
                parent._modules[name] = known[part]


class NoDropout(nn.Identity):
    """Replaces dropout"""

    p = 0.0


def _join_projections(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.Dropout):
        return NoDropout()
    if type(part) is SelfAttention and has_projections(part):
        return JointSelfAttention(part)
    if type(part) is CrossAttention and has_projections(part):
        return JointCrossAttention(part)
    return part


def _pack(part: nn.Module, kind: type[PackedLinear]) -> nn.Module:
    if isinstance(part, nn.Linear) and part.out_features > 1:  # a single output gains nothing
        return kind(part)
    if type(part) in STEPS and kind is not PackedFloat32:  # torch's own recurrent layers are the fastest in fp32
        return PackedRecurrent(part, kind)  # type: ignore[arg-type]
    return part


class PackedRecurrent(nn.Module):
    """Replaces one layer of nn.RNN, nn.GRU or nn.LSTM, batch first, of one direction or both."""

    def __init__(self, layer: nn.RNNBase, kind: type[PackedLinear]) -> None:
        super().__init__()
        assert layer.num_layers == 1, "stacks consist of single layers"
        assert layer.batch_first
        self.step = STEPS[type(layer)]
        suffixes = ("", "_reverse") if layer.bidirectional else ("",)
        self.input_layers = nn.ModuleList(kind(_as_linear(layer, "ih", suffix)) for suffix in suffixes)
        self.hidden_layers = nn.ModuleList(kind(_as_linear(layer, "hh", suffix)) for suffix in suffixes)

    def forward(
        self, inputs: Tensor | PackedSequence, first: Tensor | LayerState
    ) -> tuple[Tensor | PackedSequence, Tensor | LayerState]:
        """As torch's layers: rows R T D, states one direction after the other (. R W)."""
        begin = (first,) if isinstance(first, Tensor) else first
        if isinstance(inputs, Tensor):
            outputs, last = self._run(inputs, begin, None)
            return outputs, last[0] if isinstance(first, Tensor) else last
        values, lengths = pad_packed_sequence(inputs, batch_first=True)
        mask = torch.arange(values.size(1)) < lengths[:, None]
        outputs, last = self._run(values, begin, mask)
        packed = pack_padded_sequence(outputs, lengths, batch_first=True, enforce_sorted=False)
        return packed, last[0] if isinstance(first, Tensor) else last

    def _run(self, values: Tensor, begin: LayerState, mask: Tensor | None) -> tuple[Tensor, LayerState]:
        real = torch.ones(values.shape[:2], dtype=torch.bool) if mask is None else mask
        outputs, ends = [], []
        for number, (input_layer, hidden_layer) in enumerate(zip(self.input_layers, self.hidden_layers, strict=True)):
            gates = input_layer(values if number == 0 else reverse(values, real))  # R T G
            state, hidden = tuple(part[number] for part in begin), []
            for step in range(values.size(1)):
                new = self.step(gates[:, step], hidden_layer(state[0]), state)
                if mask is not None:
                    new = tuple(torch.where(mask[:, step, None], one, old) for one, old in zip(new, state, strict=True))
                state = new
                hidden.append(state[0])
            sequence = torch.stack(hidden, 1)  # R T W
            outputs.append(sequence if number == 0 else reverse(sequence, real))
            ends.append(state)
        return torch.cat(outputs, -1), tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _as_linear(layer: nn.RNNBase, name: str, suffix: str) -> nn.Linear:
    """One of the matrices of a layer with its bias."""
    weight = getattr(layer, f"weight_{name}_l0{suffix}")
    linear = nn.Linear(weight.size(1), weight.size(0), bias=layer.bias)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if layer.bias:
            linear.bias.copy_(getattr(layer, f"bias_{name}_l0{suffix}"))
    return linear
