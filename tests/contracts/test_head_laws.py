"""Padding-blind, batch-blind and learning, for every encoder under every head and way of pooling."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from contract_standins import SIZE, SMALL, example_batch
from torch.testing import assert_close

from transduce.build import build_model, complete_recipe
from transduce.encoders import ENCODERS
from transduce.flow import Batch, Padded
from transduce.heads import HEADS, Pooling
from transduce.recipe import parse

CASES = [
    (encoder, {"kind": head, **({"pooling": pooling} if head == "classifier" else {})})
    for encoder in ENCODERS
    for head in HEADS
    for pooling in (get_args(Pooling) if head == "classifier" else ("",))
]


@pytest.mark.parametrize(("encoder", "head"), CASES, ids=str)
def test_heads(encoder, head):
    recipe = complete_recipe(parse({"model": {"encoder": SMALL[encoder], "head": head}}))
    model = build_model(recipe.model, SIZE, 5).eval()
    batch = example_batch([(5, 1), (2, 1), (7, 1)])
    together = model(batch)
    longer = Batch(
        Padded(
            torch.cat((batch.source.values, torch.full((3, 2), 5)), 1),
            torch.cat((batch.source.mask, torch.zeros(3, 2, dtype=torch.bool)), 1),
        )
    )
    rows = together.size(1) if head["kind"] == "tagger" else None
    for row in range(3):
        real = int(batch.source.mask[row].sum()) if rows else None
        alone = model(batch.select(torch.tensor([row])))
        assert_close(alone[0][:real], together[row][:real], rtol=1e-4, atol=1e-5)
        assert_close(model(longer)[row][:real], together[row][:real], rtol=1e-4, atol=1e-5)
    model.train()(batch).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())
