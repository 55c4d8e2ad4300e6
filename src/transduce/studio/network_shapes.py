"""The network of a run as a tree of modules: output shapes, equations, papers, files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from torch import nn

from transduce.explain.shape_recorder import ShapeRow
from transduce.explain.tensor_shapes import explain_shapes
from transduce.inference import Model
from transduce.recipe.build import count_parameters
from transduce.studio.runs import Studio

PAPER = re.compile(r"\(([^()]*?\b(?:19|20)\d\d[a-z]?[^()]*)\)")
PACKAGE = Path(__file__).parents[1]


def papers(text: str) -> list[str]:
    """The papers that a docstring names, such as Vaswani 2017."""
    found = [paper for match in PAPER.findall(text) for paper in re.split(r",\s*(?=[A-Z])|;\s*", match)]
    dated = [re.search(r"([A-Z][^,;]*?\s(?:19|20)\d\d[a-z]?)", one) for one in found]
    return list(dict.fromkeys(match[1].strip() for match in dated if match))


def source_place(kind: type) -> tuple[str, int]:
    """The file and the line of a class: of this package from its root, of another by its module."""
    try:
        file, line = Path(inspect.getsourcefile(kind) or ""), inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return kind.__module__, 0
    if file.is_relative_to(PACKAGE):
        return str(Path("transduce") / file.relative_to(PACKAGE)), line
    return kind.__module__, line


def describe_part(part: nn.Module) -> dict[str, Any]:
    """What is known of a module apart from its shapes."""
    kind = type(part)
    own = not kind.__module__.startswith("torch.")
    text = inspect.cleandoc(kind.__doc__ or "") if own and "__doc__" in vars(kind) else ""
    file, line = source_place(kind)
    return {
        "class": kind.__name__,
        "text": text,
        "papers": papers(text),
        "file": file,
        "line": line,
        "parameters": count_parameters(part),
    }


def network_shapes(model: Model) -> dict[str, Any]:
    """Every tensor of training and of one generation step, with the module that computes it."""
    rows = explain_shapes(model.recipe, (model.source.size, model.target.size))
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(_entry(row, model.network))
    return {
        "sections": [{"name": name, "rows": entries} for name, entries in sections.items()],
        "trees": {stage: module_tree(sections.get(f"{stage}: modules", [])) for stage in ("training", "generation")},
    }


def _entry(row: ShapeRow, network: nn.Module) -> dict[str, Any]:
    entry = {"name": row.name, "letters": row.letters, "sizes": list(row.sizes), "meaning": row.meaning}
    if not row.section.endswith(": modules"):
        return entry
    path, _, field = row.name.partition(":")
    repeated = re.match(r"x (\d+): ", row.meaning)
    return {
        **entry,
        "path": path,
        "field": field,
        "times": int(repeated[1]) if repeated else 1,
        "equation": row.meaning[repeated.end() :] if repeated else row.meaning,
        **describe_part(network.get_submodule(path)),
    }


def module_tree(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of modules as a tree by their paths; tensors of one module are joined."""
    tree: list[dict[str, Any]] = []
    nodes: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if (path := entry["path"]) not in nodes:
            nodes[path] = {**entry, "tensors": [], "children": []}
            above = path.rpartition(".")[0]
            while above and above not in nodes:
                above = above.rpartition(".")[0]
            (nodes[above]["children"] if above else tree).append(nodes[path])
        if entry["letters"]:
            shape = {name: entry[name] for name in ("field", "letters", "sizes")}
            nodes[path]["tensors"].append(shape)
    return tree


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/shapes")
    def shapes(run: str = "") -> dict[str, Any]:
        chosen = studio.run(run)
        return chosen.once("shapes", lambda: network_shapes(chosen.model))

    return routes
