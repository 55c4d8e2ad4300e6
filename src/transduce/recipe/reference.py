"""Reference of all recipe keys, parts and options: JSON Schema for editors, and a Markdown page."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from transduce import contracts
from transduce.contracts import Noise
from transduce.objectives import Objective
from transduce.recipe.data import Corpus
from transduce.recipe.recipe import Recipe
from transduce.recipe.registry import REGISTRIES, describe, options, part_contract, title

USER_CLASS = {"type": "string", "pattern": ":", "description": "A class of the user: file:Class."}
# Keys of the sections whose value is a part: the rest of their schema is that of the registry.
PARTS: dict[tuple[str, str], type] = {
    ("ModelRecipe", "encoder"): contracts.Encoder,
    ("ModelRecipe", "decoder"): contracts.Decoder,
    ("ModelRecipe", "head"): contracts.Head,
    ("TrainingRecipe", "objective"): Objective,
    ("DataRecipe", "noise"): Noise,
    ("DataRecipe", "augmentation"): contracts.Augmentation,
    ("GenerationRecipe", "strategy"): contracts.Strategy,
}


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, with the kinds of every registry and their options."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    for contract, registry in REGISTRIES.items():
        definitions[contract.__name__] = _part_schema(contract, registry)
    for (section, key), contract in PARTS.items():
        _set_part(definitions[section]["properties"][key], _reference(contract), section == "ModelRecipe")
    definitions["Objective"]["oneOf"].append(_without_kind(Objective, "cross_entropy"))
    data, generation = definitions["DataRecipe"]["properties"], definitions["GenerationRecipe"]["properties"]
    for name in ("train", "dev", "test"):  # the short forms that the section reads too
        corpus: dict[str, Any] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Corpus"}]}
        data[name]["anyOf"] = [*corpus["anyOf"], {"type": "array", "items": corpus}]
        data[name] = {key: value for key, value in data[name].items() if key not in ("type", "items")}
    text = {"type": "object", "properties": {"kind": {"enum": ["text", "tags"]}}, "additionalProperties": False}
    sources = {"anyOf": [{"enum": ["text", "tags"]}, text, _reference(contracts.Modality)]}
    data["sources"]["additionalProperties"] = sources
    definitions["TrainingRecipe"]["properties"]["trackers"]["items"] = _reference(contracts.Tracker)
    generation["logits_processors"]["items"] = _reference(contracts.LogitsProcessor)
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    for section, key in (("TrainingRecipe", "freeze"), ("AdaptersRecipe", "targets")):
        field = definitions[section]["properties"][key]
        definitions[section]["properties"][key] = {**names, "description": field["description"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _reference(contract: type) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{contract.__name__}"}


def _set_part(field: dict[str, Any], part: dict[str, Any], nullable: bool) -> None:
    """Replaces the schema of a mapping by that of a registry."""
    nullable = nullable or {"type": "null"} in field.get("anyOf", [])
    for key in ("anyOf", "type", "additionalProperties"):
        field.pop(key, None)
    field["anyOf"] = [part, {"type": "null"}] if nullable else [part]


def _part_schema(contract: type, registry: Mapping[str, type]) -> dict[str, Any]:
    own = {"type": "object", "required": ["kind"], "properties": {"kind": USER_CLASS}}
    kinds = [_kind_schema(contract, kind, part) for kind, part in registry.items()]
    return {"description": title(contract), "oneOf": [{"enum": list(registry)}, USER_CLASS, own, *kinds]}


def _kind_schema(contract: type, kind: str, part: type) -> dict[str, Any]:
    properties: dict[str, Any] = {"kind": {"const": kind}, **_option_schemas(part)}
    if contract is contracts.Encoder:
        properties["front"] = _reference(contracts.FrontEnd)
        properties["parts"] = {"type": "object", "additionalProperties": _reference(contracts.Encoder)}
    required = ["kind", *(name for name, (_, default) in options(part).items() if default is ...)]
    head = {"type": "object", "description": describe(part), "required": required}
    return {**head, "properties": properties, "additionalProperties": False}


def _without_kind(contract: type, kind: str) -> dict[str, Any]:
    """Options alone, where a kind is the default."""
    properties = _option_schemas(REGISTRIES[contract][kind])
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _option_schemas(part: type) -> dict[str, Any]:
    return {name: _option_schema(annotation, default) for name, (annotation, default) in options(part).items()}


def _option_schema(annotation: Any, default: Any) -> dict[str, Any]:
    inner = part_contract(annotation)
    if inner is not None:
        part = _reference(inner)
        return {"anyOf": [part, {"type": "null"}]} if type(None) in get_args(annotation) else part
    schema = TypeAdapter(annotation).json_schema()
    return schema if default is ... else {**schema, "default": default}


def recipe_reference() -> str:
    """The page docs/recipe-reference.md: every key with type, default and meaning, every part with its options."""
    lines = [
        "<!-- Generated by docs/generate.py. Do not edit. -->",
        "",
        "# Recipe reference",
        "",
        "Every key of a recipe, and every part that a key can name. `transduce models` lists the parts too, and",
        "`transduce schema` prints the same as JSON Schema, which editors use to complete and check recipes.",
        "",
        "## Keys",
    ]
    for name, section in _sections(Recipe, ""):
        lines += ["", f"### {name}", "", _docstring(section), "", *_table(_field_rows(section))]
    lines += ["", "## Parts", "", "A part is a name, or `{kind: name, option: value}`. `kind: my_file:MyClass` names a"]
    lines += ["class of the user: see [extending](extending.md)."]
    for contract, registry in REGISTRIES.items():
        lines += ["", f"### {title(contract).capitalize()}", ""]
        for kind, part in registry.items():
            lines += [f"**`{kind}`**: {_cell(describe(part))}", ""]
            if rows := _option_rows(part):
                lines += [*_table(rows), ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def _sections(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section by its path, the outer ones first."""
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield f"{prefix}{name}", inner
            yield from _sections(inner, f"{prefix}{name}.")
        elif Corpus in _flat(field.annotation) and name == "train":
            yield f"{prefix}{name}", Corpus


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *(get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ())]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _flat(annotation: Any) -> list[Any]:
    return [annotation, *(inner for one in get_args(annotation) for inner in _flat(one))]


