"""A trained network in, the same network for generation out: packed matrices, joint projections, no dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from transduce.attention.multihead import CrossAttention
from transduce.attention.positions import Rotary, Sinusoidal
from transduce.attention.self_attention import SelfAttention
from transduce.errors import InputError
from transduce.inference.lowering.fused import fuse
from transduce.inference.lowering.joint_projections import JointMemory, JointSelf, projects
from transduce.inference.lowering.lean import lean
from transduce.inference.lowering.proposing import proposing
from transduce.kernels.native.library import library
from transduce.kernels.packed_linear import PackedBFloat16, PackedFloat32, PackedInt8, PackedLinear
from transduce.layers.recurrent import STEPS, LayerState, reverse
from transduce.model import Transducer


class PackedCells(nn.Module):
    """Stands for one layer of nn.RNN, nn.GRU or nn.LSTM, batch first, of one direction or both."""

    def __init__(self, layer: nn.RNNBase, kind: type[PackedLinear]) -> None:
        super().__init__()
        assert layer.num_layers == 1, "a stack is made of single layers"
        assert layer.batch_first
        self.step = STEPS[type(layer)]
        ends = ("", "_reverse") if layer.bidirectional else ("",)
        self.ahead = nn.ModuleList(kind(_as_linear(layer, "ih", end)) for end in ends)
        self.back = nn.ModuleList(kind(_as_linear(layer, "hh", end)) for end in ends)

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
        for number, (ahead, back) in enumerate(zip(self.ahead, self.back, strict=True)):
            gates = ahead(values if number == 0 else reverse(values, real))  # R T G
            state, made = tuple(part[number] for part in begin), []
            for place in range(values.size(1)):
                new = self.step(gates[:, place], back(state[0]), state)
                if mask is not None:
                    new = tuple(
                        torch.where(mask[:, place, None], one, old) for one, old in zip(new, state, strict=True)
                    )
                state = new
                made.append(state[0])
            found = torch.stack(made, 1)  # R T W
            outputs.append(found if number == 0 else reverse(found, real))
            ends.append(state)
        return torch.cat(outputs, -1), tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _as_linear(layer: nn.RNNBase, name: str, end: str) -> nn.Linear:
    """One of a layer's matrices with its bias."""
    weight = getattr(layer, f"weight_{name}_l0{end}")
    linear = nn.Linear(weight.size(1), weight.size(0), bias=layer.bias)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if layer.bias:
            linear.bias.copy_(getattr(layer, f"bias_{name}_l0{end}"))
    return linear


Precision = Literal["auto", "fp32", "bf16", "int8"]
KINDS: dict[str, type[PackedLinear]] = {"fp32": PackedFloat32, "bf16": PackedBFloat16, "int8": PackedInt8}


def for_generation(network: Transducer, precision: Precision = "auto") -> Transducer:
    """The network with weights that can be read faster and learn no more; the one given stays as it is.

    `auto` changes no result beyond a rounding: fp32. `bf16` and `int8` are the matrices' alone: embeddings, norms,
    attention and scores stay in fp32. On a GPU bf16 is everything but the sums.
    """
    if precision not in get_args(Precision):
        raise InputError(f"unknown precision {precision!r}", remedy=f"use {', '.join(get_args(Precision))}")
    device = next(network.parameters()).device.type
    if device != "cpu":
        if precision == "int8":
            raise InputError(f"int8 is for the CPU, not for {device}", remedy="use precision bf16 or auto")
        return for_gpu(network, precision)
    kind = KINDS["fp32" if precision == "auto" else precision]
    if not _can_pack(kind):
        if precision == "bf16":
            raise InputError("this build of torch packs no bf16 matrices", remedy="use precision fp32 or int8")
        return network
    made = copy.deepcopy(network).eval().requires_grad_(False)
    _replace(made, _prepared)
    _replace(made, lambda parent, part: _packed(part, kind))
    lean(made)
    _replace(made, lambda parent, part: proposing(part))
    return made


def for_gpu(network: Transducer, precision: Precision) -> Transducer:
    """The same with joint projections and, in half precision, the steps of a search in few kernels."""
    made = copy.deepcopy(network).eval().requires_grad_(False)
    _replace(made, _prepared)
    if precision == "bf16":
        exact = [(part, part.frequencies) for part in made.modules() if isinstance(part, Rotary | Sinusoidal)]
        made = made.bfloat16()
        for part, frequencies in exact:  # in bf16 a place and the next one would be the same number from 256 on
            part.frequencies = frequencies
    if next(made.parameters()).dtype in (torch.bfloat16, torch.float16):
        fuse(made)
    return made


def _can_pack(kind: type[PackedLinear]) -> bool:
    """Torch packs floating-point numbers only where it was built with oneDNN; our own kernels fp32 everywhere."""
    by_torch = not issubclass(kind, PackedFloat32) or torch.backends.mkldnn.is_available()
    return by_torch or (kind is PackedFloat32 and library() is not None)


def _replace(network: nn.Module, change: Callable[[nn.Module, nn.Module], nn.Module]) -> None:
    """Every part by what becomes of it; what two parents share, they still share."""
    known: dict[nn.Module, nn.Module] = {}
    for parent in list(network.modules()):
        for name, part in list(parent._modules.items()):
            if part is not None:
                if part not in known:
                    known[part] = change(parent, part)
                parent._modules[name] = known[part]


def _prepared(parent: nn.Module, part: nn.Module) -> nn.Module:
    if isinstance(part, nn.Dropout):
        return nn.Identity()
    if type(part) is SelfAttention and projects(part):
        return JointSelf(part)
    if type(part) is CrossAttention and projects(part):
        return JointMemory(part)
    return part


def _packed(part: nn.Module, kind: type[PackedLinear]) -> nn.Module:
    if isinstance(part, nn.Linear) and part.out_features > 1:  # a single vector has nothing to gain
        return kind(part)
    if type(part) in STEPS and kind is not PackedFloat32:  # torch's own cells are the fastest in fp32
        return PackedCells(part, kind)  # type: ignore[arg-type]
    return part
