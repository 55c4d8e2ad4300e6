"""The generated reference pages in docs/ are up to date."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert SPEC is not None
assert SPEC.loader is not None
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


@pytest.mark.parametrize("page", generate.PAGES)
def test_page_equals_the_generated_one(page: str) -> None:
    committed = (DOCS / page).read_text(encoding="utf-8")
    assert committed == generate.PAGES[page](), f"docs/{page} is out of date: run python docs/generate.py"


def test_every_command_and_public_name_is_documented() -> None:
    import transduce
    from transduce.cli import app

    commands = (DOCS / "commands.md").read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert f"### transduce {command.name}\n" in commands
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in transduce.__all__:
        assert f"### {name}\n" in api


def test_the_installation_page_lists_every_extra_of_users() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`transduce\[(\w+)\]`", page))
    assert listed == set(project["optional-dependencies"]) - {"bench", "dev", "fuzz"}
