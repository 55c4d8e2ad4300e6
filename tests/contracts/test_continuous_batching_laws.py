"""Continuous batching: a source that enters a running search gets the outputs of a separate search, for every model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_fixtures import ORDER, SIZE, SMALL, CPUSearchGraph, example_batch, make
from hypothesis import given
from hypothesis import strategies as st

from transduce.decoding import continuous_batching as refilling
from transduce.decoding.continuous_batching import (
    OpenSearch,
    SearchRequest,
    SearchShape,
    continuous_search,
    plan_searches,
)
from transduce.decoding.logits_processors import ForcedEOS, MinLength, NoRepeatNgram
from transduce.decoding.search import MaskFilling, Stepper, search
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample
from transduce.flow import Batch, Padded, State, Step
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

LENGTHS = [7, 6, 6, 5, 3, 2, 2, 1, 1]
LONGEST = torch.tensor([7, 3, 9, 2, 7, 5, 1, 8, 4])
SEEDS = list(range(20, 29))
PREFIXES = [[4, 5], [6], [], [4, 5, 6], [7], [], [], [5], [8, 8]]


def whole() -> Batch:
    return example_batch([(length, 2) for length in LENGTHS])


def groups(size: int, prefixed: bool = False, longest: torch.Tensor = LONGEST) -> list[SearchRequest]:
    """The same sources, as many as have a maximum length, in groups, each as wide as its own longest."""
    made = []
    for first in range(0, len(longest), size):
        rows = torch.arange(first, min(first + size, len(longest)))
        prefix = Padded.from_rows([PREFIXES[row] for row in rows.tolist()]) if prefixed else None
        batch = replace(whole().select(rows), target=None)
        made.append(SearchRequest(batch, longest[rows], prefix, [SEEDS[row] for row in rows.tolist()]))
    return made


def alone(number: int, longest: torch.Tensor) -> SearchRequest:
    """One of the sources by itself."""
    rows = torch.tensor([number])
    return SearchRequest(replace(whole().select(rows), target=None), longest[rows], None, [SEEDS[number]])


def same(found: Any, wanted: Any) -> None:
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert [one.complete for one in row] == [one.complete for one in other]
        for one, two in zip(row, other, strict=True):
            assert one.token_scores == pytest.approx(two.token_scores, abs=2e-4)
            assert one.rank == pytest.approx(two.rank, abs=2e-4)


def test_a_search_that_is_refilled_finds_the_same(case, model, replayed):
    """Two at a time into four places: rows that stand at different tokens go on side by side.

    Every second model replays its steps; each kind of decoder is among both.
    """
    graphs, strategy = replayed if ORDER[case] % 2 else None, Beam(width=3)
    longest = torch.tensor([5, 3, 6, 2, 5, 4])
    found = continuous_search(model, groups(2, longest=longest), strategy, slots=4, graphs=graphs)
    same(found, search(model, whole().select(torch.arange(6)), strategy, max_lengths=longest))
    assert graphs is None or graphs.replayed


STRATEGIES = [Greedy(), Sample(width=2, temperature=0.8), HuggingFaceBeam(width=2, stop="full"), Beam(width=2)]
FEW = ["transformer>transformer", "recurrent>recurrent", "convolutional>convolutional", "alone>transformer"]


OPENED = [
    *FEW,
    "recurrent>recurrent,context=luong-False-sparsemax+copy",
    "conformer>hard_attention+ctc-{'weight': 0.4}",
]


@pytest.mark.parametrize("strategy", [Beam(width=3), Greedy(), Sample(width=2)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("case", OPENED)
def test_sources_enter_and_leave_an_open_search_between_steps(case, strategy, replayed):
    """One or two at a time, beside others at other tokens; one is cancelled. Each finds what it finds alone.

    Captured steps are launched before their results are asked for, once or twice, and half of the sources enter
    meanwhile.
    """
    model, graphs = make(case), None if OPENED.index(case) % 2 else replayed
    longest, found = torch.tensor([5, 3, 6, 2, 5, 4, 6, 6]), {}
    opened = OpenSearch(model, strategy, SearchShape(4, 8, 0, 6), graphs=graphs)
    assert opened.free == (4 if graphs is None else 1)
    waiting, cancelled, left = [0, 1, 7, 2, 3, 4, 5], 7, list[int]()

    def add(most: int) -> None:
        for number in waiting[:most]:
            if opened.free and opened.add([number], alone(number, longest)):
                waiting.remove(number)

    for step in range(40):
        add(1)
        if step % 2:
            assert opened.launch() == (graphs is not None and opened.active > 0)
            add(1)
            if step % 4 == 3 and opened.launches < 2:
                opened.launch()
            add(1)
            if cancelled not in waiting:
                opened.cancel([cancelled])
        left += opened.advance()
        if step % 3 == 0:
            found.update(opened.take_results())
    assert sorted(left) == sorted({**found, **opened.take_results()})
    assert not opened.active
    assert cancelled not in found
    wanted = search(model, whole().select(torch.arange(6)), strategy, max_lengths=longest[:6], seeds=SEEDS[:6])
    same([found[number] for number in range(6)], wanted)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("case", FEW)
def test_with_draws_rules_prefixes_and_few_answers(case, strategy, replayed):
    """Every model and every strategy replays its steps in half of the cases."""
    recorded = (FEW.index(case) + STRATEGIES.index(strategy)) % 2
    model, rules, graphs = make(case), (MinLength(length=4), NoRepeatNgram(size=2)), replayed if recorded else None
    options: dict[str, Any] = {"processors": rules, "nbest": 1}
    found = continuous_search(model, groups(3, True), strategy, slots=3, graphs=graphs, **options)
    prefix = Padded.from_rows(PREFIXES)
    same(found, search(model, whole(), strategy, max_lengths=LONGEST, seeds=SEEDS, prefix=prefix, **options))
    found = continuous_search(model, groups(2), strategy, slots=5, graphs=graphs, **options)
    same(found, search(model, whole(), strategy, max_lengths=LONGEST, seeds=SEEDS, **options))


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=2)], ids=["greedy", "beam"])
def test_recordings_are_used_again(strategy, replayed):
    """A second search over other sources of the same shapes reads and writes the buffers of the first."""
    model = make("transformer>transformer")
    for seed, places in enumerate((4, 6, 4, 6)):
        batch = replace(example_batch([(length, 2) for length in LENGTHS], seed), target=None)
        rows = torch.arange(len(LENGTHS)).split(2)
        requests = [SearchRequest(batch.select(some), LONGEST[some]) for some in rows]
        found = continuous_search(model, requests, strategy, slots=places, graphs=replayed)
        same(found, search(model, batch, strategy, max_lengths=LONGEST))
        assert len(replayed.captured) == (4 if seed else 2)  # the places, and the way into them


def test_an_interrupted_search_does_not_affect_the_next_one(replayed, monkeypatch):
    model, strategy, replay = make("transformer>transformer"), Beam(width=2), SearchGraphs.replay

    def interrupt(graphs: SearchGraphs, *arguments: Any) -> bool:
        if graphs.replayed > 2:
            raise KeyboardInterrupt
        return replay(graphs, *arguments)

    monkeypatch.setattr(SearchGraphs, "replay", interrupt)
    with pytest.raises(KeyboardInterrupt):
        continuous_search(model, groups(2), strategy, slots=4, graphs=replayed)
    monkeypatch.undo()
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    fresh, before = SearchGraphs(), replayed.replayed
    wanted = continuous_search(model, groups(2), strategy, slots=4, graphs=fresh)
    same(continuous_search(model, groups(2), strategy, slots=4, graphs=replayed), wanted)
    assert replayed.replayed - before == fresh.replayed  # no place was held by what the first had left


@pytest.mark.parametrize("refused", ["begin", "step"])
def test_a_search_that_cannot_be_captured_runs_uncaptured(refused, replayed, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CPUSearchGraph, "__init__" if refused == "begin" else "capture_steps", refuse)
    model, strategy = make("transformer>transformer"), Beam(width=2)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = continuous_search(model, groups(2), strategy, slots=4, graphs=replayed)
    same(found, search(model, whole(), strategy, max_lengths=LONGEST))


@pytest.mark.parametrize("head", ["classifier", "tagger", "mlm", "ctc"])
def test_encoder_only_models_are_searched(head):
    kinds: dict[str, dict[str, Any]] = {
        "classifier": {"tokens": {"target": {"kind": "labels"}}},
        "tagger": {"tokens": {"target": {"kind": "words"}}},
        "mlm": {"data": {"format": "text", "noise": {"kind": "mask_tokens"}}},
        "ctc": {"training": {"objective": {"kind": "ctc"}}},
    }
    torch.manual_seed(1)
    recipe = complete_recipe(parse({**kinds[head], "model": {"encoder": SMALL["transformer"], "head": {"kind": head}}}))
    made: Any = build_model(recipe.model, SIZE, SIZE, [number % 2 == 0 for number in range(SIZE)]).eval()
    for model, strategy in [(made, Greedy()), (made, Beam(width=3))] + [(MaskFilling(made), Greedy())] * (
        head == "mlm"
    ):
        found = continuous_search(model, groups(2), strategy, slots=4)
        same(found, search(model, whole(), strategy, max_lengths=LONGEST))


class Growing(torch.nn.Module):
    """A decoder's state that grows as tokens come, as that of a user's own may, which no other fits into."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    top_k, capturable = None, False

    def start(self, batch: Batch) -> State:
        return self.inner.start(batch)

    def reserve(self, state: State, more: int, beams: int) -> State:
        return state

    def advance(self, tokens: torch.Tensor, state: State, mask: Any = None, **options: Any) -> Step:
        return self.inner.advance(tokens, state, mask, **options)


