"""Packing: loss, gradient and scores of packed pairs equal those of one pair per row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract_fixtures import CASES, SIZE, make, shared, take_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture_laws import Steady
from torch.testing import assert_close

from transduce.data.batching import Packing, assign_bins, collate
from transduce.flow import Batch
from transduce.objectives import OBJECTIVES

TRANSFORMERS = [name for name in CASES if name.startswith("transformer") and ">transformer" in name]
NOT_PACKED = ("ssru", "average", "copy", "source_eos")
PACKED = [name for name in TRANSFORMERS if not any(part in name for part in NOT_PACKED)]
PACKING = Packing(4, 16, 16)
PACKING_OBJECTIVES = [name for name, kind in OBJECTIVES.items() if kind.supports_packing]
Pairs = list[tuple[list[int], list[int]]]


def both(pairs: Pairs) -> tuple[Batch, Batch, np.ndarray]:
    """The pairs padded and packed, and the order they have in the packed batch."""
    lengths = np.array([[len(source) + 1, len(target) + 2] for source, target in pairs])
    lines = assign_bins(lengths, PACKING.capacity)
    order = np.argsort(lines, kind="stable")
    sides = []
    for side in (0, 1):
        rows = [[*pairs[number][side], 2] for number in order]
        sides.append((np.concatenate(rows), np.array([len(row) for row in rows])))
    return collate(pairs, range(len(pairs))), PACKING.pack((sides[0], sides[1]), lines[order]), order


def pairs_of(*lengths: tuple[int, int]) -> Pairs:
    draw = np.random.default_rng(3)
    return [
        (draw.integers(4, SIZE, source).tolist(), draw.integers(4, SIZE, target).tolist()) for source, target in lengths
    ]


SOME = pairs_of((5, 4), (2, 6), (7, 1), (3, 3), (1, 9), (12, 2))


@pytest.mark.slow
def test_only_the_standard_transformer_supports_packing() -> None:
    assert "transformer>transformer" in PACKED
    assert [name for name in CASES if shared(name).supports_packing] == PACKED


def test_every_objective_that_packs_is_met() -> None:
    assert {take_turns(name, PACKING_OBJECTIVES) for name in PACKED} == set(PACKING_OBJECTIVES)


@pytest.mark.parametrize("name", PACKED)
def test_packed_loss_and_gradient_equal_unpacked(name: str) -> None:
    """The objective is no part of a model: models take turns."""
    model, (padded, packed, _), objective = make(name), both(SOME), take_turns(name, PACKING_OBJECTIVES)
    if "batch" not in name:
        model.train()
    for part in model.modules():
        if hasattr(part, "p"):
            part.p = 0.0
    found = []
    for batch in (padded, packed):
        model.zero_grad()
        loss = OBJECTIVES[objective]()(model, batch)
        loss.total.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((loss.total.detach(), loss.parts, gradients))
    assert OBJECTIVES[objective]().count(packed) == OBJECTIVES[objective]().count(padded)
    assert_close(found[0], found[1], atol=2e-5, rtol=2e-4)


@settings(max_examples=40)
@given(lengths=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=8))
def test_packed_logits_equal_unpacked(lengths: list[tuple[int, int]]) -> None:
    pairs = pairs_of(*lengths)
    if assign_bins(np.array(lengths) + np.array([1, 2]), PACKING.capacity).max() >= PACKING.rows:
        pairs = pairs[:3]
    model, (padded, packed, order) = make("transformer>transformer"), both(pairs)
    with torch.no_grad():
        alone, together = (model(batch).logits for batch in (padded, packed))
    wanted = torch.cat([alone[number, : len(pairs[number][1]) + 1] for number in order])
    assert_close(together[packed.labels.mask], wanted, atol=1e-5, rtol=1e-4)
    gold = torch.cat([padded.labels.values[number, : len(pairs[number][1]) + 1] for number in order])
    assert packed.labels.values[packed.labels.mask].tolist() == gold.tolist()


@pytest.mark.parametrize("name", PACKED[:3])
def test_packed_pass_does_not_synchronise(name: str) -> None:
    model, (_, packed, _) = make(name).train(), both(SOME)
    with Steady():
        OBJECTIVES["cross_entropy"]()(model, packed).total.backward()


def test_losses_of_parts_of_a_packed_batch_add_up() -> None:
    model, (_, packed, _) = make("transformer>transformer"), both(SOME)
    objective = OBJECTIVES["cross_entropy"]()
    halves = [packed.select(rows) for rows in torch.arange(packed.size).tensor_split(2)]
    total = sum(objective(model, half).total for half in halves)
    assert_close(total, objective(model, packed).total)
    assert sum(half.tokens for half in halves) == packed.tokens