def _docstring(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().partition("\n")[0]


def _field_rows(section: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    return [
        (f"`{name}`", _type(field.annotation), _default(field), field.description or "")
        for name, field in section.model_fields.items()
    ]


def _option_rows(part: type) -> list[tuple[str, str, str]]:
    rows = []
    for name, (annotation, default) in options(part).items():
        inner = part_contract(annotation)
        if isinstance(default, type) and inner is not None:
            default = next((kind for kind, one in REGISTRIES[inner].items() if one is default), default.__name__)
        rows.append((f"`{name}`", _type(annotation), "required" if default is ... else f"`{_value(default)}`"))
    return rows


def _table(rows: list[Any]) -> list[str]:
    heads = ("key", "type", "default", "meaning")[: len(rows[0])]
    marks = ["| " + " | ".join("---" for _ in heads) + " |"]
    return [
        "| " + " | ".join(heads) + " |",
        *marks,
        *("| " + " | ".join(map(_cell, row)) + " |" for row in rows),
    ]


def _cell(text: str) -> str:
    """Text for a table: | and, outside of code, < are escaped."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _type(annotation: Any) -> str:
    """An annotation in the words of YAML: Literal["a", "b"] becomes `a`, `b`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if (contract := part_contract(annotation)) is not None:
        return title(contract) + (" or null" if type(None) in inner else "")
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in inner)
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    names = {bool: "true or false", int: "integer", float: "number", str: "string", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    return "see there" if isinstance(field.default, BaseModel) else f"`{_value(field.default)}`"


def _value(default: Any) -> str:
    """A value as YAML writes it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, (tuple, list)):
        return "[" + ", ".join(map(_value, default)) + "]"
    if isinstance(default, Mapping):
        return "{" + ", ".join(f"{key}: {_value(value)}" for key, value in default.items()) + "}"
    return str(default) if default != "" else '""'
