"""A model and one computation with it enter; the name of the first module whose output is not finite leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def first_bad(model: nn.Module, run: Callable[[], Tensor]) -> str:
    """Modules report when they are done, so the innermost comes first. `run` gives the loss; "" when all is well.

    Minus infinity alone is what masked scores look like, so a module that gives it is named only if nothing worse
    is found.
    """
    bad: list[str] = []
    suspect: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not tensor.is_floating_point() or tensor.isfinite().all():
                    continue
                masked = not (tensor.isnan() | tensor.isposinf()).any()
                (suspect if masked else bad).append(name or type(module).__name__)

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            loss = run()
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return bad[0]
    if loss.isfinite().all():
        return ""
    return suspect[0] if suspect else "the loss"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
