"""A recipe in, objects out: the model, its objective, noise, strategy and rules; and every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from transduce import contracts
from transduce.data.noise import Noise
from transduce.data.text import Tokenizer
from transduce.decoders.copying import Copying
from transduce.decoding.rules import Ban, Closed, First, MinLength, NoRepeat, RepetitionPenalty
from transduce.decoding.strategies import Beam, FullBeam, Greedy, Sample
from transduce.errors import InputError
from transduce.fitting import check_noise, check_objective, check_positions, check_shape, check_widths, gives_vectors
from transduce.flow import EOS
from transduce.layers.embedding import Embedding, Output
from transduce.layers.outline import outlined
from transduce.layers.sharing import share_weights
from transduce.model import DecoderOnly, Embedder, EncoderDecoder, EncoderOnly, Transducer
from transduce.objectives import Objective
from transduce.recipe import GenerationRecipe, ModelRecipe, Recipe
from transduce.shelves import Spec, complete, maker

LANGUAGE_METRICS = ("perplexity", "word_perplexity", "bits_per_character")  # where there is no source


def complete_recipe(recipe: Recipe, where: str = "recipe") -> Recipe:
    """Every default of model and objective filled in; what cannot work together is refused before anything runs."""
    model = recipe.model
    check_shape(recipe, where)
    parts: dict[str, Any] = {}
    for name, contract in (("encoder", contracts.Encoder), ("decoder", contracts.Decoder), ("head", contracts.Head)):
        spec = getattr(model, name)
        parts[name] = None if spec is None else complete(contract, spec, f"{where}: model.{name}")
        if name != "head" and spec is not None and not isinstance(parts[name].get("width"), int):
            raise InputError(f"{parts[name]['kind']} has no option `width`", where=f"{where}: model.{name}")
    filled = model.model_copy(update=parts)
    check_widths(filled, where)
    passage = recipe.data.passage
    check_positions(filled, recipe.data.max_length if passage is None else passage - 1, where)
    try:
        with outlined():  # widths and heads that do not fit show here, at no cost
            built = build_model(filled, 8, 8)
    except InputError as error:
        raise InputError(error.problem, where=f"{where}: model", remedy=error.remedy) from None
    objective = complete_objective(recipe.training.objective, f"{where}: training.objective")
    check_objective(objective, filled, f"{where}: training.objective")
    if "teacher" not in objective:  # which is opened later
        try:
            maker(Objective, objective)().check(built)
        except InputError as error:
            raise InputError(error.problem, where=f"{where}: training.objective", remedy=error.remedy) from None
    training = recipe.training.model_copy(update={"objective": objective})
    data = recipe.data
    if data.noise is not None:
        check_noise(recipe, where)
        data = data.model_copy(update={"noise": complete(Noise, data.noise, f"{where}: data.noise")})
    evaluation = recipe.evaluation
    if data.form == "text" and filled.encoder is None and "metrics" not in evaluation.model_fields_set:
        evaluation = evaluation.model_copy(update={"metrics": LANGUAGE_METRICS})
    return recipe.model_copy(update={"data": data, "model": filled, "training": training, "evaluation": evaluation})


def complete_objective(spec: Mapping[str, Any], where: str) -> Spec:
    """Options without a kind are those of cross-entropy: `training.objective.label_smoothing=0` needs no more."""
    filled = complete(Objective, {"kind": "cross_entropy", **spec}, where)
    if filled.get("teacher") == "":
        raise InputError(f"{filled['kind']} needs a teacher", where=where, remedy="teacher: RUN, a trained run")
    return filled


def build_model(
    recipe: ModelRecipe, source_size: int, target_size: int, starts: Sequence[bool] | None = None
) -> Transducer:
    """A completed model recipe and two vocabulary sizes -> a model with fresh weights.

    `starts` tells which source ids begin a word (left out: all); only labels for each word depend on it.
    """
    encoder = source = None
    if recipe.encoder is not None:
        source = Embedding(source_size, recipe.encoder["width"], scaled=recipe.scaled)
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
    target = source if one_table and source is not None else Embedding(target_size, width, scaled=recipe.scaled)
    output = Output(width, target_size, target if recipe.tie != "none" else None)
    memory_width = encoder.width if encoder is not None else 0
    decoder = maker(contracts.Decoder, recipe.decoder)(target, output, memory_width)
    if recipe.share != "none" and encoder is not None:
        share_weights(encoder, decoder)
    if recipe.copying is not None:
        decoder = Copying(decoder, width, layer=recipe.copying.layer, head=recipe.copying.head)
    return EncoderDecoder(encoder, decoder) if encoder is not None else DecoderOnly(decoder)


def build_objective(spec: Spec, open_teacher: Callable[[str], nn.Module]) -> Objective:
    """A completed spec -> the objective; one with the option `teacher` is given the opened run as its first part."""
    parts = [open_teacher(spec["teacher"])] if "teacher" in spec else []
    objective: Objective = maker(Objective, spec)(*parts)
    return objective


def build_noise(spec: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Noise | None:
    """A completed spec -> how lines of these tokens are damaged; None: not at all."""
    if spec is None:
        return None
    noise: Noise = maker(Noise, dict(spec))(tokenizer)
    return noise


def build_strategy(settings: GenerationRecipe) -> contracts.Strategy:
    if settings.strategy == "sample":
        width = max(settings.beam, settings.nbest)
        return Sample(width=width, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    if settings.strategy == "greedy":
        return Greedy()
    width = max(settings.beam, settings.nbest)
    if settings.strategy == "full_beam":
        return FullBeam(width=width, length_penalty=settings.length_penalty, stop=settings.stop)
    return Beam(width=width, length_penalty=settings.length_penalty)


def build_rules(settings: GenerationRecipe) -> list[contracts.Rule]:
    rules: list[contracts.Rule] = []
    if settings.min_length:
        rules.append(MinLength(settings.min_length))
    if settings.no_repeat:
        rules.append(NoRepeat(settings.no_repeat))
    if settings.repetition_penalty > 1:
        rules.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.never:
        rules.append(Ban(list(settings.never)))
    if settings.never_first:
        rules.append(Ban(list(settings.never_first), first=True))
    if settings.first is not None:
        rules.append(First(settings.first))
    if settings.closed:
        rules.append(Closed(settings.max_length))
    return rules


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
