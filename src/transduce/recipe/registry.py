"""Registry of parts: the names that recipes use, the classes behind them, and the options of each class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from transduce import contracts
from transduce.attention.multihead import WINDOWS
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import NORMALISERS, SCORES
from transduce.attention.self_attention import TOKEN_MIXERS
from transduce.data.augmentation import AUGMENTATIONS
from transduce.data.noise import NOISES
from transduce.decoders import DECODERS
from transduce.decoders.recurrent import CONTEXT_MECHANISMS
from transduce.decoding.logits_processors import LOGITS_PROCESSORS
from transduce.decoding.strategies import STRATEGIES
from transduce.encoders import ENCODERS
from transduce.errors import InputError, nearest
from transduce.evaluation.evaluate import METRICS
from transduce.heads import HEADS
from transduce.modalities import FRONT_ENDS, MODALITIES
from transduce.objectives import OBJECTIVES
from transduce.recipe.recipe import Recipe, explain_error, load_user_class
from transduce.training.report import TRACKERS

# Every extension point of contracts.py -> {name in a recipe: class}. The contract tests walk all of them.
REGISTRIES: dict[type, Mapping[str, type]] = {
    contracts.Modality: MODALITIES,
    contracts.FrontEnd: FRONT_ENDS,
    contracts.Encoder: ENCODERS,
    contracts.Decoder: DECODERS,
    contracts.Head: HEADS,
    contracts.ContextMechanism: CONTEXT_MECHANISMS,
    contracts.AttentionScore: SCORES,
    contracts.Normaliser: NORMALISERS,
    contracts.Window: WINDOWS,
    contracts.PositionEncoding: POSITIONS,
    contracts.TokenMixer: TOKEN_MIXERS,
    contracts.Objective: OBJECTIVES,
    contracts.Noise: NOISES,
    contracts.Augmentation: AUGMENTATIONS,
    contracts.Strategy: STRATEGIES,
    contracts.LogitsProcessor: LOGITS_PROCESSORS,
    contracts.Tracker: TRACKERS,
    contracts.Metric: METRICS,
}
LARGEST = 2**20  # bound on integer options: a typing error must not exhaust the memory
MAX_LAYERS = 1000
USER_CLASS = re.compile(r"[^\s,\[\]{}'\"]+:[^\s,\[\]{}'\"]+")  # file:Class
Spec = dict[str, Any]  # {kind: name, option: value ...}; a plain name stands for {kind: name}


def title(contract: type) -> str:
    """The name of a contract in plain words: PositionEncoding becomes "position encoding"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in contract.__name__).strip()


def find(contract: type, kind: str, where: str) -> type:
    """The class registered under a name, or the user's class for `file:Class`."""
    if ":" in kind:
        return load_user_class(contract, kind, where)
    registry = REGISTRIES[contract]
    if kind not in registry:
        raise InputError(f"there is no {title(contract)} named {kind!r}", where=where, remedy=nearest(kind, registry))
    return registry[kind]


def user_classes(recipe: Recipe) -> list[str]:
    """Kinds of the form `file:Class` anywhere in a recipe: parts of the model, sources, objective, noise, search."""

    def walk(spec: Any) -> Iterator[str]:
        if isinstance(spec, Mapping):
            for value in spec.values():
                yield from walk(value)
        elif isinstance(spec, (list, tuple)):
            for value in spec:
                yield from walk(value)
        elif isinstance(spec, str) and ":" in spec:
            yield spec

    def kinds(spec: Any) -> Any:
        return spec.get("kind") if isinstance(spec, Mapping) else spec

    sources = [kinds(spec) for spec in recipe.data.sources.values()]
    others = [kinds(recipe.training.objective), recipe.data.noise, kinds(recipe.data.augmentation)]
    search = [recipe.generation.strategy, recipe.generation.logits_processors, recipe.training.trackers]
    metrics = [kinds(spec) for spec in recipe.evaluation.metrics]
    return [*walk(recipe.model.model_dump()), *walk([*others, *sources, *metrics]), *walk(search)]


