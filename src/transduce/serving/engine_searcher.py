"""Searcher of a model whose sources are searched by an engine, beside those of other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transduce.decoding.strategies import BestPath
from transduce.flow import Batch, Hypothesis
from transduce.inference.generation import Searcher, sample_seeds
from transduce.inference.terminology import PhraseIds
from transduce.modalities.source_encoding import EncodedSource
from transduce.model import CTCModel
from transduce.recipe import GenerationRecipe
from transduce.serving.engine import Engine
from transduce.serving.task_queue import SearchRow, Task


class EngineSearcher(Searcher):
    """A searcher whose sources are searched by an engine, beside those of other requests. Waits for the results.

    `Model.generate` with it does everything around a search: protected spans, recordings in windows, documents.
    """

    def __init__(self, engine: Engine, submit: Callable[[Task], None]) -> None:
        base = engine.searcher
        super().__init__(base.network, base.source_encoding, base.max_target_length, base.graphs)
        self.engine, self.base, self._submit = engine, base, submit

    def search_all(  # type: ignore[override]
        self,
        sources: Sequence[EncodedSource],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
        *,
        phrases: Sequence[PhraseIds] | None = None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        if not steps_alone(self.base, settings) or (phrases is not None and any(phrases)):
            arguments = (sources, prefixes, settings, numbers)
            found: list[list[Hypothesis]] = self.engine.call(
                lambda: self.base.search_all(*arguments, phrases=phrases, **options)
            )
            return found
        return self._wait(self.engine.rows(sources, prefixes, settings, numbers), settings)

    def search_batch(
        self,
        settings: GenerationRecipe,
        batch: Batch,
        max_lengths: torch.Tensor,
        prefixes: list[list[int]] | None,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        """Rows of a language model, which have no source."""
        if batch.source is not None or not steps_alone(self.base, settings):
            found: list[list[Hypothesis]] = self.engine.call(
                lambda: self.base.search_batch(settings, batch, max_lengths, prefixes, numbers)
            )
            return found
        seeds = sample_seeds(settings, numbers)
        forced = prefixes if prefixes is not None else [list(settings.forced_prefix)] * len(seeds)
        rows = zip(forced, max_lengths.tolist(), seeds, strict=True)
        return self._wait([SearchRow(None, tuple(one), length, seed) for one, length, seed in rows], settings)

    def _wait(self, rows: list[SearchRow], settings: GenerationRecipe) -> list[list[Hypothesis]]:
        outcome, ended = list[Any](), threading.Event()

        def done(value: Any, error: BaseException | None) -> None:
            outcome[:] = value, error
            ended.set()

        longest = max((row.max_length for row in rows), default=1)
        settings = settings.model_copy(update={"max_length": max(longest, settings.max_length)})
        self._submit(Task(lambda: (rows, settings), lambda found: found, done))
        ended.wait()
        if outcome[1] is not None:
            raise outcome[1]
        return list(outcome[0])


def steps_alone(searcher: Searcher, settings: GenerationRecipe) -> bool:
    """Whether a search is nothing but steps over rows, which an open search can do."""
    strategy, _ = searcher.options(settings)
    best_path = isinstance(searcher.network, CTCModel) and isinstance(strategy, BestPath)
    return not settings.detected_first and not best_path
