"""Recipe: the typed description of a run; YAML, overrides (`key.path=value`), classes of the user, error messages."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from transduce.errors import InputError, nearest
from transduce.parsing import MAX_DEPTH, YAMLSyntaxError, parse_yaml, read_yaml
from transduce.recipe.data import DataRecipe
from transduce.recipe.schema import (
    EvaluationRecipe,
    GenerationRecipe,
    InitRecipe,
    ModelRecipe,
    Section,
    TokensRecipe,
    TrainingRecipe,
)

FORM = "write it as key.path=value"
MAX_SHOWN = 200  # characters of a wrong value in a message


def override(content: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`training.steps=100` sets one value; the value is read as YAML, so lists and mappings work too.

    A part given by its name alone (`context: bahdanau`) takes options as if it were a mapping. A part that gets
    another kind loses the options of the old kind and takes those that other overrides set.
    """
    result: dict[str, Any] = _copy(content)
    applied: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the override {item!r}", remedy=FORM)
        path = key.split(".")
        if len(path) > MAX_DEPTH:
            raise InputError(f"the key of an override has {len(path):,} parts", where=key[:80], remedy=FORM)
        try:
            value = parse_yaml(text, key)
        except YAMLSyntaxError:
            value = text
        if _changes_kind(result, path, value):
            _set(result, path[:-1], {})
            for earlier, given in applied:
                if earlier[: len(path) - 1] == path[:-1] and len(earlier) >= len(path):
                    _set(result, earlier, given)
        _set(result, path, value)
        applied.append((path, value))
    return result


