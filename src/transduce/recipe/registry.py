"""A name and options in, a class and checked options out: the only file where a name becomes a class."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from transduce import contracts
from transduce.attention.normalisers import NORMALISERS
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import SCORES
from transduce.data.noise import NOISES, Noise
from transduce.decoders import DECODERS
from transduce.decoders.context import CONTEXT_MECHANISMS
from transduce.decoding.strategies import STRATEGIES
from transduce.encoders import ENCODERS
from transduce.errors import InputError, nearest
from transduce.heads import HEADS
from transduce.modalities import FRONT_ENDS, MODALITIES
from transduce.objectives import OBJECTIVES, Objective
from transduce.recipe import Recipe, explain_error

SHELVES: dict[type, Mapping[str, type]] = {
    contracts.Modality: MODALITIES,
    contracts.FrontEnd: FRONT_ENDS,
    contracts.Encoder: ENCODERS,
    contracts.Decoder: DECODERS,
    contracts.Head: HEADS,
    contracts.ContextMechanism: CONTEXT_MECHANISMS,
    contracts.AttentionScore: SCORES,
    contracts.Normaliser: NORMALISERS,
    contracts.PositionEncoding: POSITIONS,
    contracts.Strategy: STRATEGIES,
    Objective: OBJECTIVES,
    Noise: NOISES,
}
LARGEST = 2**20  # of any whole number among the options: a slip of the finger must not fill the memory
Spec = dict[str, Any]  # {kind: name, option: value ...}; a plain name stands for {kind: name}


def find(contract: type, kind: str, where: str) -> type:
    """A shelf's class by its name, or a user's own by `file:Class`."""
    if ":" in kind:
        return _own_class(contract, kind, where)
    shelf = SHELVES[contract]
    if kind not in shelf:
        raise InputError(f"no {contract.__name__.lower()} is called {kind!r}", where=where, remedy=nearest(kind, shelf))
    return shelf[kind]


def _own_class(contract: type, kind: str, where: str) -> type:
    file, _, name = kind.partition(":")
    path = Path(file if file.endswith(".py") else f"{file}.py").resolve()
    if not path.is_file():
        raise InputError(f"{kind!r} needs the file {path}", where=where)
    module_name = f"transduce_own_{path.stem}"
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


def own_parts(recipe: Recipe) -> list[str]:
    """Kinds of the form `file:Class` anywhere in the model, and those of the objective, the noise and the sources."""

    def walk(spec: Any) -> list[str]:
        if isinstance(spec, Mapping):
            return [kind for value in spec.values() for kind in walk(value)]
        return [spec] if isinstance(spec, str) and ":" in spec else []  # a part may stand there by its name alone

    sources = [spec if isinstance(spec, str) else spec.get("kind") for spec in recipe.data.sources.values()]
    others = [recipe.training.objective.get("kind"), recipe.data.noise, *sources]
    return walk(recipe.model.model_dump()) + [kind for spec in others for kind in walk(spec)]


def options(part: type) -> dict[str, tuple[Any, Any]]:
    """The recipe options of a part: its keyword-only parameters as name -> (type, default)."""
    hints = get_type_hints(part.__init__, include_extras=True)  # type: ignore[misc]
    parameters = inspect.signature(part).parameters.values()
    return {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }


def describe(part: type) -> str:
    """The one line a part says of itself."""
    return (inspect.getdoc(part) or "").partition("\n")[0]


def part_contract(annotation: Any) -> type | None:
    """`type[Score]` -> Score: an option that is itself a part."""
    inner = get_args(annotation)[0] if get_origin(annotation) is type else None
    return inner if inner in SHELVES else None


def complete(contract: type, spec: str | Mapping[str, Any], where: str) -> Spec:
    """Checks a part's options against its signature, and fills in all that were left out."""
    spec = {"kind": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    kind = spec.pop("kind", None)
    if not isinstance(kind, str):
        raise InputError("which kind?", where=where, remedy=f"kind: {' | '.join(SHELVES[contract])}")
    part = find(contract, kind, where)
    known = options(part)
    nested = {name: inner for name, (kind_, _) in known.items() if (inner := part_contract(kind_))}
    fields: dict[str, Any] = {name: pair for name, pair in known.items() if name not in nested}
    checker = create_model(part.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    plain = {name: value for name, value in spec.items() if name not in nested}
    try:
        checked: BaseModel = checker.model_validate(plain)
    except ValidationError as error:
        raise explain_error(error, where, list(known), prefix=kind) from None
    for name, value in checked:
        if isinstance(value, int) and value > LARGEST:
            raise InputError(f"{kind}.{name}: more than {LARGEST:,} cannot be built", where=where)
    result: Spec = {"kind": kind}
    for name, (_, default) in known.items():
        if name in nested:
            inner_spec = spec.get(name, default if name not in spec else None)
            result[name] = complete(nested[name], _name_of(nested[name], inner_spec), f"{where}.{name}")
        else:
            result[name] = getattr(checked, name)
    return result


def _name_of(contract: type, spec: Any) -> Any:
    """A class that stands as a default in a signature -> its name on the shelf."""
    if isinstance(spec, type):
        return next((name for name, part in SHELVES[contract].items() if part is spec), None)
    return spec


def maker(contract: type, spec: Spec) -> Callable[..., Any]:
    """A completed spec -> a function of the positional parts."""
    part = find(contract, spec["kind"], "model")
    known = options(part)
    chosen: dict[str, Any] = {}
    for name, value in spec.items():
        if name != "kind":
            inner = part_contract(known[name][0])
            chosen[name] = maker(inner, value) if inner else value
    return partial(part, **chosen)
