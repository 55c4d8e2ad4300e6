"""Initialisation of a model from trained runs: weights that fit, and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.data.prepare import Tokenizers, train_tokenizers
from transduce.data.readers.word_vectors import WordVectors, read_word_vectors
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.inference.quantisation import check_learns
from transduce.layers.embedding import Embedding
from transduce.recipe import InitRecipe, ModelRecipe, Recipe, TextRecipe, build
from transduce.recipe.build import meta_device
from transduce.recipe.compatibility import labels_per
from transduce.run import Run
from transduce.transfer.lora import load_run_weights

SECTIONS = ("encoder", "decoder", "model")  # in this order: `model` fills what the other two left uninitialised
MAX_SHOWN = 3  # names printed of a long list


@dataclass(frozen=True)
class PretrainedRun:
    """A trained run named in the `init` section. Only tensors are read: no network is built and no code is run."""

    section: str
    folder: str
    recipe: Recipe
    tokenizers: Tokenizers
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class LoadReport:
    """The weights loaded from one run."""

    section: str
    run: str
    same_vocabulary: tuple[str, ...]  # the sides (source, target) on which both runs have the same tokens
    loaded: tuple[str, ...]
    skipped: tuple[str, ...]  # weights of the run that do not fit by section, name, shape or vocabulary


@dataclass(frozen=True)
class InitReport:
    """The weights loaded from all runs, and the names of those that no run provided."""

    runs: tuple[LoadReport, ...]
    new: tuple[str, ...]
    vectors: tuple[str, ...] = ()  # how many words have a vector from a file

    def describe(self) -> list[str]:
        lines = []
        for one in self.runs:
            sides = " and ".join(one.same_vocabulary)
            vocabulary = f"same vocabulary: {sides}" if sides else "different vocabularies on both sides"
            loaded, skipped = _summarise(one.loaded), _summarise(one.skipped)
            lines.append(f"init.{one.section} from {one.run}: {loaded} loaded, {skipped} skipped; {vocabulary}")
        return [*lines, *self.vectors, f"init: {_summarise(self.new)} newly initialised"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _summarise(names: Sequence[str]) -> str:
    """`14 weights (a, b, c ...)`"""
    if not names:
        return "0 weights"
    shown = ", ".join(names[:MAX_SHOWN]) + (" ..." if len(names) > MAX_SHOWN else "")
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({shown})"


def open_pretrained(init: InitRecipe) -> list[PretrainedRun]:
    """Opens the runs of the `init` section. A run that is missing or has no checkpoint is an error."""
    result = []
    for section in SECTIONS:
        folder = getattr(init, section)
        if folder is None:
            continue
        run = Run(Path(folder))
        recipe = run.recipe()
        check_learns(recipe, folder)
        if not run.checkpoints.steps() and run.checkpoints.final() is None:
            raise InputError(
                f"init.{section}: this run has no checkpoint yet", where=folder, remedy="train it with --resume"
            )
        result.append(PretrainedRun(section, folder, recipe, run.tokenizers(), load_run_weights(run, recipe)))
    return result


def choose_tokenizers(recipe: Recipe, pretrained: Sequence[PretrainedRun]) -> Tokenizers:
    """The tokenizers of both sides; labels of words need to know where the words of the source begin."""
    source, target = _chosen_tokenizers(recipe, pretrained)
    first, second = recipe.tokens.source, recipe.tokens.target
    if source is target:
        return (source.with_cls(first.cls),) * 2
    marked = source.with_word_marks(labels_per(recipe.model) == "word")
    return marked.with_cls(first.cls), target.with_cls(second.cls)


def _chosen_tokenizers(recipe: Recipe, pretrained: Sequence[PretrainedRun]) -> Tokenizers:
    """Those of `init.tokens`, or of the pretrained runs where the recipe has the same settings, else newly trained.

    Labels are always collected from the new data: the classes of a head belong to its own data set.
    """
    tokens = recipe.tokens
    if recipe.init.tokens is not None:
        return _given_tokenizers(recipe.init.tokens, recipe)
    reused: dict[int, Tokenizer] = {}  # 0: source, 1: target
    for side, part in enumerate(("encoder", "decoder")):
        wanted = (tokens.source, tokens.target)[side]
        for one in pretrained:
            given = one.recipe.tokens
            same = (
                _same_settings(wanted, (given.source, given.target)[side])
                and given.oov_placeholders == tokens.oov_placeholders
            )
            if one.section in (part, "model") and same:
                reused.setdefault(side, one.tokenizers[side])
    if recipe.model.head is not None:
        reused.pop(1, None)
    if len(reused) == 2 and tokens.source.kind == "given":  # imported: two tokenizers over one vocabulary
        return reused[0], reused[1]
    if tokens.shared:
        shared = [one for one in reused.values() if any(_shares(run, one) for run in pretrained)]
        return (shared[0], shared[0]) if shared else train_tokenizers(recipe)
    source, target = train_tokenizers(recipe, reused)
    return reused.get(0, source), reused.get(1, target)  # the only text of a language model may be reused too


def _shares(run: PretrainedRun, tokenizer: Tokenizer) -> bool:
    """Whether both sides of a run have this tokenizer."""
    return {one.fingerprint for one in run.tokenizers} == {tokenizer.fingerprint}


def _given_tokenizers(folder: str, recipe: Recipe) -> Tokenizers:
    """The tokenizers of a run, whose `tokens` section must be that of the recipe."""
    run, wanted = Run(Path(folder)), recipe.tokens
    given = run.recipe().tokens
    same = _same_settings(wanted.source, given.source) and _same_settings(wanted.target, given.target)
    if not same or (wanted.shared, wanted.oov_placeholders) != (given.shared, given.oov_placeholders):
        raise InputError(
            "init.tokens: the `tokens` section of this run is another one",
            where=folder,
            remedy="copy the `tokens` section of its recipe.yaml",
        )
    return run.tokenizers()


def _same_settings(wanted: TextRecipe, given: TextRecipe) -> bool:
    """Ignores BPE dropout and <cls>, which change the segmentation and not the vocabulary."""
    ignored = {"dropout": 0.0, "cls": False}
    return wanted.model_copy(update=ignored) == given.model_copy(update=ignored)


def check_pretrained(recipe: Recipe, tokenizers: Tokenizers, pretrained: Sequence[PretrainedRun]) -> None:
    """Raises an error for a run of which no weight fits, before any memory is allocated for the model."""
    if pretrained:
        source, target = tokenizers
        with meta_device():
            network = build.build_model(recipe.model, source.size, target.size)
        load_pretrained(network, recipe.model, tokenizers, pretrained)


def load_pretrained(
    network: nn.Module, recipe: ModelRecipe, tokenizers: Tokenizers, pretrained: Sequence[PretrainedRun]
) -> InitReport:
    """Copies every weight that has the same name, the same shape and, if its rows are tokens, the same vocabulary."""
    current = network.state_dict(keep_vars=True)  # the tensors themselves: tied weights are one object with two names
    vocabulary_sides = vocabulary_weights(recipe) if pretrained else {}
    values: dict[int, Tensor] = {}  # id of a tensor of the network -> its new value
    reports = []
    for run in pretrained:
        same = _same_vocabulary(tokenizers, run)
        loaded = []
        for name, tensor in current.items():
            given = _refit(network, name, run.weights.get(name), tensor)
            in_section = run.section == "model" or name.startswith(f"{run.section}.")
            same_tokens = vocabulary_sides.get(name, set()) <= same
            if given is None or not in_section or given.shape != tensor.shape or not same_tokens:
                continue
            # The first run that provides a tensor wins; a tied one may appear again under its other name.
            if torch.equal(values.setdefault(id(tensor), given), given):
                loaded.append(name)
        if not loaded:
            raise _no_fit_error(run, current)
        skipped = tuple(name for name in run.weights if name not in loaded)
        reports.append(LoadReport(run.section, run.folder, tuple(sorted(same)), tuple(loaded), skipped))
    with torch.no_grad():
        for tensor in current.values():
            if id(tensor) in values:
                tensor.copy_(values[id(tensor)])
    return InitReport(tuple(reports), tuple(name for name, tensor in current.items() if id(tensor) not in values))


def load_word_vectors(network: nn.Module, init: InitRecipe, tokenizers: Tokenizers) -> list[str]:
    """Copies word vectors from files into the embeddings, and reports how many words have one."""
    report = []
    sides = zip(("source", "target"), ("encoder", "decoder"), tokenizers, strict=True)
    for side, part, tokenizer in sides:
        path = getattr(init, f"{side}_vectors")
        if path is None:
            continue
        table = getattr(getattr(network, part, None), "embedding", None)
        if not isinstance(table, Embedding) or tokenizer.kind != "words":
            remedy = f"set tokens.{side}.kind: words, or leave it out"
            raise InputError(f"init.{side}_vectors: the {side} is not read as words", where=path, remedy=remedy)
        pieces = tokenizer.vocabulary.pieces
        known = read_word_vectors(path, [*pieces, *(piece.lower() for piece in pieces)])
        if known.width != table.width:
            problem = (
                f"init.{side}_vectors: the vectors have {known.width} numbers, and the {part} has width {table.width}"
            )
            raise InputError(problem, where=path, remedy=f"set model.{part}.width: {known.width}")
        report.append(f"init.{side}_vectors from {path}: {_copy_vectors(table, pieces, known)} of {len(pieces)} words")
    return report


def _copy_vectors(table: Embedding, pieces: Sequence[str], known: WordVectors) -> int:
    """The vector of each word, or of its lower-cased form; the embedding multiplies by its scale."""
    rows = {word: row for row, word in enumerate(known.words)}
    found = [(number, rows.get(piece, rows.get(piece.lower()))) for number, piece in enumerate(pieces)]
    chosen = [(number, row) for number, row in found if row is not None and number >= len(SPECIALS)]
    if chosen:
        numbers, given = map(list, zip(*chosen, strict=True))
        with torch.no_grad():
            table.weight[numbers] = torch.from_numpy(known.vectors[given]).to(table.weight) / table.scale
    return len(chosen)


def _refit(network: nn.Module, name: str, given: Tensor | None, current: Tensor) -> Tensor | None:
    """A weight of another shape, converted by the `refit` method of its module where there is one."""
    if given is None or given.shape == current.shape:
        return given
    path, _, parameter = name.rpartition(".")
    refit = getattr(network.get_submodule(path), "refit", None)
    converted: Tensor | None = None if refit is None else refit(parameter, given)
    return given if converted is None else converted


def _same_vocabulary(tokenizers: Tokenizers, run: PretrainedRun) -> set[str]:
    pairs = zip(("source", "target"), tokenizers, run.tokenizers, strict=True)
    return {side for side, current, given in pairs if _plain(current) == _plain(given)}


def _plain(tokenizer: Tokenizer) -> str:
    return tokenizer.with_word_marks(False).with_cls(False).fingerprint


def vocabulary_weights(recipe: ModelRecipe) -> dict[str, set[str]]:
    """The weights whose rows are tokens, with their sides: those whose shape depends on a vocabulary size."""

    def shapes(source: int, target: int) -> dict[str, torch.Size]:
        with meta_device():
            network = build.build_model(recipe, source, target)
        return {name: tensor.shape for name, tensor in network.state_dict().items()}

    reference, result = shapes(8, 8), dict[str, set[str]]()
    for side, changed in (("source", shapes(9, 8)), ("target", shapes(8, 9))):
        for name, shape in changed.items():
            if shape != reference[name]:
                result.setdefault(name, set()).add(side)
    return result


def _no_fit_error(run: PretrainedRun, current: Mapping[str, Tensor]) -> InputError:
    """Names the first weight whose shapes differ, or the names that only one of the two models has."""
    prefix = "" if run.section == "model" else f"{run.section}."
    here = [name for name in current if name.startswith(prefix)]
    common = [name for name in here if name in run.weights]
    differing = next((name for name in common if current[name].shape != run.weights[name].shape), None)
    if not here:
        reason = f"this model has no {run.section}"
    elif differing:
        there, wanted = tuple(run.weights[differing].shape), tuple(current[differing].shape)
        reason = f"{differing} has shape {there} in the run and {wanted} in this model: give both the same options"
    elif common:
        reason = "their common weights belong to another vocabulary, or another run provided them: leave it out"
    else:
        reason = f"it has {_summarise(list(run.weights))}; this model needs {_summarise(here)}"
    return InputError(f"init.{run.section}: no weight of this run fits", where=run.folder, remedy=reason)
