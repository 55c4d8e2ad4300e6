"""Every training command on the pages of the ladder is a recipe that can be built, and every page is on the map."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from transduce.recipe import override, parse
from transduce.recipe.build import complete_recipe

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "docs" / "ladder"


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in sorted(LADDER.glob("*.md")):
        for line in re.findall(r"^transduce train docs/ladder/.*$", page.read_text(), re.MULTILINE):
            words = shlex.split(line, comments=True)
            found.append((words[2], [word for word in words[3:] if "=" in word]))
    return found


@pytest.mark.parametrize(("recipe", "settings"), commands(), ids=lambda part: part if isinstance(part, str) else "")
def test_commands_make_recipes(recipe, settings):
    content = yaml.safe_load((ROOT / recipe).read_text())
    complete_recipe(parse(override(content, settings), where=recipe))


def test_every_page_is_on_the_map():
    map_ = (LADDER / "README.md").read_text()
    pages = {page.name for page in LADDER.glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name}" not in map_} == set()
    assert len(commands()) > 15
    assert not [page.name for page in LADDER.glob("*.md") if "{{" in page.read_text()]
