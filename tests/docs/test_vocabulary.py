"""Retired words stay out of names, module docstrings, tests and recipes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "transduce"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Names of modules that only insiders could guess.
MODULES = {
    "aligned", "assembling", "beginning", "blame", "both_ways", "changes", "choose", "choosing", "commands", "copying",
    "drafting", "drawing", "draws", "entrants", "few", "fetching", "filed", "filling", "films", "finding", "fitting",
    "fronts", "joined", "joint", "keeper", "kept", "lean", "levelling", "links", "look", "made", "matching", "merges",
    "moves", "moving", "narrowed", "narrowing", "opcodes", "opening", "origins", "orphans", "outline", "own", "parting",
    "paths", "perceived", "pictures", "plain", "predict", "products", "proposing", "reading", "refilling",
    "reread", "restore", "rounding", "rows", "running", "searching", "sets", "settling", "several", "shelves", "show",
    "sound", "spectra", "stepping", "telling", "texts", "tones", "traits", "unknowns", "unpacking", "work",
    "utils", "helpers", "common", "misc",
}  # fmt: skip
# Names of classes, functions, parameters and attributes.
NAMES = {
    "Asked", "Blocks", "Copying", "Drawn", "Filler", "Front", "Given", "Joint", "Keeper", "Lists", "Live", "Made",
    "Moves", "Neighbours", "Orphan", "Own", "Paths", "Passed", "Proposal", "Read", "Reader", "Recorder", "Rereader",
    "Rule", "Scene", "Scribe", "Sight", "Speaker", "Untold", "asked", "attend_few", "begun", "both_ways", "go_on",
    "key_heads", "level_slopes", "levelled", "look_back", "look_up", "never_first", "own",
    "proposes", "said", "settle", "settled", "slopes", "speechless", "steady", "think", "told",
}  # fmt: skip
# Openings of the form "X in, Y out".
DIALECT = re.compile(r"\bin[,;:] .*\bout\b|\benters?\b.*\bleaves?\b|\bNothing (in|enters)\b| -> ")
KEYS = {
    "begun", "closed", "copying", "epsilon", "fitted", "form", "growth", "hidden", "inputs", "key_heads", "longest",
    "never", "never_first", "numbered", "over", "own", "passage", "places", "pool", "reach", "reader",
    "scaled", "smooth", "spread", "stored", "through",
}  # fmt: skip


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(tree: ast.Module) -> set[str]:
    """Names of classes, functions, parameters, and attributes and variables of classes and modules."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_names_and_first_lines_use_the_terms_of_the_field(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    assert not MODULES & set(parts)
    assert not NAMES & defined(tree_of(path))
    first = (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]
    assert first, "a module opens with a line that names its subject"
    assert not DIALECT.search(first), first


RETIRED_TEST_FILES = {"test_drafting_laws", "test_recorded_search", "test_refilling"}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_tests_use_the_terms_of_the_field(path: Path) -> None:
    assert path.stem not in RETIRED_TEST_FILES
    assert not NAMES & defined(tree_of(path))
    if path.name.startswith("test_"):
        first = (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]
        assert first, "a file of tests opens with a line that names its subject"


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys_of(inner)}
    return {key for inner in value for key in keys_of(inner)} if isinstance(value, list) else set()


def test_recipes_use_the_terms_of_the_field() -> None:
    import yaml

    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        assert not KEYS & keys_of(yaml.safe_load(path.read_text())), path


def test_options_of_parts_use_the_terms_of_the_field() -> None:
    from transduce.recipe.registry import REGISTRIES, options

    for registry in REGISTRIES.values():
        for kind, part in registry.items():
            assert not KEYS & options(part).keys(), kind


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, tree in ((path, tree_of(path)) for path in FILES):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_the_rules_find_what_they_forbid() -> None:
    assert DIALECT.search("Rows in, rows out, through a stack of blocks.")
    assert DIALECT.search("A recipe enters; a run leaves.")
    assert not DIALECT.search("Beam search: pruning and length penalty in one file.")
    assert defined(ast.parse("class Own:\n    said: int\n    def f(self, told): self.asked = 1")) >= {
        "Own", "said", "told", "asked",
    }  # fmt: skip
