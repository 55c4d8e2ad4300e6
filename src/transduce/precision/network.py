"""A trained network in, the same network for generation out: packed matrices, joint projections, no dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from transduce.attention.multihead import MultiHead
from transduce.attention.own import SelfAttention
from transduce.attention.positions import Rotary, Sinusoidal
from transduce.errors import InputError
from transduce.layers.stepping import STEPS
from transduce.model import Transducer
from transduce.native.library import library
from transduce.precision.cells import PackedCells
from transduce.precision.fused import fuse
from transduce.precision.joint import JointMemory, JointSelf, projects
from transduce.precision.lean import lean
from transduce.precision.matrices import BFloat16, Float32, Int8, Packed
from transduce.precision.proposing import proposing

Precision = Literal["auto", "fp32", "bf16", "int8"]
KINDS: dict[str, type[Packed]] = {"fp32": Float32, "bf16": BFloat16, "int8": Int8}


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


def _can_pack(kind: type[Packed]) -> bool:
    """Torch packs floating-point numbers only where it was built with oneDNN; our own kernels fp32 everywhere."""
    by_torch = not issubclass(kind, Float32) or torch.backends.mkldnn.is_available()
    return by_torch or (kind is Float32 and library() is not None)


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
    if type(part) is MultiHead and projects(part):
        return JointSelf(part) if isinstance(parent, SelfAttention) else JointMemory(part)
    return part


def _packed(part: nn.Module, kind: type[Packed]) -> nn.Module:
    if isinstance(part, nn.Linear) and part.out_features > 1:  # a single vector has nothing to gain
        return kind(part)
    if type(part) in STEPS and kind is not Float32:  # torch's own cells are the fastest in fp32
        return PackedCells(part, kind)  # type: ignore[arg-type]
    return part
