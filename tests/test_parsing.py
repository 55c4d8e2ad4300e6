"""YAML and JSON from anywhere: a value or an InputError with file, line and remedy, in bounded time."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import transduce
from transduce.errors import InputError
from transduce.parsing import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_json, parse_yaml, read_json, read_yaml

LETTERS = "abcdefghijkl"


def nested(template: str, first: str, times: int = 10) -> str:
    """Each line names the one before it ten times: 10 ** 11 values when it is written out."""
    lines = [f"a: &a {first}"]
    for before, letter in pairwise(LETTERS):
        lines.append(f"{letter}: &{letter} " + template.format(", ".join([f"*{before}"] * times)))
    return "\n".join(lines)


REFUSED = {
    "tag": ("a: 1\nb: !!python/object/apply:os.system [true]", 2, "tag"),
    "own tag": ("a: !mine 1", 1, "tag"),
    "tag that does not fit": ("a: !!int x", 1, "tag"),
    "5,000 digits": ("a: " + "9" * 5000, 1, "5,000 digits"),
    "base 60": ("a: 1" + ":1" * 100_000, 1, "digits"),
    "digits without a digit": ("a: 1\nb: 0x_", 2, "not a number"),
    "self-reference": ("a: 1\nb: &b [*b]", 2, "refers to itself"),
    "self-reference in a merge": ("a: &a {<<: *a}", 1, "refers to itself"),
    "brackets": ("[" * 30_000, 1, "levels"),
    "braces": ("{a: " * 30_000, 1, "levels"),
    "dashes": ("- " * 30_000, 1, "levels"),
    "depth through aliases": (nested("[[[[[[[[{}]]]]]]]]", "1", times=1), 9, "levels"),
    "aliases": (nested("[{}]", "[x, x]"), 6, "values"),
    "merge keys": (nested("{{<<: [{}], z: 1}}", "{k: 1}"), 6, "values"),
    "values": ("a: [" + "1," * (MAX_NODES + 5) + "]", 1, "values"),
    "duplicate": ("training:\n  steps: 1\nmodel: {}\ntraining:\n  seed: 2", 4, "lines 1 and 4"),
    "nested duplicate": ("a:\n  b: 1\n  c: 2\n  b: 3", 4, "lines 2 and 4"),
    "duplicate in braces": ("a: {b: 1, b: 2}", 1, "'b' is given twice"),
    "duplicate in quotes": ("b: 1\n'b': 2", 2, "lines 1 and 2"),
    "two merges": ("a: &a {k: 1}\nb:\n  <<: *a\n  <<: *a", 4, "lines 3 and 4"),
    "unknown alias": ("a: *b", 1, "undefined alias"),
    "NUL": ("a: 1\nb: \0", 2, "unacceptable character"),
    "two documents": ("a: 1\n---\nb: 1", 2, "another document"),
    "open bracket": ("a: 1\nb: [1", 2, "not readable as YAML"),
    "list as key": ("? [a]\n: 1", 1, "unhashable"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_yaml_that_is_refused_names_file_line_and_remedy(name: str, tmp_path: Path) -> None:
    text, line, problem = REFUSED[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert caught.value.where == f"{path}:{line}"
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_yaml_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        read_yaml(path)
    with pytest.raises(InputError, match="larger than"):
        parse_yaml("#" * (MAX_BYTES + 1), "recipe")


def test_yaml_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes("a: 1\nb: ü\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8") as caught:
        read_yaml(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2001-99-99", {"a": "2001-99-99"}),  # a date is text, valid or not
        ("a: 2001-01-01", {"a": "2001-01-01"}),
        ("a: =", {"a": "="}),
        ("a: &a {k: 1, l: 2}\nb: {<<: *a, k: 3}", {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}}),
        ("a: &a [1, 2]\nb: [*a, *a]", {"a": [1, 2], "b": [[1, 2], [1, 2]]}),
        ("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), None),
        ("\ufeffa: 1", {"a": 1}),
        ("", None),
    ],
)
def test_yaml_that_is_read(text: str, value: Any) -> None:
    found = parse_yaml(text, "recipe")
    if value is not None:
        assert found == value


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


@given(VALUES)
def test_plain_values_are_those_of_the_library(value: Any) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    assert parse_yaml(text, "recipe") == yaml.safe_load(text)


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%,?<= \n\t01.~", max_size=60))
def test_any_text_gives_a_value_or_an_input_error(text: str) -> None:
    with suppress(InputError):
        parse_yaml(text, "recipe")


@pytest.mark.parametrize("content", [b"[" * 30_000, b'{"a":' * 30_000, b"9" * 5000, b"{", b"\xff\xfe", b"", b"nope"])
def test_json_that_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not readable as JSON") as caught:
        read_json(path, max_bytes=2**20)
    assert caught.value.where == str(path)
    assert caught.value.remedy
    with pytest.raises(InputError, match="not readable as JSON"):
        parse_json(content, "here")


def test_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps([0] * 100))
    with pytest.raises(InputError, match="larger than 64 bytes"):
        read_json(path, max_bytes=64)


def test_no_other_module_reads_yaml() -> None:
    source = Path(transduce.__file__).parent
    readers = re.compile(r"yaml\.(\w*load\w*|parse|scan|compose|\w*Loader)")
    others = [path.name for path in source.rglob("*.py") if readers.search(path.read_text(encoding="utf-8"))]
    assert others == ["parsing.py"]
