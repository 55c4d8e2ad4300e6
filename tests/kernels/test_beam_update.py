"""Beam update: which strategies its kernel serves, and whole searches with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_fixtures import CPUSearchGraph
from lowering_fixtures import SHAPES, build, sources
from triton_support import DEVICE, INTERPRETED, allow_any_device, needs_triton

from transduce.contracts import Strategy
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample, length_power
from transduce.inference.lowering import GPU_BACKENDS, lower_decoders, lower_for_gpu
from transduce.kernels.beam_update import BEAM_UPDATE
from transduce.kernels.cuda_graph import SearchGraphs


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
def test_the_kernel_serves_strategies_that_rank_by_a_power_of_the_length(
    strategy: Strategy, wanted: float | None
) -> None:
    assert length_power(strategy) == wanted

    class Other(Beam):
        def rank(self, totals: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return totals

    assert length_power(Other(width=2)) is None


@needs_triton
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=3)], ids=["greedy", "beam"])
def test_a_search_by_kernels_equals_a_search_by_modules(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operations of the step and the beam update in Triton, captured; against the same network in torch."""
    plain: Any = build(SHAPES["post-norm"]).to(DEVICE, torch.float32 if INTERPRETED else torch.float16)
    plain = lower_for_gpu(plain, "fp32")
    batch, max_lengths = sources().to(torch.device(DEVICE)), torch.tensor([2, 3, 3] if INTERPRETED else [5, 6, 7])
    wanted = search(plain, batch, strategy, max_lengths=max_lengths)
    quick: Any = lower_for_gpu(plain, "fp32")
    lower_decoders(quick, GPU_BACKENDS.values())
    allow_any_device(monkeypatch)
    if INTERPRETED:
        monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    updates: list[int] = []
    triton = BEAM_UPDATE.backends[0]
    counting = replace(triton, run=lambda *given: updates.append(1) or triton.run(*given))
    monkeypatch.setattr("transduce.decoding.search.BEAM_UPDATE", replace(BEAM_UPDATE, backends=(counting,)))
    found = search(quick, batch, strategy, max_lengths=max_lengths, graphs=SearchGraphs())
    assert updates
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    tolerance = 1e-4 if INTERPRETED else 2e-2
    for ours, theirs in zip(found, wanted, strict=True):
        assert [one.rank for one in ours] == pytest.approx([one.rank for one in theirs], abs=tolerance)
