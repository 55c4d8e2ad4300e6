"""JSON Schema and reference page of recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_fixtures import Command

from transduce.recipe import Recipe
from transduce.recipe.reference import recipe_reference, recipe_schema
from transduce.recipe.registry import REGISTRIES, options, title

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "docs").rglob("*.yaml")])
SCHEMA = recipe_schema()
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], where: str = "recipe") -> list[str]:
    """Violations of the keywords that the schema uses."""
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    found = []
    for keyword, count in (("anyOf", (1, 99)), ("oneOf", (1, 1))):
        if keyword in schema:
            fitting = sum(not problems(value, one, where) for one in schema[keyword])
            found += [] if count[0] <= fitting <= count[1] else [f"{where}: {fitting} of {keyword}: {value!r}"]
    wanted = TYPES.get(schema.get("type", ""), object)
    if not isinstance(value, wanted) or (isinstance(value, bool) and schema.get("type") in ("integer", "number")):
        return [*found, f"{where}: {value!r} is no {schema['type']}"]
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        found.append(f"{where}: {value!r}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: {value!r}")
    if isinstance(value, (int, float)):
        low, high = schema.get("exclusiveMinimum", -1e99), schema.get("exclusiveMaximum", 1e99)
        inside = schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99)
        found += [] if low < value < high and inside else [f"{where}: {value}"]
    if isinstance(value, list):
        found += [line for one in value for line in problems(one, schema.get("items", {}), where)]
    if isinstance(value, dict):
        found += [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
        rest = schema.get("additionalProperties", {})
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, rest)
            place = f"{where}.{name}"
            found += [f"{place}: unknown"] if known is False else problems(inner, {} if known is True else known, place)
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipes_conform_to_the_schema(path: Path) -> None:
    assert problems(yaml.safe_load(path.read_text(encoding="utf-8")), SCHEMA) == []


@pytest.mark.parametrize(
    "recipe",
    [
        {"trainnig": {}},
        {"training": {"steps": "many"}},
        {"training": {"steps": 0}},
        {"training": {"objective": {"kind": "cross_entrpy"}}},
        {"training": {"objective": {"smoothing": 0.1}}},
        {"model": {"decoder": {"kind": "recurrent", "context": {"kind": "luong", "score": "dott"}}}},
        {"model": {"decoder": {"kind": "recurrent", "heads": 4}}},
        {"generation": {"strategy": {"kind": "beam", "temperature": 2}}},
        {"generation": {"logits_processors": [{"kind": "no_repeat_ngram"}]}},
    ],
    ids=str,
)
def test_the_schema_refuses_wrong_recipes(recipe: dict[str, Any]) -> None:
    assert problems(recipe, SCHEMA)


def test_the_schema_accepts_classes_of_the_user() -> None:
    part = {"kind": "mine:Part", "option": 1}
    search = {"strategy": part, "logits_processors": [part, "mine:Other"]}
    model = {"encoder": part, "decoder": {"kind": "recurrent", "context": {"kind": "luong", "score": "mine:Score"}}}
    assert problems({"model": model, "generation": search, "evaluation": {"metrics": ["mine:Metric"]}}, SCHEMA) == []


def test_every_kind_and_option_is_in_the_schema() -> None:
    for contract, registry in REGISTRIES.items():
        kinds = {
            one["properties"]["kind"]["const"]: one["properties"]
            for one in SCHEMA["$defs"][contract.__name__]["oneOf"]
            if "const" in one.get("properties", {}).get("kind", {})
        }
        assert kinds.keys() == registry.keys()
        for kind, part in registry.items():
            assert options(part).keys() <= kinds[kind].keys()


def test_every_key_has_a_description() -> None:
    sections = [SCHEMA, *(SCHEMA["$defs"][name] for name in SCHEMA["$defs"] if name.endswith(("Recipe", "Corpus")))]
    for section in sections:
        for name, field in section["properties"].items():
            text = field.get("description") or SCHEMA["$defs"][field["$ref"].rpartition("/")[2]]["description"]
            assert text.endswith("."), name


def test_the_reference_names_every_key_and_every_kind() -> None:
    page = recipe_reference()
    for section in Recipe.model_fields:
        assert f"\n### {section}\n" in page
    for contract, registry in REGISTRIES.items():
        assert f"\n### {title(contract).capitalize()}\n" in page
        for kind in registry:
            assert f"**`{kind}`**" in page


def test_schema_command(command: Command) -> None:
    assert json.loads(command("schema").out) == json.loads(json.dumps(SCHEMA))
    assert command("schema", "--markdown").out == recipe_reference()
