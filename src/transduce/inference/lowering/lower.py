"""Lowering of a trained network for inference: joint projections, packed linear layers, decoder programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from transduce.attention.multihead import CrossAttention
from transduce.attention.positions import Rotary, Sinusoidal, position_in_embedding
from transduce.attention.self_attention import SelfAttention
from transduce.decoders.transformer import TransformerDecoder
from transduce.errors import InputError
from transduce.inference.lowering.backends import (
    CPU_BACKENDS,
    GPU_BACKENDS,
    BackendFactory,
    NativeEncoderBlock,
    native_block,
)
from transduce.inference.lowering.program import (
    JointCrossAttention,
    JointSelfAttention,
    LoweredDecoder,
    has_projections,
    lower_block,
    lower_decoder,
    with_backend,
)
from transduce.kernels.dispatch import TENSOR_CORE_DTYPES
from transduce.kernels.native.library import library
from transduce.kernels.packed_linear import PackedBFloat16, PackedFloat32, PackedInt8, PackedLinear
from transduce.layers.recurrent import STEPS, LayerState, reverse
from transduce.layers.transformer import TransformerStack
from transduce.model import Transducer

Precision = Literal["auto", "fp32", "bf16", "int8"]
PACKED: dict[str, type[PackedLinear]] = {"fp32": PackedFloat32, "bf16": PackedBFloat16, "int8": PackedInt8}


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


def weight_versions(network: nn.Module) -> list[tuple[int, int]]:
    """Place and number of changes of every weight: while they stay the same, a lowered copy is up to date."""
    weights = [*network.parameters(), *network.buffers()]
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
