"""Construction of a run from its recipe: defaults, model, objective, noise, search; models without values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from transduce import contracts
from transduce.contracts import Augmentation, Noise
from transduce.data.readers.files import TAGS, TEXT_KINDS
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.decoders.copy import PointerGeneratorDecoder
from transduce.decoders.ctc import JointCTCDecoder
from transduce.decoding.logits_processors import (
    ForcedBOS,
    ForcedEOS,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    SuppressTokens,
)
from transduce.decoding.search_state import no_coverage_error
from transduce.encoders.character_aware import WordPieceEmbedding
from transduce.errors import InputError
from transduce.flow import EOS
from transduce.layers.embedding import Embedding, Output, output_transform
from transduce.modalities.source_encoding import ModalitySourceEncoding, SourceEncoding, TextSourceEncoding
from transduce.modalities.sources import ModalitySource, TagsModality, TextModality
from transduce.model import CTCModel, DecoderOnly, EmbeddingModel, EncoderDecoder, EncoderOnly, Transducer
from transduce.objectives import Objective
from transduce.recipe import DataRecipe, GenerationRecipe, ModelRecipe, Recipe
from transduce.recipe.compatibility import (
    check_augmentation,
    check_languages,
    check_noise,
    check_objective,
    check_positions,
    check_shape,
    check_size,
    check_sources,
    check_widths,
    embedding_width,
    gives_vectors,
)
from transduce.recipe.registry import Spec, complete, factory, find, options

MAX_TENSORS = 20_000  # parameters of a model: a Transformer of a thousand layers has fewer
EMBEDDING = "embedding."  # rows stand for tokens: `share: all` decides about the embedding


class SkipInitialisation(TorchFunctionMode):
    """Random initialisation does nothing: on the meta device it would import torch's compiler, which takes a second.

    So would arithmetic there. Tensors that a constructor computes, such as the frequencies of positions, begin with a
    range; it is made on the CPU, so that the rest is computed there too.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange:
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Modules built inside have shapes and no values. A model with too many tensors is refused while it is built."""
    count = 0

    def check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > MAX_TENSORS:
            raise InputError(
                f"the model would have more than {MAX_TENSORS:,} weight tensors", remedy="reduce the number of layers"
            )

    counting = register_module_parameter_registration_hook(check)
    try:
        with torch.device("meta"), SkipInitialisation():
            yield
    finally:
        counting.remove()


def share_weights(one: nn.Module, other: nn.Module) -> list[str]:
    """Makes `other` use the parameters of `one`; returns their names.

    Lists of different lengths are not shared. Nor are the norms of layers with different sub-layers: a decoder layer
    has a cross-attention that an encoder layer has not.
    """
    excluded = [name for name, length in _lists(one).items() if _lists(other).get(name) != length]
    excluded += [
        name for name in _layer_norms(one) if _siblings(name, _layer_norms(one)) != _siblings(name, _layer_norms(other))
    ]
    others = dict(other.named_parameters(remove_duplicate=False))
    shared = []
    for name, parameter in one.named_parameters(remove_duplicate=False):
        same_shape = name in others and others[name].shape == parameter.shape and not name.startswith(EMBEDDING)
        if same_shape and not any(name.startswith(f"{prefix}.") for prefix in excluded):
            module, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(module), leaf, parameter)
            shared.append(name)
    if not shared:
        raise InputError(
            "encoder and decoder have no weights of equal name and shape to share",
            remedy="give both one kind, width and number of layers, and a recurrent encoder bidirectional: false",
        )
    return shared


def _layer_norms(part: nn.Module) -> set[str]:
    """The norms that are named after a sub-layer: `layers.0.self_attention_norm`."""
    return {name for name, _ in part.named_modules() if "." in name and name.endswith("_norm")}


def _siblings(name: str, norms: set[str]) -> set[str]:
    parent = name.rpartition(".")[0]
    return {other for other in norms if other.rpartition(".")[0] == parent}


def _lists(part: nn.Module) -> dict[str, int]:
    return {name: len(inner) for name, inner in part.named_modules() if isinstance(inner, nn.ModuleList)}


LANGUAGE_METRICS = ("perplexity", "word_perplexity", "bits_per_character")  # of language models


def complete_recipe(recipe: Recipe, where: str = "recipe") -> Recipe:
    """Fills in every default; refuses combinations that cannot work before anything runs."""
    model = recipe.model
    check_shape(recipe, where)
    recipe = recipe.model_copy(update={"data": complete_sources(recipe, where)})
    parts: dict[str, Any] = {}
    contracts_of = {"encoder": contracts.Encoder, "target_encoder": contracts.Encoder}
    for name, contract in {**contracts_of, "decoder": contracts.Decoder, "head": contracts.Head}.items():
        spec, part_where = getattr(model, name), f"{where}: model.{name}"
        fill = complete_encoder if name in contracts_of else partial(complete, contract)
        parts[name] = None if spec is None else fill(spec, part_where)
        if name != "head" and spec is not None and not isinstance(parts[name].get("width"), int):
            raise InputError(f"{parts[name]['kind']} has no option `width`", where=part_where)
    if recipe.data.sources:
        parts["encoder"] = check_sources(recipe, parts["encoder"], _shapes(recipe), where)
    filled = model.model_copy(update=parts)
    check_widths(filled, where)
    block_size = recipe.data.block_size
    check_positions(filled, recipe.data.max_length if block_size is None else block_size - 1, where)
    try:
        with meta_device():  # shows widths and heads that do not fit, without allocating memory
            built = build_model(filled, 8, 8)
    except InputError as error:
        raise InputError(error.problem, where=f"{where}: model", remedy=error.remedy) from None
    check_size(built, where)
    objective = complete_objective(recipe.training.objective, f"{where}: training.objective")
    check_objective(objective, filled, f"{where}: training.objective")
    if "teacher" not in objective:  # the teacher is loaded later
        try:
            factory(Objective, objective)().check(built)
        except InputError as error:
            raise InputError(error.problem, where=f"{where}: training.objective", remedy=error.remedy) from None
    training = recipe.training.model_copy(update={"objective": objective})
    data = recipe.data
    if data.noise is not None:
        check_noise(recipe, where)
        data = data.model_copy(update={"noise": complete(Noise, data.noise, f"{where}: data.noise")})
    if data.augmentation is not None:
        check_augmentation(recipe, where)
        filled_in = complete(Augmentation, data.augmentation, f"{where}: data.augmentation")
        data = data.model_copy(update={"augmentation": filled_in})
    check_languages(recipe, where)
    strategy = complete_strategy(recipe.generation, f"{where}: generation.strategy")
    decoder = getattr(built, "decoder", None)
    if strategy.get("coverage_penalty") and (decoder is None or not decoder.attention_shape[0]):
        raise no_coverage_error(f"{where}: generation")
    for tracker in recipe.training.trackers:
        complete(contracts.Tracker, tracker, f"{where}: training.trackers")
    complete_logits_processors(recipe.generation, f"{where}: generation.logits_processors")
    evaluation = recipe.evaluation
    if data.format == "text" and filled.encoder is None and "metrics" not in evaluation.model_fields_set:
        evaluation = evaluation.model_copy(update={"metrics": LANGUAGE_METRICS})
    return recipe.model_copy(update={"data": data, "model": filled, "training": training, "evaluation": evaluation})


def complete_encoder(spec: str | Mapping[str, Any], where: str) -> Spec:
    """An encoder with its front end, unless it reads text, and the encoders of its parts, if it has several sources."""
    spec = {"kind": spec} if isinstance(spec, str) else dict(spec)
    front, parts = spec.pop("front", None), spec.pop("parts", None)
    filled = complete(contracts.Encoder, spec, where)
    joins = "parts" in inspect.signature(find(contracts.Encoder, filled["kind"], where)).parameters
    if joins != (parts is not None) or (joins and not parts):
        problem = f"{filled['kind']} needs parts" if joins else f"{filled['kind']} has no parts"
        raise InputError(problem, where=where, remedy="parts: {NAME: {kind: ...}, ...}, named as in data.sources")
    if joins:
        filled["parts"] = {name: complete_encoder(part, f"{where}.parts.{name}") for name, part in parts.items()}
    if front is not None:
        filled["front"] = complete(contracts.FrontEnd, front, f"{where}.front")
    return filled


def complete_sources(recipe: Recipe, where: str) -> DataRecipe:
    """The data section with all options of its sources."""
    filled = {
        name: {"kind": kind}
        if (kind := _text_kind(spec))
        else complete(contracts.Modality, spec, f"{where}: data.sources.{name}")
        for name, spec in recipe.data.sources.items()
    }
    return recipe.data.model_copy(update={"sources": filled})


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...] | None]:
    """The shape of a row of each source; None for text."""
    specs = recipe.data.sources.items()
    return {name: None if _text_kind(spec) else factory(contracts.Modality, spec)().shape for name, spec in specs}  # type: ignore[arg-type]


def _text_kind(spec: Mapping[str, Any] | str) -> str:
    """The kind of a source that is a text, in tokens of the source vocabulary; empty: it names a file."""
    return next((kind for kind in TEXT_KINDS if spec in (kind, {"kind": kind})), "")


def build_modality_source(recipe: Recipe, source: Tokenizer) -> ModalitySource | None:
    """How the sources of a completed recipe are read where they are more than one text; None: they are texts."""
    specs = recipe.data.sources
    if not specs:
        return None
    parts = {
        name: (TagsModality if kind == TAGS else TextModality)(source)
        if (kind := _text_kind(spec))
        else factory(contracts.Modality, spec)()  # type: ignore[arg-type]
        for name, spec in specs.items()
    }
    return ModalitySource.of(parts, [list(specs.items()), source.fingerprint])


def build_source_encoding(recipe: Recipe, tokenizers: tuple[Tokenizer, Tokenizer]) -> SourceEncoding:
    """How a model of this recipe reads its sources."""
    modality_source = build_modality_source(recipe, tokenizers[0])
    if modality_source is not None:
        return ModalitySourceEncoding(modality_source)
    columns = max((corpus.source_parts for corpus in recipe.data.train), default=1)
    return TextSourceEncoding(
        tokenizers[0], masked=recipe.data.noise is not None, separated=tokenizers[0].separates(columns)
    )


def complete_objective(spec: Mapping[str, Any], where: str) -> Spec:
    """Options without a kind are those of cross-entropy: `training.objective.label_smoothing=0` suffices."""
    filled = complete(Objective, {"kind": "cross_entropy", **spec}, where)
    if filled.get("teacher") == "":
        raise InputError(f"{filled['kind']} needs a teacher", where=where, remedy="teacher: RUN, a trained run")
    return filled


def build_model(
    recipe: ModelRecipe, source_size: int, target_size: int, starts: Sequence[bool] | None = None
) -> Transducer:
    """A model with initial weights from a completed recipe and two vocabulary sizes.

    `starts` tells which source ids begin a word (left out: all); only labels for each word depend on it.
    """
    encoder = source = None
    if recipe.encoder is not None:
        encoder, source = build_encoder(recipe.encoder, source_size, recipe.scale_embedding)
        if source is not None:
            source.source_eos = recipe.source_eos
        for part in encoder.modules():
            if starts is not None and isinstance(part, WordPieceEmbedding):
                part.word_starts = torch.tensor(starts)
    if recipe.head is not None:
        assert encoder is not None
        begins = torch.ones(source_size, dtype=torch.bool) if starts is None else torch.tensor(starts)
        return _build_head_model(recipe, encoder, source, (source_size, target_size), begins)
    decoder = _build_decoder(recipe, encoder, source, target_size)
    return EncoderDecoder(encoder, decoder) if encoder is not None else DecoderOnly(decoder)


def _build_head_model(
    recipe: ModelRecipe,
    encoder: contracts.Encoder,
    source: Embedding | None,
    sizes: tuple[int, int],
    begins: torch.Tensor,
) -> Transducer:
    """An encoder with a head; `sizes`: source tokens and labels; `begins`: which source ids begin a word."""
    assert recipe.head is not None
    head = factory(contracts.Head, recipe.head)(encoder.width, sizes[1])
    if gives_vectors(recipe):
        if recipe.target_encoder is None:
            return EmbeddingModel(encoder, head)
        other, _ = build_encoder(recipe.target_encoder, sizes[1], recipe.scale_embedding)
        return EmbeddingModel(encoder, head, (other, factory(contracts.Head, recipe.head)(other.width, sizes[1])))
    if head.label_unit == "path":
        return CTCModel(encoder, head)
    if recipe.tie != "none":
        head.tie(source)
    begins = begins if head.label_unit == "word" else torch.ones_like(begins)
    begins[EOS] = False
    return EncoderOnly(encoder, head, begins, sizes[0])


def _build_decoder(
    recipe: ModelRecipe, encoder: contracts.Encoder | None, source: Embedding | None, size: int
) -> contracts.Decoder:
    """The decoder with its embedding and output, tied, shared and wrapped as the recipe says."""
    assert recipe.decoder is not None
    width = recipe.decoder["width"]
    if source is not None and "all" in (recipe.tie, recipe.share):
        target = source  # one embedding for both sides
    else:
        target = Embedding(size, embedding_width(recipe.decoder), scale_embedding=recipe.scale_embedding)
    transform = output_transform(width, recipe.decoder.get("norm_eps")) if recipe.output == "deep" else []
    tied = target if recipe.tie != "none" else None
    output = Output(width, size, tied, transform, cap=recipe.logit_cap)
    memory_width = encoder.width if encoder is not None else 0
    decoder: contracts.Decoder = factory(contracts.Decoder, recipe.decoder)(target, output, memory_width)
    if recipe.share != "none" and encoder is not None:
        share_weights(encoder, decoder)
    if recipe.copy is not None:
        named, copy = list((recipe.encoder or {}).get("parts", {})), recipe.copy
        number = None if copy.source is None else named.index(copy.source)
        decoder = PointerGeneratorDecoder(decoder, width, layer=copy.layer, head=copy.head, source=number)
    if recipe.ctc is not None:
        decoder = JointCTCDecoder(decoder, memory_width, size, weight=recipe.ctc.weight)
    return decoder


def build_encoder(spec: Spec, size: int, scale_embedding: bool) -> tuple[contracts.Encoder, Embedding | None]:
    """The encoder, and the embedding of its text sources, if any; text sources of equal width share it."""
    own = {name: value for name, value in spec.items() if name not in ("front", "parts")}
    if "parts" in spec:
        texts: dict[int, Embedding] = {}
        parts = {}
        for name, part in spec["parts"].items():
            parts[name], text = build_encoder(part, size, scale_embedding)
            if text is not None and parts[name].embedding is text:  # texts of equal width share their embedding
                parts[name].embedding = texts.setdefault(text.width, text)
        return factory(contracts.Encoder, own)(parts), texts.get(spec["width"])
    if "front" in spec:
        return factory(contracts.Encoder, own)(factory(contracts.FrontEnd, spec["front"])(embedding_width(spec))), None
    embedding = Embedding(size, embedding_width(spec), scale_embedding=scale_embedding)
    return factory(contracts.Encoder, own)(embedding), embedding


def build_objective(spec: Spec, open_teacher: Callable[[str], nn.Module]) -> Objective:
    """The objective; one with the option `teacher` gets the loaded run as its positional parameter."""
    parts = [open_teacher(spec["teacher"])] if "teacher" in spec else []
    objective: Objective = factory(Objective, spec)(*parts)
    return objective


def build_noise(spec: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Noise | None:
    """The noise for texts of this tokenizer; None: no noise."""
    if spec is None:
        return None
    noise: Noise = factory(Noise, dict(spec))(tokenizer)
    return noise


def build_augmentation(spec: Mapping[str, Any] | None) -> Augmentation | None:
    """What makes artificial training pairs; None: there are none."""
    if spec is None:
        return None
    augmentation: Augmentation = factory(Augmentation, dict(spec))()
    return augmentation


def complete_strategy(settings: GenerationRecipe, where: str = "generation.strategy") -> Spec:
    """The search strategy with all options; those left out are the settings of the same name, `beam` is the width."""
    given = {"kind": settings.strategy} if isinstance(settings.strategy, str) else dict(settings.strategy)
    known = options(find(contracts.Strategy, settings.strategy_kind, where))
    named = {**dict(settings), "width": max(settings.beam, settings.nbest)}
    return complete(contracts.Strategy, {**{name: named[name] for name in known if name in named}, **given}, where)


def build_strategy(settings: GenerationRecipe) -> contracts.Strategy:
    strategy: contracts.Strategy = factory(contracts.Strategy, complete_strategy(settings))()
    return strategy


def complete_logits_processors(settings: GenerationRecipe, where: str = "generation.logits_processors") -> list[Spec]:
    """The logits processors that are listed, with all options."""
    return [complete(contracts.LogitsProcessor, spec, where) for spec in settings.logits_processors]


def build_logits_processors(settings: GenerationRecipe) -> list[contracts.LogitsProcessor]:
    """Those that the settings imply, then those that are listed."""
    processors: list[contracts.LogitsProcessor] = []
    if settings.min_length:
        processors.append(MinLength(length=settings.min_length))
    if settings.no_repeat_ngram:
        processors.append(NoRepeatNgram(size=settings.no_repeat_ngram))
    if settings.repetition_penalty > 1:
        processors.append(RepetitionPenalty(penalty=settings.repetition_penalty))
    if settings.suppress:
        processors.append(SuppressTokens(tokens=list(settings.suppress)))
    if settings.suppress_first:
        forced = len(settings.forced_prefix) + (settings.forced_bos is not None)
        processors.append(SuppressTokens(tokens=list(settings.suppress_first), at=forced))
    if settings.forced_bos is not None:
        processors.append(ForcedBOS(token=settings.forced_bos))
    if settings.forced_eos:
        processors.append(ForcedEOS(max_length=settings.max_length))
    listed = (factory(contracts.LogitsProcessor, spec)() for spec in complete_logits_processors(settings))
    return [*processors, *listed]


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
