"""Continuous batching of lines: the outputs of plain batches, with every search option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_fixtures import colour_pairs

import transduce
from transduce.inference import generation
from transduce.inference.generation import Searcher
from transduce.inference.native_search import NativeSearch
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.native.library import library

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


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"strategy": "greedy"}, {"beam": 3, "nbest": 2}], ids=str)
def test_native_searches_answer_as_the_modules_do(
    opened: transduce.Model, options: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more lines than slots, so that lines enter beside others; `native = None` leaves them to the modules."""
    texts = [source for source, _ in colour_pairs(60, seed=4)]
    texts[7:7] = ["", "red"]
    options = {**options, "batch_tokens": 256, "workers": workers}
    searches: list[int] = []

    def counted(self: NativeSearch, sources: Any, lengths: Any, inner: Any = NativeSearch.search_all) -> Any:
        searches.append(len(sources))
        return inner(self, sources, lengths)

    monkeypatch.setattr(NativeSearch, "search_all", counted)
    found = opened.generate(texts, **options)
    assert sum(searches) == len(texts) - 1  # an empty line is not searched
    assert len(searches) >= workers
    monkeypatch.setattr(opened.searcher, "native", None)
    wanted = opened.generate(texts, **options)
    assert sum(searches) == len(texts) - 1
    for one, other in zip(found, wanted, strict=True):
        assert [rival.text for rival in one.nbest] == [rival.text for rival in other.nbest]
        assert one.token_scores == pytest.approx(other.token_scores, abs=2e-4)
        assert (one.source, one.complete) == (other.source, other.complete)


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    "options",
    [{"strategy": "sample"}, {"min_length": 3}, {"prefixes": ["RED"] * 9}, {"coverage_penalty": 0.2}],
    ids=lambda one: next(iter(one)),
)
def test_other_searches_are_not_native(
    opened: transduce.Model, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeSearch, "search_all", None)
    assert len(opened.generate(["red"] * 9, **options)) == 9


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_many_lines_of_a_wide_network_are_left_to_its_packed_matrices(
    opened: transduce.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    monkeypatch.setattr(generation, "NARROW", 1)
    monkeypatch.setattr(NativeSearch, "search_all", lambda self, sources, _: searches.append(len(sources)) or [[]])
    opened.searcher.search_all([[5]], None, opened.settings(beam=5), [0])
    assert searches == [1]
    assert len(opened.generate(["red"] * 9, beam=5)) == 9
    assert searches == [1]


def test_recorded_searches_of_texts_are_refilled(opened: transduce.Model) -> None:
    searcher = opened.searcher
    assert not searcher.continuous  # on a CPU lines leave as they end, which is quicker
    assert Searcher(searcher.network, searcher.source_encoding, searcher.max_target_length, SearchGraphs()).continuous
