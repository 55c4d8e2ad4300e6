"""Recipe in, objects out: the only room where a name becomes a class."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import nn

from transduce import contracts
from transduce.attention.normalisers import NORMALISERS
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import SCORES
from transduce.data.noise import NOISES, Noise
from transduce.data.text import Tokenizer
from transduce.decoders import DECODERS
from transduce.decoders.copying import Copying
from transduce.decoders.readers import READERS
from transduce.decoding.rules import MinLength, NoRepeat, RepetitionPenalty
from transduce.decoding.strategies import STRATEGIES, Beam, Greedy, Sample
from transduce.encoders import ENCODERS
from transduce.errors import InputError, nearest
from transduce.flow import EOS
from transduce.heads import HEADS
from transduce.layers.embedding import Embedding, Output
from transduce.layers.sharing import share_weights
from transduce.model import DecoderOnly, Embedder, EncoderDecoder, EncoderOnly, Transducer
from transduce.objectives import OBJECTIVES, Objective
from transduce.recipe import GenerationRecipe, ModelRecipe, Recipe, explain_error

SHELVES: dict[type, Mapping[str, type]] = {
    contracts.Encoder: ENCODERS,
    contracts.Decoder: DECODERS,
    contracts.Head: HEADS,
    contracts.Reader: READERS,
    contracts.Score: SCORES,
    contracts.Normaliser: NORMALISERS,
    contracts.Position: POSITIONS,
    contracts.Strategy: STRATEGIES,
    Objective: OBJECTIVES,
    Noise: NOISES,
}

LANGUAGE_METRICS = ("perplexity", "word_perplexity", "bits_per_character")  # where there is no source
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


def options(part: type) -> dict[str, tuple[Any, Any]]:
    """The recipe options of a part: its keyword-only parameters as name -> (type, default)."""
    hints = get_type_hints(part.__init__, include_extras=True)  # type: ignore[misc]
    parameters = inspect.signature(part).parameters.values()
    return {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }


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


def build_model(
    recipe: ModelRecipe, source_size: int, target_size: int, starts: Sequence[bool] | None = None
) -> Transducer:
    """A completed model recipe and two vocabulary sizes -> a model with fresh weights.

    `starts` tells which source ids begin a word (left out: all); only labels for each word depend on it.
    """
    encoder = source = None
    if recipe.encoder is not None:
        source = Embedding(source_size, recipe.encoder["width"])
        encoder = maker(contracts.Encoder, recipe.encoder)(source)
    if recipe.head is not None:
        assert encoder is not None
        if gives_vectors(recipe):
            return Embedder(encoder, maker(contracts.Head, recipe.head)(encoder.width, target_size))
        head = maker(contracts.Head, recipe.head)(encoder.width, target_size)
        if recipe.tie != "none":
            head.tie(source)
        begins = torch.ones(source_size, dtype=torch.bool)
        if head.per == "word" and starts is not None:
            begins = torch.tensor(starts)
        begins[EOS] = False
        return EncoderOnly(encoder, head, begins)
    assert recipe.decoder is not None
    width = recipe.decoder["width"]
    one_table = source is not None and "all" in (recipe.tie, recipe.share)
    target = source if one_table and source is not None else Embedding(target_size, width)
    output = Output(width, target_size, target if recipe.tie != "none" else None)
    memory_width = encoder.width if encoder is not None else 0
    decoder = maker(contracts.Decoder, recipe.decoder)(target, output, memory_width)
    if recipe.share != "none" and encoder is not None:
        share_weights(encoder, decoder)
    if recipe.copying is not None:
        decoder = Copying(decoder, width, layer=recipe.copying.layer, head=recipe.copying.head)
    return EncoderDecoder(encoder, decoder) if encoder is not None else DecoderOnly(decoder)


def labels_per(model: ModelRecipe) -> str | None:
    """What has a label: line, word or token; None without a head."""
    return None if model.head is None else str(find(contracts.Head, model.head["kind"], "model.head").per)  # type: ignore[attr-defined]


def gives_vectors(model: ModelRecipe) -> bool:
    """Whether the model has a head that gives one vector in place of labels."""
    kind = (model.head or {}).get("kind")
    return isinstance(kind, str) and bool(getattr(find(contracts.Head, kind, "model.head"), "vector", False))


def complete_recipe(recipe: Recipe, where: str = "recipe") -> Recipe:
    """Every default of model and objective filled in; what cannot work together is refused before anything runs."""
    model = recipe.model
    _check_shape(recipe, where)
    parts: dict[str, Any] = {}
    for name, contract in (("encoder", contracts.Encoder), ("decoder", contracts.Decoder), ("head", contracts.Head)):
        spec = getattr(model, name)
        parts[name] = None if spec is None else complete(contract, spec, f"{where}: model.{name}")
        if name != "head" and spec is not None and not isinstance(parts[name].get("width"), int):
            raise InputError(f"{parts[name]['kind']} has no option `width`", where=f"{where}: model.{name}")
    filled = model.model_copy(update=parts)
    if filled.tie == "all" and filled.encoder and filled.decoder and filled.encoder["width"] != filled.decoder["width"]:
        raise InputError("tie: all needs an encoder and a decoder of equal width", where=f"{where}: model.tie")
    widths = {part["width"] for part in (filled.encoder, filled.decoder) if part}
    if filled.share == "all" and len(widths) > 1:
        raise InputError("share: all needs an encoder and a decoder of equal width", where=f"{where}: model.share")
    passage = recipe.data.passage
    _check_positions(filled, recipe.data.max_length if passage is None else passage - 1, where)
    try:
        with torch.device("meta"):  # widths and heads that do not fit show here, at no cost
            built = build_model(filled, 8, 8)
    except InputError as error:
        raise InputError(error.problem, where=f"{where}: model", remedy=error.remedy) from None
    objective = complete_objective(recipe.training.objective, f"{where}: training.objective")
    _check_objective(objective, filled, f"{where}: training.objective")
    if "teacher" not in objective:  # which is opened later
        try:
            maker(Objective, objective)().check(built)
        except InputError as error:
            raise InputError(error.problem, where=f"{where}: training.objective", remedy=error.remedy) from None
    training = recipe.training.model_copy(update={"objective": objective})
    data = recipe.data
    if data.noise is not None:
        _check_noise(recipe, where)
        data = data.model_copy(update={"noise": complete(Noise, data.noise, f"{where}: data.noise")})
    evaluation = recipe.evaluation
    if data.form == "text" and filled.encoder is None and "metrics" not in evaluation.model_fields_set:
        evaluation = evaluation.model_copy(update={"metrics": LANGUAGE_METRICS})
    return recipe.model_copy(update={"data": data, "model": filled, "training": training, "evaluation": evaluation})


def _check_noise(recipe: Recipe, where: str) -> None:
    if recipe.data.form != "text" or recipe.data.passage is not None:
        raise InputError(
            "noise damages lines of text, to be restored",
            where=f"{where}: data.noise",
            remedy="set data.form: text, without a passage",
        )
    if recipe.model.encoder is None:
        raise InputError(
            "what is damaged must be read, and there is no encoder",
            where=f"{where}: data.noise",
            remedy="add model.encoder, or leave data.noise out",
        )


def _check_token_labels(kind: str, head: type, recipe: Recipe, where: str) -> None:
    """A head that names tokens reads a text, damaged so that it cannot just copy."""
    noise, wanted = (recipe.data.noise or {}).get("kind"), getattr(head, "reads", "mask_tokens")
    if recipe.data.form != "text" or noise != wanted:
        raise InputError(
            f"{kind} reads lines of text with noise {wanted}, not {recipe.data.form} with {noise or 'none'}",
            where=where,
            remedy=f"set data.form: text and data.noise: {{kind: {wanted}}}",
        )
    encoder = (recipe.model.encoder or {}).get("kind")
    if getattr(head, "apart", False) and not getattr(find(contracts.Encoder, str(encoder), where), "apart", False):
        raise InputError(
            f"{kind} would see the token it foretells: {encoder} looks both ways in every row",
            where=where,
            remedy="set model.encoder.kind: both_ways",
        )


def build_noise(spec: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Noise | None:
    """A completed spec -> how lines of these tokens are damaged; None: not at all."""
    if spec is None:
        return None
    noise: Noise = maker(Noise, dict(spec))(tokenizer)
    return noise


def complete_objective(spec: Mapping[str, Any], where: str) -> Spec:
    """Options without a kind are those of cross-entropy: `training.objective.label_smoothing=0` needs no more."""
    filled = complete(Objective, {"kind": "cross_entropy", **spec}, where)
    if filled.get("teacher") == "":
        raise InputError(f"{filled['kind']} needs a teacher", where=where, remedy="teacher: RUN, a trained run")
    return filled


def _check_objective(objective: Spec, model: ModelRecipe, where: str) -> None:
    """What a loss reads must be what the model gives: scores of tokens, or vectors."""
    reads, gives = getattr(find(Objective, objective["kind"], where), "vectors", False), gives_vectors(model)
    if gives and not reads:
        raise InputError(
            f"{objective['kind']} reads scores of tokens, and this head gives a vector",
            where=where,
            remedy="set training.objective: {kind: contrastive}",
        )
    if reads and not gives:
        raise InputError(
            f"{objective['kind']} compares vectors, and this model gives scores of tokens",
            where=where,
            remedy="set model.head: {kind: embedder} without a decoder, or another objective",
        )


def build_objective(spec: Spec, open_teacher: Callable[[str], nn.Module]) -> Objective:
    """A completed spec -> the objective; one with the option `teacher` is given the opened run as its first part."""
    parts = [open_teacher(spec["teacher"])] if "teacher" in spec else []
    objective: Objective = maker(Objective, spec)(*parts)
    return objective


def _check_shape(recipe: Recipe, where: str) -> None:
    model, where = recipe.model, f"{where}: model"
    if model.head is not None and model.encoder is None:
        raise InputError("a head needs an encoder", where=where, remedy="add model.encoder")
    if model.head is not None and model.decoder is not None:
        raise InputError("a model has a decoder or a head, not both", where=where, remedy="remove one of them")
    if model.head is None and model.decoder is None:
        raise InputError("a model needs a decoder, or an encoder and a head", where=where, remedy="add model.decoder")
    if model.head is not None:
        _check_labels(model.head, recipe, where)
    if gives_vectors(model) and not recipe.tokens.shared:
        raise InputError(
            "both sides of a pair go through one encoder, so they need one vocabulary",
            where=where,
            remedy="set tokens.shared: true",
        )
    for name, wanted in (("copying", model.copying is not None), ("share", model.share != "none")):
        if wanted and (model.encoder is None or model.decoder is None):
            raise InputError(
                f"{name} needs an encoder and a decoder",
                where=f"{where}.{name}",
                remedy=f"add the one that is missing, or leave {name} out",
            )
    if model.share == "all" and not recipe.tokens.shared:
        raise InputError(
            "share: all needs one vocabulary",
            where=f"{where}.share",
            remedy="set tokens.shared: true, or share: layers",
        )
    if model.copying is not None and not recipe.tokens.shared:
        raise InputError(
            "copying needs one vocabulary: a word has the same id on both sides",
            where=f"{where}.copying",
            remedy="set tokens.shared: true",
        )
    if model.tie == "all" and not recipe.tokens.shared:
        raise InputError("tie: all needs one vocabulary", where=where, remedy="set tokens.shared: true, or tie: target")
    if recipe.data.form == "text":
        _check_text(recipe, where)
    elif model.encoder is None and not recipe.tokens.shared:
        raise InputError(
            "a decoder alone reads source and target in one stream", where=where, remedy="set tokens.shared: true"
        )


def _check_text(recipe: Recipe, where: str) -> None:
    """Text without a source: what is there to read must be said."""
    if recipe.model.encoder is not None and recipe.data.noise is None:
        raise InputError(
            "an encoder needs a source, and text has none",
            where=where,
            remedy="leave model.encoder out, or let it read damaged text: set data.noise",
        )
    if recipe.data.passage is not None and (recipe.tokens.target.dropout or recipe.tokens.target.kind == "labels"):
        raise InputError(
            "running text is cut into tokens once, and not into whole lines",
            where=where,
            remedy="set tokens.target.dropout: 0 and another tokens.target.kind, or leave data.passage out",
        )


def _check_positions(model: ModelRecipe, longest: int, where: str) -> None:
    for name in ("encoder", "decoder"):
        position = (getattr(model, name) or {}).get("position")
        end = position.get("longest") if isinstance(position, Mapping) else None
        if end is not None and end <= longest:  # one place more is for </s>
            raise InputError(
                f"positions end at {end}, but texts of {longest} tokens are let through",
                where=f"{where}: model.{name}.position",
                remedy=f"set longest above {longest}, or data.max_length (of running text data.passage) below {end}",
            )


def _check_labels(head: Mapping[str, Any] | str, recipe: Recipe, where: str) -> None:
    """What a head says must be what the target tokens are."""
    if gives_vectors(recipe.model):
        return
    kind = head if isinstance(head, str) else head.get("kind", "")
    part = find(contracts.Head, kind, where) if isinstance(kind, str) and kind else contracts.Head
    per = getattr(part, "per", "line")
    if recipe.model.tie != "none" and not hasattr(part, "tie"):
        raise InputError("only a head that says source tokens can be tied", where=where, remedy="set tie: none")
    source, target = recipe.tokens.source.kind, recipe.tokens.target.kind
    if per == "token":
        _check_token_labels(kind, part, recipe, where)
        return
    if per == "word" and (target != "words" or source in ("chars", "bytes", "labels")):
        raise InputError(
            f"one label a word needs words on both sides, not {source} and {target}",
            where=where,
            remedy="set tokens.source.kind: words (or bpe, unigram) and tokens.target.kind: words",
        )
    if per == "line" and target != "labels":
        raise InputError(
            f"one label a line needs whole lines as target tokens, not {target}",
            where=where,
            remedy="set tokens.target.kind: labels",
        )


def build_strategy(settings: GenerationRecipe) -> contracts.Strategy:
    if settings.strategy == "sample":
        width = max(settings.beam, settings.nbest)
        return Sample(width=width, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    if settings.strategy == "greedy":
        return Greedy()
    return Beam(width=max(settings.beam, settings.nbest), length_penalty=settings.length_penalty)


def build_rules(settings: GenerationRecipe) -> list[contracts.Rule]:
    rules: list[contracts.Rule] = []
    if settings.min_length:
        rules.append(MinLength(settings.min_length))
    if settings.no_repeat:
        rules.append(NoRepeat(settings.no_repeat))
    if settings.repetition_penalty > 1:
        rules.append(RepetitionPenalty(settings.repetition_penalty))
    return rules


def describe(part: type) -> str:
    """The one line a part says of itself."""
    return (inspect.getdoc(part) or "").partition("\n")[0]


def own_parts(recipe: Recipe) -> list[str]:
    """Kinds of the form `file:Class` anywhere in the model, and that of the objective."""

    def walk(spec: Any) -> list[str]:
        if isinstance(spec, Mapping):
            return [kind for value in spec.values() for kind in walk(value)]
        return [spec] if isinstance(spec, str) and ":" in spec else []  # a part may stand there by its name alone

    return walk(recipe.model.model_dump()) + walk(recipe.training.objective.get("kind")) + walk(recipe.data.noise)


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
