"""Capturable models and objectives: no pass makes the host read a value of a tensor.

What asks cannot be recorded on a GPU. Here it is found on a CPU, by watching every operation of a pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_fixtures import SIZE, SMALL, example_batch, make
from torch.utils._python_dispatch import TorchDispatchMode

from transduce.attention import positions
from transduce.decoders import transformer
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.flow import Batch
from transduce.kernels import dispatch
from transduce.layers import feed_forward
from transduce.objectives import OBJECTIVES, CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

# A number for the host, a shape that depends on numbers, or numbers of the host in a new tensor (a copy that waits).
ASKS = (
    "_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2",
    "unique_consecutive", "bincount", "repeat_interleave.Tensor", "_pack_padded_sequence", "lift_fresh", "allclose",
)  # fmt: skip
CHOICES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class Steady(TorchDispatchMode):
    """Raises where an operation waits for the device."""

    def __enter__(self) -> Any:
        def refuse(*given: Any) -> None:
            raise AssertionError("a copy to the host waits for the device")

        self.patch = pytest.MonkeyPatch()
        for name in ("tolist", "cpu", "numpy"):  # on a CPU no operation is seen in them
            self.patch.setattr(torch.Tensor, name, refuse)
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        self.patch.undo()
        super().__exit__(*given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ASKS or f"{name}.{func._overloadname}" in ASKS:
            raise AssertionError(f"{func} waits for the device")
        if name in CHOICES:
            chosen = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in chosen):
                raise AssertionError(f"{func} by a mask waits for the device")
        return func(*args, **(kwargs or {}))


def one_pass(model: Any, objective: Any, batch: Batch) -> list[torch.Tensor]:
    loss = objective(model, batch)
    (loss.total * 0.5).backward()
    return [loss.total.detach(), *loss.parts.values()]


OBJECTIVES_KEPT = [name for name, kind in OBJECTIVES.items() if kind.capturable]


@pytest.fixture(autouse=True)
def as_recorded_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_asynchronously", lambda x: True)
    for module in (positions, feed_forward):
        monkeypatch.setattr(module, "host_may_read", lambda values: False)
    monkeypatch.setattr(transformer, "empty_cache", lambda shape, like: like.new_zeros(shape))


def test_capturable_pass_does_not_synchronise(case: str) -> None:
    model, batch = make(case).train(), example_batch([(3, 2), (1, 3), (4, 1)])
    objective = CrossEntropy()
    assert model.capturable
    with Steady():
        one_pass(model, objective, batch)


@pytest.mark.parametrize("head", ["classifier", "tagger"])
@pytest.mark.parametrize("encoder", sorted(ENCODERS))
def test_pass_of_an_encoder_only_model_does_not_synchronise(encoder: str, head: str) -> None:
    tokens = {"source": {"kind": "words"}, "target": {"kind": "labels" if head == "classifier" else "words"}}
    content = {"tokens": tokens, "model": {"encoder": SMALL[encoder], "head": {"kind": head}}}
    model = build_model(complete_recipe(parse(content)).model, SIZE, SIZE).train()
    batch = example_batch([(3, 1), (1, 1), (4, 1)])
    assert model.capturable
    with Steady():
        one_pass(model, CrossEntropy(), batch)
    with Steady(), torch.no_grad():
        model.advance(torch.ones_like(batch.source.values[:, :1]), model.start(Batch(batch.source)))


@torch.no_grad()
def test_start_of_a_search_does_not_synchronise(model: Any) -> None:
    batch = example_batch([(5, 4), (2, 6), (7, 1)])
    with Steady():
        state = model.reserve(model.start(Batch(batch.source)), 4, 2).repeat(2)
        model.advance(torch.ones_like(batch.source.values[:, :1]).repeat(2, 1), state)


def test_positions_beyond_the_last_are_not_truncated_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, nobody may look at places: what is too long makes the update bad, and then it is looked at."""
    model = make("alone>transformer,position=learned").train()
    model.decoder.position.max_positions = 11
    fits, long = example_batch([(3, 5), (2, 4)]), example_batch([(8, 5), (2, 4)])
    assert one_pass(model, CrossEntropy(), fits)[0].isfinite()
    assert one_pass(model, CrossEntropy(), long)[0].isnan()
    monkeypatch.undo()
    with pytest.raises(InputError, match="learned positions end at 11"):
        one_pass(model, CrossEntropy(), long)


@pytest.mark.parametrize("objective", OBJECTIVES_KEPT)
@pytest.mark.parametrize("alone", [False, True])
def test_capturable_objectives_do_not_synchronise(objective: str, alone: bool) -> None:
    """With a source in front and without one; the truncated one goes through several windows."""
    options = {"window": 2} if objective == "tbptt" else {}
    for decoder in ("recurrent", "transformer", "convolutional"):
        model = make(f"{'alone' if alone else 'recurrent'}>{decoder}").train()
        batch = example_batch([(5, 4), (2, 6), (7, 1)])
        for given in (batch, Batch(target=batch.target)) if alone else (batch,):
            with Steady():
                one_pass(model, OBJECTIVES[objective](**options), given)


def test_common_objectives_are_capturable() -> None:
    assert {"cross_entropy", "tbptt", "r_drop"} <= set(OBJECTIVES_KEPT)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.sum().tolist(),
        lambda x: x.index_add(0, torch.tensor([0, 1]), x[:2]),
        lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long), 0),
    ],
)
def test_synchronisation_is_detected(ask: Any) -> None:
    values = torch.randn(SIZE, 3)
    with Steady(), pytest.raises(AssertionError, match="waits"):
        ask(values)


def test_packed_recurrent_sequences_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_asynchronously", lambda x: False)
    model, batch = make("recurrent>recurrent").train(), example_batch([(5, 4), (2, 6)])
    with Steady(), pytest.raises(AssertionError, match="waits"):
        one_pass(model, CrossEntropy(), batch)
