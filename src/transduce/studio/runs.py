"""Runs that the studio shows: models loaded once, a lock for each, a cache of results, example inputs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from transduce.data.readers.corpus import read_corpus
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, nearest
from transduce.explain.attention import DecodedSource, Explanation
from transduce.explain.attribution import METHODS
from transduce.explain.failures import OutputWarning
from transduce.flow import BOS, Batch, Example, Padded
from transduce.inference import Model
from transduce.model import DecoderOnly, EncoderDecoder, EncoderOnly

Found = TypeVar("Found")
CACHED = 64  # results kept for each run
EXAMPLES = 6  # inputs that are offered for each run
LOOKED_AT = 200  # lines of a corpus among which examples are chosen
READABLE = 24  # characters of a source that makes a good example


class StudioRun:
    """A loaded model with its name. Computations take its lock: one at a time, since some of them add hooks."""

    def __init__(self, name: str, model: Model, folder: Path | None = None, examples: Sequence[str] = ()) -> None:
        self.name, self.model, self.folder = name, model, folder
        self.lock = threading.RLock()
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self.examples = [{"source": text, "target": ""} for text in examples] or self._examples()

    def once(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """The result of a computation, or the same object again where this key was computed a short while ago."""
        with self.lock:
            if key not in self._results:
                self._results[key] = compute()
                while len(self._results) > CACHED:
                    self._results.popitem(last=False)
            self._results.move_to_end(key)
            found: Found = self._results[key]
            return found

    def changed(self, changes: tuple[str, ...] = ()) -> Model:
        """The model, or one with interventions, which shares its weights."""
        return self.once(("changed", changes), lambda: self.model.intervene(changes)) if changes else self.model

    def explanation(
        self, source: str, target: str = "", methods: tuple[str, ...] = (), changes: tuple[str, ...] = ()
    ) -> Explanation:
        """Tokens, scores and attention of a source with a given target, or with the output of the model ("")."""
        search, model = self._nbest(target), self.changed(changes)
        key = ("explanation", source, target, methods, changes)
        return self.once(key, lambda: model.explain(source, target or None, methods or None, **search))

    def plain_attribution(self, source: str, target: str, method: str) -> np.ndarray:
        """T S: an attribution of a given target, without its measures."""
        key = ("plain attribution", source, target, method)
        return self.once(key, lambda: self.model.explain(source, target, [method], measures=False).attributions[method])

    def warnings(self, source: str, changes: tuple[str, ...] = ()) -> tuple[OutputWarning, ...]:
        """What the failure detectors find in the output of a source; nothing where the model generates none."""
        if not isinstance(self.model.network, EncoderDecoder | DecoderOnly):
            return ()
        model = self.changed(changes)
        return self.once(
            ("warnings", source, changes), lambda: model.generate([source], long_sources="truncate")[0].warnings
        )

    def decoded(self, source: str, target: str = "", changes: tuple[str, ...] = ()) -> DecodedSource:
        """A source with its hypothesis: a given target, or the output of the model."""
        key = ("decoded", source, target, changes)
        return self.once(key, lambda: self.changed(changes)._decoded(source, target or None, {}))

    def teacher_forcing(
        self, source: str, target: str = "", changes: tuple[str, ...] = ()
    ) -> tuple[Batch, torch.Tensor]:
        """The batch of one source, and what the decoder reads: <s> and all target tokens but the last (1 T)."""
        decoded = self.decoded(source, target, changes)
        read = Padded.from_rows([[BOS, *decoded.hypothesis.ids[:-1]]]).to(self.model.device)
        if decoded.source is None:
            return Batch(target=read), read.values
        return self.model.source_encoding.batch([decoded.source]).to(self.model.device), read.values

    def _nbest(self, target: str) -> dict[str, Any]:
        width = self.model.recipe.generation.beam
        searched = not target and isinstance(self.model.network, EncoderDecoder | DecoderOnly)
        return {"nbest": width} if searched and width and width > 1 else {}

    @property
    def shape(self) -> str:
        """The shape of the model, in the words that the table of views uses."""
        network = self.model.network
        if self.model.sourceless:
            return "language-model"
        if isinstance(network, EncoderDecoder):
            return "encoder-decoder"
        return "decoder-only" if isinstance(network, DecoderOnly) else "encoder-head"

    @property
    def modality(self) -> str:
        """What a source is: text, image, audio or video; several: the first that is not text."""
        kinds = [kind for corpus in self.model.recipe.data.train for kind in corpus.modalities]
        found = [str(kind) for kind in kinds if str(kind) != "text"]
        return found[0] if found else "text"

    def describe(self) -> dict[str, Any]:
        """Facts for the run selector and for the choice of views."""
        model = self.model.recipe.model
        parts = {name: part["kind"] for name, part in model if isinstance(part, Mapping) and "kind" in part}
        return {
            "name": self.name,
            "shape": self.shape,
            "modality": self.modality,
            "parts": parts,
            "parameters": self.model.parameters,
            "generates": isinstance(self.model.network, EncoderDecoder | DecoderOnly),
            "classifies": isinstance(self.model.network, EncoderOnly),
            "beam": self.model.recipe.generation.beam,
            "methods": [] if self.model.sourceless else list(METHODS),
            "trained": self.folder is not None,
            "examples": self.examples,
        }

    def _examples(self) -> list[dict[str, str]]:
        """Short lines of the development, test or training data, where the files are still there."""
        with suppress(InputError, OSError, ValueError):
            unlike = {one.source: one for one in islice(self._lines(), LOOKED_AT)}
            near = sorted(unlike.values(), key=lambda one: abs(len(one.source) - READABLE))
            return [{"source": one.source, "target": one.target or ""} for one in near[:EXAMPLES]]
        return []

    def _lines(self) -> Iterator[Example]:
        data = self.model.recipe.data
        for corpus in [*data.dev, *data.test, *data.train][:1]:
            yield from read_corpus(corpus, "drop")


@dataclass(frozen=True)
class GoldFiles:
    """Pairs and their gold alignments, for the view of word alignment."""

    pairs: str
    gold: str


@dataclass(frozen=True)
class Studio:
    """The runs of one server, by name, in the order in which they were given."""

    runs: Mapping[str, StudioRun]
    gold: GoldFiles | None = None

    def run(self, name: str = "") -> StudioRun:
        """A run by its name; the first one without a name."""
        if not name:
            return next(iter(self.runs.values()))
        if name not in self.runs:
            raise InputError(f"no run is called {name!r}", where="run", remedy=nearest(name, self.runs))
        return self.runs[name]

    def other_seeds(self, run: StudioRun) -> list[StudioRun]:
        """The other runs that differ from this one in the seed of their training alone, as far as a map can tell."""
        return [one for one in self.runs.values() if one is not run and _same_but_seed(one.model, run.model)]


def _same_but_seed(first: Model, second: Model) -> bool:
    """Whether two models have the same parts and tokens, and were trained with different seeds."""
    if first.recipe.training.seed == second.recipe.training.seed or first.recipe.model != second.recipe.model:
        return False
    sides = ((first.source, second.source), (first.target, second.target))
    return all(_pieces(one) == _pieces(other) for one, other in sides)


def _pieces(tokenizer: Tokenizer | None) -> list[str] | None:
    return None if tokenizer is None else [tokenizer.piece(id_) for id_ in range(tokenizer.size)]


def name_runs(paths: Sequence[str | Path]) -> list[str]:
    """The shortest names that tell the runs apart: the last part of each path, or as many as it takes."""
    parts = [Path(path).resolve().parts if Path(path).exists() else Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-length:]).lstrip("/") for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{Path(path).name} {number}" for number, path in enumerate(paths, 1)]


def open_runs(
    paths: Sequence[str | Path], *, device: str = "auto", trust_user_code: bool = False, examples: Sequence[str] = ()
) -> dict[str, StudioRun]:
    """Loads every run, once."""
    from transduce.inference import load

    runs = {}
    for name, path in zip(name_runs(paths), paths, strict=True):
        model = load(path, device=device, trust_user_code=trust_user_code)
        runs[name] = StudioRun(name, model, Path(path) if Path(path).is_dir() else None, examples)
    return runs
