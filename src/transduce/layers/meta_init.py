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


class Unfilled(TorchFunctionMode):
    """Numbers that nobody will read are not drawn: on the meta device that would import torch's compiler, a second.

    So would any sum there. What a part computes when it is built, such as the frequencies of its positions, begins with
    a range: small, and made as elsewhere.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange:
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


@contextmanager
def outlined() -> Iterator[None]:
    """Modules built here have no values. A model of too many parts is refused while it is built."""
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
        with torch.device("meta"), Unfilled():
            yield
    finally:
        counting.remove()