def test_states_of_other_forms_are_searched_in_batches(monkeypatch):
    model, calls = Growing(make("transformer>transformer")), []
    monkeypatch.setattr(refilling, "search", lambda *one, **more: calls.append(one) or search(*one, **more))
    found = continuous_search(model, groups(2), Beam(width=2), slots=2)
    same(found, search(model, whole(), Beam(width=2), max_lengths=LONGEST))
    assert len(calls) == 4


def test_the_cache_grows_with_the_longest_source():
    model, strategy = make("transformer>transformer"), Beam(width=2)
    longest = torch.tensor([40, 80, 35, 70, 2, 40, 66, 3, 33])
    requests = [replace(one, max_lengths=longest[2 * number : 2 * number + 2]) for number, one in enumerate(groups(2))]
    rules = (MinLength(length=64),)
    found = continuous_search(model, requests, strategy, slots=4, processors=rules)
    same(found, search(model, whole(), strategy, max_lengths=longest, processors=rules))
    assert max(len(row[0].ids) for row in found) > 64


def test_room_does_not_grow_with_the_number_of_steps(monkeypatch):
    def enlarge(*_: Any) -> None:
        raise AssertionError("there was room")

    monkeypatch.setattr(Stepper, "grow_cache", enlarge)
    model, longest = make("transformer>transformer"), torch.full((9,), 34)
    rules = (
        MinLength(length=20),
        ForcedEOS(max_length=24),
    )  # nobody reaches the end of the first room, all together would
    requests = [replace(one, max_lengths=longest[:1]) for one in groups(1)]
    found = continuous_search(model, requests, Greedy(), slots=2, processors=rules)
    assert all(20 < len(row[0].ids) <= 24 for row in found)


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=200),
    budget=st.integers(1, 900),
    most=st.none() | st.integers(1, 30),
)
def test_a_plan_has_every_source_once_and_stays_in_its_budget(sizes, budget, most):
    searches = plan_searches(sizes, budget, most)
    rows = [row for one in searches for group in one.groups for row in group]
    assert sorted(rows) == list(range(len(sizes)))
    assert [sizes[row] for row in rows] == sorted(sizes, reverse=True)
    for one in searches:
        lengths = [sizes[row] for group in one.groups for row in group]
        assert one.slots * lengths[0] <= budget or one.slots == 1
        assert all(len(group) <= one.slots for group in one.groups)
        assert lengths[0] <= 32 or all(2 * length >= lengths[0] for length in lengths[one.slots :])
        assert one.slots <= (most or len(sizes))


@given(
    places=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
    beams=st.integers(1, 3),
    owned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_state_takes_others_in(places, beams, owned, seed):
    draw = torch.Generator().manual_seed(seed)

    def state(size: int) -> State:
        fixed = {"memory": (torch.rand(size, 2, 3, generator=draw), torch.rand(size, generator=draw))}
        return State(fixed, {"cells": torch.rand(size * beams, 2, generator=draw)}, beams)

    old, new = state(6), state(7)
    before = [one.clone() for one in (*old.fixed["memory"], old.past["cells"])]
    made = old.replace_sources(torch.tensor(places), new, owned=owned)
    pairs = zip(
        (*made.fixed["memory"], made.past["cells"]), before, (*new.fixed["memory"], new.past["cells"]), strict=True
    )
    for one, was, entered in pairs:
        each = one.unflatten(0, (6, -1))
        for place in range(6):
            source = entered.unflatten(0, (7, -1))[places.index(place)] if place in places else None
            assert torch.equal(each[place], was.unflatten(0, (6, -1))[place] if source is None else source)
    assert torch.equal(old.past["cells"], before[2]) is (not owned)