def check_user_code(recipe: Recipe, where: str, *, trusted: bool, overrides: Iterable[str] = ()) -> None:
    """Refuses code that a recipe names, unless it is trusted, or the user named it in an override."""
    named = {kind for item in overrides for kind in USER_CLASS.findall(item.partition("=")[2])}
    own = [kind for kind in user_classes(recipe) if kind not in named]
    if own and not trusted:
        raise InputError(
            f"this recipe uses Python code of the user: {', '.join(own)}",
            where=where,
            remedy="use --trust-user-code (trust_user_code=True) if you trust that code",
        )


@cache
def options(part: type) -> Mapping[str, tuple[Any, Any]]:
    """The recipe options of a part: its keyword-only parameters as name -> (type, default)."""
    hints = get_type_hints(part.__init__, include_extras=True)  # type: ignore[misc]
    parameters = inspect.signature(part).parameters.values()
    return {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }


def describe(part: type) -> str:
    """The first line of the docstring of a part."""
    return (inspect.getdoc(part) or "").partition("\n")[0]


def part_contract(annotation: Any) -> type | None:
    """The contract of an option that is itself a part: `type[AttentionScore]`, or the same or None."""
    inner = [part for part in get_args(annotation) if part is not NoneType] if get_origin(annotation) else []
    if get_origin(annotation) is not type and len(inner) == 1:
        return part_contract(inner[0])
    return inner[0] if get_origin(annotation) is type and inner[0] in REGISTRIES else None


def complete(contract: type, spec: str | Mapping[str, Any], where: str) -> Spec:
    """Checks the options of a part against its signature and fills in the defaults."""
    spec = {"kind": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    kind = spec.pop("kind", None)
    if not isinstance(kind, str):
        raise InputError("`kind` is missing", where=where, remedy=f"kind: {' | '.join(REGISTRIES[contract])}")
    part = find(contract, kind, where)
    known = options(part)
    nested = {name: inner for name, (annotation, _) in known.items() if (inner := part_contract(annotation))}
    checked = _check(part, kind, {name: value for name, value in spec.items() if name not in nested}, where)
    result: Spec = {"kind": kind}
    for name, (annotation, default) in known.items():
        if name not in nested:
            result[name] = getattr(checked, name)
        elif spec.get(name, default) is None and NoneType in get_args(annotation):
            result[name] = None
        else:
            inner_spec = spec[name] if name in spec else _registered_name(nested[name], default)
            result[name] = complete(nested[name], inner_spec, f"{where}.{name}")
    return result


@cache
def _schema(part: type) -> type[BaseModel]:
    """A pydantic model of the plain options of a part. Building one takes milliseconds, hence the cache."""
    fields: dict[str, Any] = {name: pair for name, pair in options(part).items() if not part_contract(pair[0])}
    return create_model(part.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _check(part: type, kind: str, given: Mapping[str, Any], where: str) -> BaseModel:
    try:
        checked: BaseModel = _schema(part).model_validate(given)
    except ValidationError as error:
        raise explain_error(error, where, list(options(part)), prefix=kind) from None
    for name, value in checked:
        limit = MAX_LAYERS if name == "layers" else LARGEST
        if isinstance(value, int) and value > limit:
            raise InputError(f"{kind}.{name}: more than {limit:,} cannot be built", where=where)
    return checked


def _registered_name(contract: type, default: Any) -> Any:
    """The name of a class that is a default in a signature."""
    if isinstance(default, type):
        return next((name for name, part in REGISTRIES[contract].items() if part is default), None)
    return default


def factory(contract: type, spec: Spec) -> Callable[..., Any]:
    """A constructor with the options of a completed spec bound: a function of the positional parameters alone."""
    part = find(contract, spec["kind"], "model")
    known = options(part)
    bound: dict[str, Any] = {}
    for name, value in spec.items():
        if name != "kind":
            inner = part_contract(known[name][0])
            bound[name] = factory(inner, value) if inner and value is not None else value
    return partial(part, **bound)
