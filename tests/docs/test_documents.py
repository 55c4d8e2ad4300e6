"""What the documents show works: recipes complete, commands parse, Python runs, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
import typer
import yaml

from transduce.cli import app
from transduce.cli.train import TASKS
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe
from transduce.synthetic.dates import split

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        for number, content in enumerate(re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)):
            found.append((f"{document.relative_to(ROOT)}#{number}", content))
    return found


def commands() -> list[tuple[str, str]]:
    found = []
    for name, content in blocks("sh"):
        for line in content.splitlines():
            for part in re.split(r"\s[|>]\s", line.partition(" #")[0]):
                if part.strip().startswith("transduce "):
                    found.append((name, part.strip()))
    return found


@pytest.mark.parametrize(("name", "content"), blocks("yaml"))
def test_recipes_complete(name, content):
    section = {"model": {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "recurrent"}}, **yaml.safe_load(content)}
    complete_recipe(parse(section, where=name), where=name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kept_recipes_complete(path):
    complete_recipe(parse(yaml.safe_load(path.read_text()), where=str(path)))


@pytest.fixture(scope="module")
def group():
    """All commands; building them takes longer than parsing a line."""
    return typer.main.get_command(app)


@pytest.mark.parametrize(("name", "line"), commands())
def test_commands_parse(group, name, line):
    _, command, *arguments = shlex.split(line)
    with suppress(typer.Exit):  # of an option that prints and ends, such as --list
        group.commands[command].make_context(command, arguments)  # an unknown option or a missing argument raises


def test_commands_were_found():
    assert len(commands()) >= 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which runs/demo exists: the demo's model, hardly trained."""
    place = tmp_path_factory.mktemp("documents")
    names = ("train", "dev", "test")
    for name, examples in zip(names, split(200, 20, 20), strict=True):
        (place / f"{name}.tsv").write_text("".join(f"{one.source}\t{one.target}\n" for one in examples))
    recipe = {**TASKS["dates"].recipe, "data": {name: str(place / f"{name}.tsv") for name in names}}
    recipe["data"]["cache"] = str(place / "cache")
    recipe["training"] = {**recipe["training"], "steps": 3, "validate_every": 3, "checkpoint_every": 3}
    from transduce.training.experiment import train

    train(recipe, place / "runs" / "demo")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content"), blocks("python"))
def test_python_runs(name, content, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(content, name, "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


SOURCE = ROOT / "src" / "transduce"
TOUR = (ROOT / "docs" / "tour.md").read_text()


def test_the_files_that_the_tour_names_exist():
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.py|/))`", TOUR)
    assert len(named) > 50
    assert [name for name in named if not any((base / name).exists() for base in (SOURCE, ROOT))] == []


def test_the_tour_names_every_room():
    rooms = [path for path in SOURCE.iterdir() if not path.name.startswith("__") and path.name != "py.typed"]
    missing = [path.name for path in rooms if path.name not in TOUR]
    assert missing == []
