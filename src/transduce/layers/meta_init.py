"""Construction of modules on the meta device: shapes without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
    with torch.device("meta"), Unfilled():
        yield
