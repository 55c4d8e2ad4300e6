"""Construction of modules on the meta device: shapes without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from transduce.errors import InputError

MAX_TENSORS = 20_000  # parameters of a model: a Transformer of a thousand layers has fewer


class SkipInitialisation(TorchFunctionMode):
    """Random initialisation does nothing: on the meta device it would import torch's compiler, which takes a second.

    So would arithmetic there. Tensors that a constructor computes, such as the frequencies of positions, begin with a
    range; it is made on the CPU, so that the rest is computed there too.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange:
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Modules built inside have shapes and no values. A model with too many tensors is refused while it is built."""
    count = 0

    def check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > MAX_TENSORS:
            raise InputError(
                f"the model would have more than {MAX_TENSORS:,} weight tensors", remedy="reduce the number of layers"
            )

    counting = register_module_parameter_registration_hook(check)
    try:
        with torch.device("meta"), SkipInitialisation():
            yield
    finally:
        counting.remove()
