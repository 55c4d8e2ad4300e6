"""All sections together: a mapping -> a `Recipe`, or an error that names the key; YAML -> a recipe and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from transduce.errors import InputError, nearest
from transduce.recipe.data import DataRecipe
from transduce.recipe.overrides import override
from transduce.recipe.schema import (
    EvaluationRecipe,
    GenerationRecipe,
    InitRecipe,
    ModelRecipe,
    Section,
    TokensRecipe,
    TrainingRecipe,
)


class Recipe(Section):
    data: DataRecipe = DataRecipe()
    tokens: TokensRecipe = TokensRecipe()
    model: ModelRecipe = ModelRecipe()
    init: InitRecipe = InitRecipe()
    training: TrainingRecipe = TrainingRecipe()
    generation: GenerationRecipe = GenerationRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()

    @model_validator(mode="after")
    def _links_to_follow(self) -> Self:
        if self.training.objective.get("kind") == "guided_alignment":
            if any(corpus.alignment is None for corpus in self.data.train):
                raise ValueError("`guided_alignment` needs links: set `alignment` of every corpus in `data.train`")
            if self.tokens.source.dropout or self.tokens.target.dropout:
                raise ValueError("`guided_alignment` needs tokens that stay the same: set `dropout` of `tokens` to 0")
        return self

    @model_validator(mode="after")
    def _adapters_stand_on_a_run(self) -> Self:
        if self.training.adapters is not None:
            if self.init.model is None:
                raise ValueError("`training.adapters` stand beside the weights of a trained run: set `init.model`")
            if self.init.encoder is not None or self.init.decoder is not None:
                raise ValueError("`training.adapters` have one base: leave out `init.encoder` and `init.decoder`")
        return self


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file, with `key.path=value` overrides applied on top."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such recipe", where=str(path), remedy="see `transduce train --help`") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not readable as YAML: {error}", where=str(path), remedy="correct it there") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if content is not None and not isinstance(content, dict):
        raise InputError("a recipe is a mapping of sections", where=str(path), remedy="see `transduce train --help`")
    return parse(override(content or {}, overrides), where=str(path))


def parse(content: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A mapping to a recipe, or an error that names the key, the reason and the nearest known key."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise explain_error(error, where, _known_keys(error.errors()[0]["loc"][:-1])) from None


def explain_error(error: ValidationError, where: str, known: Iterable[str], prefix: str = "") -> InputError:
    """The first thing that is wrong, in words that name the key and, for an unknown one, the nearest known."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in (prefix, *first["loc"]) if part != "")
    if first["type"] == "extra_forbidden":
        return InputError(f"unknown key {key!r}", where=where, remedy=nearest(str(first["loc"][-1]), known))
    given = f" (got {first['input']!r})" if not isinstance(first["input"], (dict, BaseModel)) else ""
    return InputError(f"{key}: {first['msg'].removeprefix('Value error, ')}{given}", where=where)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in location:
        field = section.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        section = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), section)
    return list(section.model_fields)


def dump(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
