"""Option groups: small dataclasses of options whose fields a recipe gives flat."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

Init = Callable[..., None]


def flat_options(init: Init) -> Init:
    """An `__init__` whose keyword-only dataclass parameters are given as their fields.

    With `norm: NormOptions` in the signature, callers and recipes write `norm_kind=..., norm_eps=...`. The signature
    and the annotations of the result are flat, so the registry finds the type and default of every option.
    """
    hints = get_type_hints(init, include_extras=True)
    parameters = inspect.signature(init).parameters.values()
    groups = {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and is_dataclass(hints[p.name])}
    flat: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            flat += _field_parameters(groups[parameter.name])
        else:
            flat.append(parameter.replace(annotation=hints.get(parameter.name, parameter.annotation)))

    @wraps(init)
    def construct(self: Any, *given: Any, **options: Any) -> None:
        grouped = {}
        for name, group in groups.items():
            given_fields = {field.name for field in fields(group)} & options.keys()
            grouped[name] = group(**{option: options.pop(option) for option in given_fields})
        init(self, *given, **grouped, **options)

    construct.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    construct.__annotations__ = {p.name: p.annotation for p in flat if p.name != "self"}
    return construct


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
