"""Compaction of a search: finished sources leave the batch, the others keep their values."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.decoding.search import _compaction
from transduce.flow import State, map_tensors


@given(active=st.lists(st.booleans(), min_size=1, max_size=9), beams=st.integers(1, 3), seed=st.integers(0, 99))
def test_compaction_in_place_equals_selection(active: list[bool], beams: int, seed: int) -> None:
    draw, size = torch.Generator().manual_seed(seed), len(active)
    fixed = {"memory": (torch.rand(size, 2, 3, generator=draw), torch.rand(size, generator=draw))}
    past = {"cells": torch.rand(size * beams, 2, generator=draw)}
    state = State(fixed, past, beams)
    rows = _compaction(torch.tensor(active))
    assert sorted(rows.tolist()) == [row for row, is_active in enumerate(active) if is_active]
    copied = state.select_sources(rows)
    own = State({name: map_tensors(torch.clone, tree) for name, tree in fixed.items()}, past, beams)
    moved = own.select_sources(rows, owned=True)
    for one, other in zip(copied.fixed["memory"], moved.fixed["memory"], strict=True):
        assert torch.equal(one, other)
        assert other.is_contiguous()
    assert torch.equal(copied.past["cells"], moved.past["cells"])
    assert copied.past["cells"].tolist() == [
        past["cells"][row * beams + beam].tolist() for row in rows.tolist() for beam in range(beams)
    ]
