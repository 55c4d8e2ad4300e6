"""Continuous batching of lines: the outputs of plain batches, with every search option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_fixtures import colour_pairs

import transduce
from transduce.inference.generation import Searcher
from transduce.kernels.cuda_graph import SearchGraphs

OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": "greedy"},
    {"beam": 3, "nbest": 2, "min_length": 3},
    {"strategy": "sample", "temperature": 1.5, "nbest": 2, "seed": 5},
]


@pytest.fixture(scope="module")
def opened(transformer_run: Path) -> transduce.Model:
    return transduce.load(transformer_run, device="cpu")


@pytest.mark.parametrize("prefixed", [False, True], ids=["free", "prefixed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lines_are_answered_as_in_batches(
    opened: transduce.Model, options: dict[str, Any], prefixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [source for source, _ in colour_pairs(60, seed=4)]
    texts[7:7] = ["", "red"]
    prefixes = ["RED"[: number % 4] for number in range(len(texts))] if prefixed else None
    options = {**options, "max_length": 12, "batch_tokens": 256, "prefixes": prefixes}
    wanted = opened.generate(texts, **options)
    searches: list[int] = []

    def counted(
        self: Searcher, groups: Any, settings: Any, slots: int, inner: Any = Searcher.search_continuously
    ) -> Any:
        searches.append(slots)
        return inner(self, groups, settings, slots)

    monkeypatch.setattr(Searcher, "continuous", True)
    monkeypatch.setattr(Searcher, "search_continuously", counted)
    found = opened.generate(texts, **options)
    assert searches
    for one, other in zip(found, wanted, strict=True):
        assert [rival.text for rival in one.nbest] == [rival.text for rival in other.nbest]
        assert one.token_scores == pytest.approx(other.token_scores, abs=2e-4)
        assert (one.source, one.complete, one.source_cut) == (other.source, other.complete, other.source_cut)


def test_recorded_searches_of_texts_are_refilled(opened: transduce.Model) -> None:
    searcher = opened.searcher
    assert not searcher.continuous  # on a CPU lines leave as they end, which is quicker
    assert Searcher(searcher.network, searcher.source_encoding, searcher.max_target_length, SearchGraphs()).continuous