def _set(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = content.get(name)
        if isinstance(inner, str) and _of_part(path):
            inner = {"kind": inner}
        content[name] = content = inner if isinstance(inner, dict) else {}
    content[last] = value


def _of_part(path: list[str]) -> bool:
    """Whether a key belongs to a part, whose options are those of its kind."""
    return path[:1] == ["model"] or path[:2] in (["training", "objective"], ["generation", "strategy"])


def _changes_kind(content: Mapping[str, Any], path: list[str], value: Any) -> bool:
    """Whether this override gives a part another kind than it has."""
    if path[-1] != "kind" or not _of_part(path):
        return False
    part: Any = content
    for name in path[:-1]:
        part = part.get(name) if isinstance(part, Mapping) else None
    default = "cross_entropy" if path[:-1] == ["training", "objective"] else value  # the kind where none is given
    kind = part.get("kind", default) if isinstance(part, Mapping) else part
    return kind is not None and kind != value


def _copy(content: Any) -> Any:
    return {key: _copy(value) for key, value in content.items()} if isinstance(content, Mapping) else content


class Recipe(Section):
    """Description of a whole run."""

    data: DataRecipe = Field(DataRecipe(), description="Data: files, how they are read, which pairs are used.")
    tokens: TokensRecipe = Field(TokensRecipe(), description="Tokenizers of source and target.")
    model: ModelRecipe = Field(ModelRecipe(), description="Network.")
    init: InitRecipe = Field(InitRecipe(), description="Pretrained runs that the weights come from.")
    training: TrainingRecipe = Field(TrainingRecipe(), description="Training loop.")
    generation: GenerationRecipe = Field(GenerationRecipe(), description="Search settings.")
    evaluation: EvaluationRecipe = Field(EvaluationRecipe(), description="Metrics on development and test data.")

    @model_validator(mode="after")
    def _guided_alignment_needs_alignments(self) -> Self:
        if self.training.objective.get("kind") == "guided_alignment":
            if any(corpus.alignment is None for corpus in self.data.train):
                raise ValueError(
                    "`guided_alignment` needs word alignments: set `alignment` of every corpus in `data.train`"
                )
            if self.tokens.source.dropout or self.tokens.target.dropout:
                raise ValueError("`guided_alignment` needs a fixed segmentation: set `dropout` of `tokens` to 0")
        return self

    @model_validator(mode="after")
    def _adapters_need_a_base(self) -> Self:
        if self.training.adapters is not None:
            if self.init.model is None:
                raise ValueError("`training.adapters` need a pretrained base: set `init.model`")
            if self.init.encoder is not None or self.init.decoder is not None:
                raise ValueError("`training.adapters` need a single base: leave out `init.encoder` and `init.decoder`")
        return self


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file, with `key.path=value` overrides applied on top."""
    path = Path(path)
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise InputError("no such recipe", where=str(path), remedy="see `transduce train --help`") from None
    if content is not None and not isinstance(content, dict):
        raise InputError("a recipe is a mapping of sections", where=str(path), remedy="see `transduce train --help`")
    return parse(override(content or {}, overrides), where=str(path))


def parse(content: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from a mapping; the error names the key, the reason and the most similar key."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise explain_error(error, where, _known_keys(error.errors()[0]["loc"][:-1])) from None


def explain_error(error: ValidationError, where: str, known: Iterable[str], prefix: str = "") -> InputError:
    """The first problem as a message that names the key and, for an unknown key, the most similar one."""
    first, *others = error.errors()
    key_path = _key_path(first)
    key = ".".join(str(part) for part in (prefix, *key_path) if part != "")
    if first["type"] == "extra_forbidden":
        return InputError(f"unknown key {key!r}", where=where, remedy=nearest(str(first["loc"][-1]), known))
    problems = dict.fromkeys(_plain_words(one) for one in (first, *others) if _key_path(one) == key_path)
    problem, *rest = problems  # several where a value may have several types
    problem = ", or ".join((problem, *(one.removeprefix("this must be ") for one in rest)))
    if not isinstance(first["input"], (dict, BaseModel)):
        given = repr(first["input"])
        problem += f" (got {given if len(given) <= MAX_SHOWN else given[:MAX_SHOWN] + '...'})"
    return InputError(f"{key}: {problem}" if key else problem, where=where)


# What each kind of problem is called here; the library's own words are about Python types.
PROBLEMS = {
    "int": "this must be a whole number",
    "float": "this must be a number",
    "finite_number": "this must be a finite number",
    "bool": "this must be true or false",
    "string": "this must be text",
    "list": "this must be a list",
    "tuple": "this must be a list",
    "dict": "this must be a mapping of keys to values",
    "model": "this must be a mapping of keys to values",
    "missing": "this key is needed",
    "greater_than_equal": "this must be {ge} or more",
    "greater_than": "this must be greater than {gt}",
    "less_than_equal": "this must be {le} or less",
    "less_than": "this must be less than {lt}",
    "literal_error": "this must be one of: {expected}",
    "too_short": "this needs at least {min_length} entries",
    "too_long": "this may have at most {max_length} entries",
    "string_too_short": "this text is too short",
    "string_pattern_mismatch": "this text must match {pattern}",
}


_TYPE = re.compile(r"(str|int|float|bool|none|dict|list|tuple|literal|constrained|function|nullable)\b.*|[A-Z]\w*")


def _key_path(error: ErrorDetails) -> tuple[int | str, ...]:
    """The key path of an error, without the names of the types that were tried."""
    return tuple(part for part in error["loc"] if isinstance(part, int) or not _TYPE.fullmatch(part))


def _plain_words(error: ErrorDetails) -> str:
    """A problem that the validation of a section found, in the words of `PROBLEMS`."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("value_error", "assertion_error"):  # written by a check of ours
        return str(context["error"])
    names = (kind, kind.partition("_")[0])  # int_parsing, int_type and int_from_float are one problem
    found = next((PROBLEMS[name] for name in names if name in PROBLEMS), "this value does not fit")
    return found.format(**{name: _shown(value) for name, value in context.items()})


def _shown(value: Any) -> str:
    """A limit or a list of choices, as a person would write it."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" or ", ", ")


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in location:
        field = section.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        section = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), section)
    return list(section.model_fields)


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Key paths whose values differ, with both values as JSON; None: the recipe has no such key."""
    before, after = (_flat(recipe.model_dump(mode="json")) for recipe in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()]


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in content.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        result.update(inner)
    return result


def dump(recipe: Recipe) -> str:
    """The recipe as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_user_class(contract: type, kind: str, where: str) -> type:
    """The class that a recipe names as `file:Class`: imports the file, found from the working directory."""
    file, _, name = kind.partition(":")
    path = Path(file if file.endswith(".py") else f"{file}.py").resolve()
    if not path.is_file():
        raise InputError(f"{kind!r} needs the file {path}", where=where)
    module_name = f"transduce_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # get_type_hints looks the module up by name
    spec.loader.exec_module(module)
    part = getattr(module, name, None)
    if not (isinstance(part, type) and issubclass(part, contract)):
        raise InputError(f"{path} has no {contract.__name__} called {name!r}", where=where)
    return part
