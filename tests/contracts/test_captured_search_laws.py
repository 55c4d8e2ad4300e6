"""Captured searches, replayed on rounded shapes, equal uncaptured ones, for every model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_fixtures import example_batch, make, take_turns

from transduce.contracts import Strategy
from transduce.decoding.logits_processors import MinLength, NoRepeatNgram
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy, Sample
from transduce.flow import Padded
from transduce.kernels.beam_update import TOP_K
from transduce.kernels.cuda_graph import SearchGraphs

MIN = MinLength(length=2)
# The beam has processors that read the history, and prefixes; test_continuous_batching_laws.py has one without them.
OPTIONS: dict[Strategy, dict[str, Any]] = {
    Greedy(): {"processors": (MIN,)},
    Beam(width=3, length_penalty=1.0): {
        "processors": (MIN, NoRepeatNgram(size=2)),
        "prefix": Padded.from_rows([[4, 5], [6], [], [7], []]),
    },
    Sample(width=2, temperature=0.8): {"processors": (MIN,), "seeds": [3, 4, 5, 6, 7]},
}


def test_replayed_in_groups_is_the_same_search(case, model, replayed):
    strategy = take_turns(case, list(OPTIONS))
    batch = example_batch([(1, 2), (3, 2), (2, 2), (5, 2), (1, 2)])
    options: dict[str, Any] = {"max_lengths": torch.tensor([7, 3, 5, 7, 6]), **OPTIONS[strategy]}
    plain = search(model, batch, strategy, **options)
    found = search(model, batch, strategy, **options, graphs=replayed)
    assert replayed.replayed
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in plain]
    for one, other in zip(found, plain, strict=True):
        assert [a.token_scores for a in one] == [pytest.approx(b.token_scores, abs=2e-4) for b in other]


@pytest.mark.parametrize("size", [700, 1024, 5001])
def test_the_best_by_groups_are_the_best(size):
    scores = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size))
    scores[0, 0, :5] = -torch.inf
    values, places = TOP_K(scores, 5)
    expected = scores.topk(5)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_a_failed_capture_warns_and_the_search_runs_uncaptured(monkeypatch):
    """A step that waits for the device raises while it is being recorded."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", refuse)
    model, batch, graphs = make("transformer>transformer"), example_batch([(1, 2), (3, 2), (2, 2)]), SearchGraphs()
    options: dict[str, Any] = {"max_lengths": torch.tensor([7, 7, 7])}
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = search(model, batch, Beam(width=2), **options, graphs=graphs)
    again = search(model, batch, Beam(width=2), **options, graphs=graphs)  # it is not tried again
    plain = search(model, batch, Beam(width=2), **options)
    assert [row[0].ids for row in found] == [row[0].ids for row in again] == [row[0].ids for row in plain]
    assert graphs.replayed == 0
