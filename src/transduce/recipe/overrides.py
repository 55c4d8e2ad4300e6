"""A mapping and `key.path=value` settings in, the mapping with those changes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from transduce.errors import InputError


def override(content: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`training.steps=100` sets one value; the value is read as YAML, so lists and mappings work too.

    A part given by its name alone (`context: bahdanau`) takes options as if it were a mapping. A part that
    is given another kind begins afresh: what was set for the old kind goes, what is set beside the new one counts.
    """
    result: dict[str, Any] = _copy(content)
    done: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the setting {item!r}", remedy="write it as key.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        path = key.split(".")
        if _renews(result, path, value):
            _put(result, path[:-1], {})
            for earlier, given in done:
                if earlier[: len(path) - 1] == path[:-1] and len(earlier) >= len(path):
                    _put(result, earlier, given)
        _put(result, path, value)
        done.append((path, value))
    return result


def _put(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = content.get(name)
        if isinstance(inner, str) and _of_part(path):
            inner = {"kind": inner}
        content[name] = content = inner if isinstance(inner, dict) else {}
    content[last] = value


def _of_part(path: list[str]) -> bool:
    """Whether a key belongs to a part, whose options are those of its kind."""
    return path[:1] == ["model"] or path[:2] == ["training", "objective"]


def _renews(content: Mapping[str, Any], path: list[str], value: Any) -> bool:
    """Whether this setting gives a part another kind than it has."""
    if path[-1] != "kind" or not _of_part(path):
        return False
    place: Any = content
    for name in path[:-1]:
        place = place.get(name) if isinstance(place, Mapping) else None
    given = "cross_entropy" if path[:-1] == ["training", "objective"] else value  # what a part without a kind is
    kind = place.get("kind", given) if isinstance(place, Mapping) else place
    return kind is not None and kind != value


def _copy(content: Any) -> Any:
    return {key: _copy(value) for key, value in content.items()} if isinstance(content, Mapping) else content
