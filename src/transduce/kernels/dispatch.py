"""Dispatch of operations to backends, and the conditions under which a fused kernel applies.

An operation is computed by the first of its backends that accepts the arguments, otherwise by its torch reference.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from transduce.kernels.native.library import loaded

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16)  # of matrix products in Triton kernels


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation; `run` takes the arguments of the reference."""

    name: str  # "triton" and "native" (C) need a compiler; every other one is written with torch's operations
    accepts: Callable[..., bool]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """A torch reference and its faster backends, in order of preference."""

    name: str
    reference: Callable[..., Any]
    backends: tuple[Backend, ...] = ()

    def __call__(self, *args: Any) -> Any:
        for backend in self.backends:
            if backend.accepts(*args):
                return backend.run(*args)
        return self.reference(*args)


@dataclass(frozen=True)
class TrainingPass:
    """What the operations of one training pass share."""

    captured: bool = False  # True: the pass is captured as a CUDA graph
    native: bool = True  # False: without the C kernels
    cast_weights: Mapping[Tensor, Tensor] = field(default_factory=dict)  # see linear.py


_EAGER = TrainingPass()
_PASS: ContextVar[TrainingPass] = ContextVar("training_pass", default=_EAGER)


def current_pass() -> TrainingPass:
    return _PASS.get()


@contextmanager
def training_pass(**changes: Any) -> Iterator[None]:
    """Changes fields of the current pass for the calls inside."""
    token = _PASS.set(replace(_PASS.get(), **changes))
    try:
        yield
    finally:
        _PASS.reset(token)


def captured_pass() -> Any:
    """Kernels launched inside are captured, to be replayed without Python: only there does Triton pay in training.

    Launched from Python, a Triton kernel costs more than one of torch's, and a small model waits for launches anyway:
    a base model in batches of 32,768 tokens trained at 1.84 million tokens a second captured, and at 0.41 million with
    the same kernels launched one by one.
    """
    return training_pass(captured=True)


@cache
def has_triton() -> bool:
    """Whether GPU kernels can be compiled: some builds of torch come without Triton."""
    return find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels can read x."""
    return x.is_cuda and has_triton()


def fused_training(x: Tensor) -> bool:
    """Whether Triton kernels apply to an operation of training on x: in a captured pass on a GPU."""
    if compiling():  # torch.compile fuses by itself; tested first, because it cannot trace the rest
        return False
    return torch.is_grad_enabled() and _PASS.get().captured and runs_triton(x)


def fused_decoding(x: Tensor) -> bool:
    """Whether Triton kernels apply to an operation of a decoding step on x: in 16 bits on a GPU, without gradients."""
    return runs_triton(x) and x.dtype in TENSOR_CORE_DTYPES and not torch.is_grad_enabled()


def native_kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """The C kernels, where they are loaded and can read these tensors."""
    if compiling():
        return None
    plain = all(x.is_cpu and x.dtype in NATIVE_DTYPES and type(x) in (Tensor, nn.Parameter) for x in tensors)
    return loaded() if plain and _PASS.get().native else None


def compiling() -> bool:
    """Whether torch.compile traces this call: fused kernels and data-dependent shortcuts are then left out."""
    return torch.compiler.is_compiling()


def host_may_read(values: Tensor) -> bool:
    """Whether the host may read a tensor now: reading synchronises, which CUDA graph capture forbids."""
    if compiling():  # checked first: the next check breaks the graph of the compiler
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def runs_asynchronously(x: Tensor) -> bool:
    """Whether the host runs ahead of the operations on x, so that reading a value makes it wait: on a GPU."""
    return x.is_cuda


def has_hooks(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its forward: adapters are attached as hooks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether W x + b is all that the layer computes, so that an operation may read its weights directly."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The precision in which a matrix is multiplied with x: that of autocast where it is enabled."""
    device = x.device.type
    lowered = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if lowered else x.dtype


def to_matmul_dtype(x: Tensor) -> Tensor:
    """x in the precision of matrix products: an input of several products is cast once."""
    return x.to(matmul_dtype(x))


def _use_one_thread() -> None:
    """Fork safety. The threads of an OpenMP pool do not survive a fork: a child that asks for them waits for ever, as
    after `torch.set_num_threads(2)`, a generation, and `os.fork()` or `multiprocessing` with the start method `fork`.
    With one thread it asks for none. A child of `spawn` or `forkserver` has a pool of its own and all its threads."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_use_one_thread)
