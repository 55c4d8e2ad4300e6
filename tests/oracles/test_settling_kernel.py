"""One kernel after a choice leaves a search as the loop's own operations do: on a GPU, or by Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/oracles/test_beam_kernel_kernel.py
"""

from __future__ import annotations

import os
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_fused_steps import SHAPES, Written, build, sources

from transduce.contracts import Selection, Strategy
from transduce.decoding import beam_update as choosing
from transduce.decoding.search import search
from transduce.decoding.search_state import BeamState, FinishedHypotheses
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample, length_power
from transduce.flow import EOS, State
from transduce.inference.lowering.lower import lower_for_gpu, lower_for_operations
from transduce.kernels import beam_update as beam_kernel
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.decode_step import TritonOperations


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (Greedy(), 0.0),
        (Beam(width=3, length_penalty=0.6), 0.6),
        (Sample(width=2), 0.0),
        (HuggingFaceBeam(width=3), None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_only_ranks_by_length_are_the_kernels(strategy: Strategy, wanted: float | None) -> None:
    assert length_power(strategy) == wanted

    class Other(Beam):
        def rank(self, totals: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return totals

    assert length_power(Other(width=2)) is None


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
needs_kernels = pytest.mark.skipif(not HERE, reason="there is neither a GPU nor the interpreter")
DEVICE = "cpu" if INTERPRETED else "cuda"


def searching(sources: int, beams: int, room: int) -> BeamState:
    empty = torch.zeros(sources, beams)
    none = torch.zeros(sources, beams, room, dtype=torch.long)
    made = BeamState(
        state=State({}, {"x": torch.arange(sources * beams)}, beams),
        history=none,
        token_scores=none.float(),
        totals=empty,
        lengths=torch.zeros(sources, dtype=torch.long),
        max_lengths=torch.randint(2, room, (sources,)),
        prefix_lengths=torch.zeros(sources, dtype=torch.long),
        steps=torch.zeros(sources, dtype=torch.long),
        finished=FinishedHypotheses(none, none.float(), empty - torch.inf, empty.long(), empty.bool()),
        noise=None,
        max_columns=room,
    )
    return moved(made)


def moved(value: Any) -> Any:
    """The same on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, State):
        return State({}, {"x": value.past["x"].to(DEVICE)}, value.beams)
    if not is_dataclass(value):
        return value
    return replace(value, **{name: moved(one) for name, one in vars(value).items()})


@needs_kernels
@pytest.mark.parametrize(
    "strategy",
    [Greedy(), Beam(width=2, length_penalty=1.0), Beam(width=5, length_penalty=0.6), Beam(width=3, length_penalty=0.0)],
    ids=["greedy", "beam 2", "beam 5", "no penalty"],
)
@pytest.mark.parametrize("enough", [1, None])
def test_a_search_goes_on_the_same(strategy: Strategy, enough: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, beams, room = 4, strategy.width, 70
    monkeypatch.setattr(beam_kernel, "supports", lambda *_: False)
    live, asked, ends = searching(sources, beams, room), enough or strategy.width, 0
    for _ in range(9):
        totals = (live.totals - torch.rand(sources, beams, device=DEVICE)).sort(1, descending=True).values
        tokens = torch.randint(EOS, EOS + 4, (sources, beams), device=DEVICE)
        parents = torch.randint(0, beams, (sources, beams), device=DEVICE)
        choice, chosen = Selection(parents, tokens, totals), torch.randn(sources, beams, device=DEVICE)
        wanted = choosing.update(strategy, live, choice, chosen, asked)
        found = beam_kernel.beam_update(live, choice, chosen, length_power(strategy), asked)
        for name in ("history", "token_scores", "totals", "lengths", "steps"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=name)
        paths = FinishedHypotheses(*found.finished)
        for name in ("ranks", "complete"):
            torch.testing.assert_close(getattr(paths, name), getattr(wanted.finished, name), msg=name)
        there = paths.ranks > -torch.inf
        for name in ("ids", "token_scores", "lengths"):
            torch.testing.assert_close(getattr(paths, name)[there], getattr(wanted.finished, name)[there], msg=name)
        offsets = torch.arange(sources, device=DEVICE)[:, None] * beams
        assert torch.equal(found.rows, (parents + offsets).flatten())
        live, ends = wanted, ends + int(there.sum())
    assert ends > 0


@needs_kernels
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=3)], ids=["greedy", "beam"])
def test_a_whole_search_by_kernels_finds_the_same(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = build(SHAPES["after"]).to(DEVICE, torch.float32 if INTERPRETED else torch.float16)
    made = lower_for_gpu(made, "fp32")
    lower_for_operations(made, TritonOperations())
    batch, longest = sources().to(DEVICE), torch.tensor([5, 6, 7])
    found = []
    if INTERPRETED:
        monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", Written)
    for on in (True, False):
        monkeypatch.setattr(beam_kernel, "supports", lambda *_, on=on: on)
        found.append(search(made, batch, strategy, max_lengths=longest, graphs=SearchGraphs()))
    assert [[one.ids for one in row] for row in found[0]] == [[one.ids for one in row] for row in found[1]]
    for ours, theirs in zip(*found, strict=True):
        assert [one.rank for one in ours] == pytest.approx([one.rank for one in theirs], abs=1e-4)
