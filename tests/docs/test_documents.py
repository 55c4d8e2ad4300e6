"""What the documents show works: recipes complete, commands parse, Python runs, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from transduce.build import complete_recipe
from transduce.cli import app, demo
from transduce.recipe import parse
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
            for part in re.split(r"\s\|\s", line.partition(" #")[0]):
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


@pytest.mark.parametrize(("name", "line"), commands())
def test_commands_parse(name, line):
    _, command, *arguments = shlex.split(line)
    group = typer.main.get_command(app)
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
    recipe = {**demo.TASKS["dates"].recipe, "data": {name: str(place / f"{name}.tsv") for name in names}}
    recipe["data"]["cache"] = str(place / "cache")
    recipe["training"] = {**recipe["training"], "steps": 3, "validate_every": 3, "checkpoint_every": 3}
    from transduce.training.experiment import train

    train(recipe, place / "runs" / "demo")
    return place


@pytest.mark.parametrize(("name", "content"), blocks("python"))
def test_python_runs(name, content, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(content, name, "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def rooms() -> list[str]:
    """The modules of the package in the order of the tour's table."""
    tour = (ROOT / "docs" / "tour.md").read_text()
    table = tour[tour.index("## The rooms") : tour.index("## How a name")]
    folder, found = "", []
    for line in table.splitlines():
        if opened := re.match(r"\| \*\*`([\w/]+)/`\*\*", line):
            folder = opened[1].replace("/", ".") + "."
        names = re.findall(r"`(\w+)\.py`", line)
        lone = [name for name in names if not (SOURCE / folder.replace(".", "/") / f"{name}.py").exists()]
        folder = "" if lone else folder
        found += [folder + name for name in names]
    return found


SOURCE = ROOT / "src" / "transduce"


def test_the_tour_names_every_file_once():
    """A stranger must find the file to change from the tour alone."""
    files = [path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py")]
    modules = [".".join(path.parts) for path in files if not path.name.startswith("__")]
    assert sorted(rooms()) == sorted(modules)


def test_imports_point_one_way():
    """Up the tour's table, and inside a folder wherever they like."""
    order = {name: place for place, name in enumerate(rooms())}
    for name, place in order.items():
        text = (SOURCE / (name.replace(".", "/") + ".py")).read_text()
        head = text.partition("\ndef ")[0].partition("\nclass ")[0]
        for module in re.findall(r"^from transduce\.([\w.]+) import", head, re.MULTILINE):
            same_folder = "." in name and module.partition(".")[0] == name.partition(".")[0]
            targets = [other for other in order if other == module or other.startswith(module + ".")]
            assert same_folder or min(order[other] for other in targets) < place, f"{name} imports {module}"
