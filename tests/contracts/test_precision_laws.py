"""Every model of the shelves, made ready for generation, says what it said before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from transduce.flow import Batch
from transduce.precision import for_generation
from transduce.precision.joint import JointSelf
from transduce.precision.matrices import Packed

APART = {"fp32": 1e-5, "int8": 0.1}  # share of the size of all logits
CHOICES = ("hard", "gumbel", "drawn", "monotonic")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_logits_stay(case: str, model: nn.Module, batch: Batch, precision: str) -> None:
    if precision == "int8" and any(name in case for name in CHOICES):
        pytest.skip("an attention that chooses one row may choose another after the least rounding")
    model = model.eval()
    made = for_generation(model, precision)
    with torch.inference_mode():
        before, after = model(batch).logits.float(), made(batch).logits.float()
    seen = before > -1e3  # what may never be said has no size
    assert (after - before)[seen].norm() <= APART[precision] * before[seen].norm()


def test_no_matrix_is_left_out(model: nn.Module) -> None:
    made = for_generation(model, "int8")
    kinds = (nn.Linear, nn.RNNBase, nn.Dropout)
    left = [part for part in made.modules() if isinstance(part, kinds) and getattr(part, "out_features", 2) > 1]
    assert not left
    assert any(isinstance(part, Packed) for part in made.modules())  # every model has an output layer


def test_projections_are_read_once(model: nn.Module, batch: Batch) -> None:
    """A joint projection that were asked three times would give the same numbers, three times as slowly."""
    made = for_generation(model.eval(), "int8")
    joint = [part for part in made.decoder.modules() if isinstance(part, JointSelf)]  # type: ignore[union-attr]
    calls = []
    with torch.inference_mode():
        state = made.start(batch)  # type: ignore[operator]
        for part in joint:
            part.all.register_forward_hook(lambda *_: calls.append(1))
        made.advance(batch.inputs.values[:, :1], state)  # type: ignore[operator]
    assert len(calls) == len(joint)


def test_the_model_given_stays_as_it_is(model: nn.Module, batch: Batch) -> None:
    model = model.eval()
    with torch.inference_mode():
        before = model(batch).logits
        for_generation(model, "int8")
        assert torch.equal(model(batch).logits, before)
