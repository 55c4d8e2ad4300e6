"""Bounded parsing of YAML and JSON: size, depth, aliases, duplicate keys.

A recipe, a run directory or a bundle may come from anywhere. Nothing in it may raise anything but an `InputError`, or
take more time and memory than its size justifies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from transduce.errors import InputError

MAX_BYTES = 2**20  # of a YAML file; the longest recipe kept here has a few thousand
MAX_DEPTH = 64  # of nested lists and mappings
MAX_NODES = 50_000  # keys and values, with every alias written out
MAX_DIGITS = 1000  # of a number
TEXT_TAGS = ("timestamp", "value")  # implicit types that are read as text: dates, and a single `=`


class YAMLSyntaxError(InputError):
    """A text that is not YAML."""


class _RefusedError(yaml.MarkedYAMLError):
    """Well-formed YAML that exceeds a limit, or that has two meanings."""

    def __init__(self, problem: str, remedy: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.remedy = remedy


class _Loader(yaml.SafeLoader):
    """Plain values only. Limits are checked where they are exceeded, before anything is expanded."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in TEXT_TAGS]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, max_nodes: int) -> None:
        super().__init__(text)
        self._max_nodes, self._count, self._depth = max_nodes, 0, 0
        self._extent: dict[int, tuple[int, int]] = {}  # id of a finished node -> its nodes and depth, aliases expanded

    # The scanner takes quadratic time in the depth, so it has to stop itself.
    def fetch_flow_collection_start(self, token: Any) -> None:
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        self._check_depth(len(self.indents))
        return super().add_indent(column)

    def _check_depth(self, depth: int, mark: Any = None) -> None:
        if depth >= MAX_DEPTH:
            raise _RefusedError(
                f"more than {MAX_DEPTH} levels of nested lists and mappings",
                "a recipe needs fewer than ten",
                mark or self.get_mark(),
            )

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if not is_alias and event.tag is not None:
            problem = f"the YAML tag {event.tag!r} is not supported"
            raise _RefusedError(problem, "write the value without a tag, or in quotes", event.start_mark)
        self._depth += 1
        self._check_depth(self._depth, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._extent:
            raise _RefusedError(f"*{event.anchor} refers to itself", "write the value out", event.start_mark)
        if not is_alias:
            self._extent[id(node)] = self._measure(node)
        count, depth = self._extent[id(node)]
        self._count += 1 if not is_alias else count
        self._check_depth(self._depth + depth, event.start_mark)
        if self._count > self._max_nodes:
            raise _RefusedError(
                f"more than {self._max_nodes:,} values" + (", with aliases written out" if is_alias else ""),
                "split the file, or repeat less of it",
                event.start_mark,
            )
        return node

    def _measure(self, node: Node) -> tuple[int, int]:
        if isinstance(node, ScalarNode):
            return 1, 1
        inner = [one for pair in node.value for one in pair] if isinstance(node, MappingNode) else node.value
        extents = [self._extent[id(one)] for one in inner]
        return 1 + sum(count for count, _ in extents), 1 + max((depth for _, depth in extents), default=0)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                before = first.setdefault((key.tag, key.value), key)
                if before is not key:
                    lines = before.start_mark.line + 1, key.start_mark.line + 1
                    raise _RefusedError(
                        f"the key {key.value[:80]!r} is given twice, in lines {lines[0]} and {lines[1]}",
                        "keep one of the two; values of both belong under one key",
                        key.start_mark,
                    )
        return node

    def construct_yaml_int(self, node: Any) -> int:
        return int(self._number(node, super().construct_yaml_int))

    def construct_yaml_float(self, node: Any) -> float:
        return float(self._number(node, super().construct_yaml_float))

    def _number(self, node: Any, construct: Any) -> Any:
        if len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value):,} digits is too long"
            raise _RefusedError(problem, "write text in quotes", node.start_mark)
        try:
            return construct(node)
        except (ValueError, OverflowError):
            problem = f"{node.value!r} is not a number"
            raise _RefusedError(problem, "write text in quotes", node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _TextLoader(_Loader):
    """Every scalar is text, so that `no` is a word and not a boolean."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


def parse_yaml(
    text: str, where: str, *, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES, as_text: bool = False
) -> Any:
    """The plain values of a YAML document. `as_text`: all scalars are texts."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise InputError(f"larger than {max_bytes:,} bytes", where=where, remedy="split it, or shorten it")
    try:
        return (_TextLoader if as_text else _Loader)(text, max_nodes).get_single_data()
    except _RefusedError as error:
        line = error.problem_mark.line + 1  # type: ignore[union-attr]
        raise InputError(str(error.problem), where=f"{where}:{line}", remedy=error.remedy) from None
    except yaml.YAMLError as error:
        problem, line = _explain(error, text)
        raise YAMLSyntaxError(
            f"not readable as YAML: {problem}", where=f"{where}:{line}", remedy="correct it there"
        ) from None


def _explain(error: yaml.YAMLError, text: str) -> tuple[str, int]:
    """The problem on one line, and the number of the line where it is."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        parts = (error.context, error.problem, error.note)
        return ", ".join(" ".join(part.split()) for part in parts if part), (mark.line if mark else 0) + 1
    position = getattr(error, "position", 0)
    return str(error).partition("\n")[0], text.count("\n", 0, position) + 1


def read_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    text = _read(path, MAX_BYTES)
    try:
        return parse_yaml(text.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        remedy = "save the file as UTF-8"
        raise InputError(f"not readable as YAML: {error}", where=f"{path}:{line}", remedy=remedy) from None


def parse_json(content: bytes | str, where: str, *, remedy: str = "fetch it again") -> Any:
    """The value of a JSON document."""
    try:
        return json.loads(content)
    except RecursionError:
        raise InputError("not readable as JSON: too many nested brackets", where=where, remedy=remedy) from None
    except ValueError as error:
        raise InputError(f"not readable as JSON: {error}", where=where, remedy=remedy) from None


def read_json(path: Path, *, max_bytes: int, remedy: str = "fetch it again") -> Any:
    """The content of a JSON file."""
    return parse_json(_read(path, max_bytes), str(path), remedy=remedy)


def _read(path: Path, max_bytes: int) -> bytes:
    """The content of a file that exists; nothing is read of a file that is too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if len(content) > max_bytes:
        raise InputError(f"larger than {max_bytes:,} bytes", where=str(path), remedy="this is no such file")
    return content
