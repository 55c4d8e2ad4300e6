"""Overrides of a recipe: `key.path=value`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transduce.errors import InputError
from transduce.parsing import MAX_DEPTH, YAMLSyntaxError, parse_yaml

FORM = "write it as key.path=value"


def override(content: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`training.steps=100` sets one value; the value is read as YAML, so lists and mappings work too.

    A part given by its name alone (`context: bahdanau`) takes options as if it were a mapping. A part that gets
    another kind loses the options of the old kind and takes those that other overrides set.
    """
    result: dict[str, Any] = _copy(content)
    applied: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the override {item!r}", remedy=FORM)
        path = key.split(".")
        if len(path) > MAX_DEPTH:
            raise InputError(f"the key of an override has {len(path):,} parts", where=key[:80], remedy=FORM)
        try:
            value = parse_yaml(text, key)
        except YAMLSyntaxError:
            value = text
        if _changes_kind(result, path, value):
            _set(result, path[:-1], {})
            for earlier, given in applied:
                if earlier[: len(path) - 1] == path[:-1] and len(earlier) >= len(path):
                    _set(result, earlier, given)
        _set(result, path, value)
        applied.append((path, value))
    return result


def _set(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = content.get(name)
        if isinstance(inner, str) and _of_part(path):
            inner = {"kind": inner}
        content[name] = content = inner if isinstance(inner, dict) else {}
    content[last] = value


def _of_part(path: list[str]) -> bool:
    """Whether a key belongs to a part, whose options are those of its kind."""
    return path[:1] == ["model"] or path[:2] in (["training", "objective"], ["generation", "strategy"])


def _changes_kind(content: Mapping[str, Any], path: list[str], value: Any) -> bool:
    """Whether this override gives a part another kind than it has."""
    if path[-1] != "kind" or not _of_part(path):
        return False
    part: Any = content
    for name in path[:-1]:
        part = part.get(name) if isinstance(part, Mapping) else None
    default = "cross_entropy" if path[:-1] == ["training", "objective"] else value  # the kind where none is given
    kind = part.get("kind", default) if isinstance(part, Mapping) else part
    return kind is not None and kind != value


def _copy(content: Any) -> Any:
    return {key: _copy(value) for key, value in content.items()} if isinstance(content, Mapping) else content
