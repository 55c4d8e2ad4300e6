"""Captured training passes with stand-ins for the Triton kernels: results, and which kernels are launched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from kernel_fixtures import BATCH, gradients, model_of, replaces_kernels, takes_any_precision
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.data.batching import Packing
from transduce.kernels import attention, linear
from transduce.kernels.dispatch import captured_pass, current_pass
from transduce.kernels.linear import cast_weights, weight_cast
from transduce.objectives import CrossEntropy


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Stand-ins for all kernels, on a CPU; how often each was launched."""
    return replaces_kernels(monkeypatch)


@pytest.fixture
def any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_any_precision(monkeypatch)


COMMON: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post"},
    "gated": {"activation": "silu", "gated": True, "bias": False},
    "gated post": {"activation": "gelu_tanh", "gated": True, "norm": "post"},
    "gelu": {"activation": "gelu"},
    "no bias": {"bias": False},
    "rms": {"norm_kind": "rms"},
    "rms post": {"norm_kind": "rms", "norm": "post"},
    "embedding norm": {"embedding_norm": True, "norm": "post"},
    "shared keys": {"kv_heads": 1},
    "rotary": {"position": "rotary"},
}


OTHERS: dict[str, dict[str, Any]] = {
    "ssru": {"token_mixer": "ssru"},
    "average": {"token_mixer": "average", "norm": "post"},
    "batch": {"norm_kind": "batch"},  # no norm of the kernels: the sum is made alone
    "batch post": {"norm_kind": "batch", "norm": "post"},
    "attention dropout": {"attention_dropout": 1e-9},
}


SHAPES = COMMON | OTHERS


@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_loss_and_gradients_equal_those_of_an_eager_pass(options: dict[str, Any], launches: Counter[str]) -> None:
    model = model_of(**options)
    plain = gradients(model)
    assert not launches
    with captured_pass():
        found = gradients(model)
    assert launches
    for one, other in zip(found, plain, strict=True):
        assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", COMMON.values(), ids=COMMON.keys())
def test_bf16_gradients_are_as_exact_as_those_of_an_eager_pass(options: dict[str, Any], launches: Counter[str]) -> None:
    """As near to the exact gradient as the plain way (0.005 to 0.03), though sums after a norm go on in bf16."""
    model = model_of(**options)
    exact = gradients(model)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    apart = torch.stack([(one - other).norm() for one, other in zip(found, exact, strict=True)])
    assert apart.norm() / torch.stack([part.norm() for part in exact]).norm() < 0.03
    assert launches["attention_backward"]
    assert launches["add_norm_backward"]


def expected(norm: str, biased: bool, drops: bool) -> dict[str, int]:
    """Of 2 + 2 layers: 4 + 6 residuals, 2 + 4 attentions; each norm, and each matrix with a bias, sums up columns.

    The bias of a product that goes into a residual is summed up with the norm.
    """
    norms = 12 if norm == "pre" else 10  # and one at the end of each stack
    matrices = 2 + 2 + 1  # only rectifiers and scores: the biases of attention are summed up in it, source by source
    matrices += 6 if biased else 0
    others = {"attention_forward": 6, "attention_backward": 6, "with dropout": 2 * 10 if drops else 0}
    return {"add_norm_forward": norms, "add_norm_backward": norms, "sum_columns": norms + matrices, **others}


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("options", "biased"),
    [({}, True), ({"activation": "gelu"}, True), ({"bias": False}, False), ({"norm_kind": "rms"}, True)],
    ids=["relu", "gelu", "no bias", "rms"],
)
def test_common_transformers_launch_only_fused_kernels(
    norm: str, dropout: float, options: dict[str, Any], biased: bool, launches: Counter[str]
) -> None:
    model = model_of(norm=norm, dropout=dropout, **options)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        gradients(model)
    assert launches == expected(norm, biased, dropout > 0)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_cast_together_are_used_and_change_nothing(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = model_of(bias=bias), []
    layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features % 8 == 0]
    joined: list[int] = []

    def taken(weights: Any, kind: torch.dtype) -> Tensor:
        made = weight_cast(weights, kind)
        joined.append(len(weights) if made.untyped_storage().nbytes() > made.nbytes else 0)
        return made

    monkeypatch.setattr(linear, "weight_cast", taken)
    for some_layers in ([], layers):
        joined.clear()
        with captured_pass(), torch.autocast("cpu", torch.bfloat16), cast_weights(some_layers):
            found.append(gradients(model))
    assert_close(found[0], found[1], atol=0, rtol=0)
    # 2 + 2 layers: queries, keys and values; keys and values of the memory; outputs, queries and thoughts.
    once = {3: 4, 2: 2, 1: 4 + 2 + 2 + 8}
    assert Counter(joined) == {number: times * (2 if bias else 1) for number, times in once.items()}
    assert not current_pass().cast_weights


def test_a_packed_batch_launches_only_fused_kernels(launches: Counter[str]) -> None:
    packing, lines = Packing(2, 16, 16), np.array([0, 0, 1])
    source, outputs = ([part.values[row][part.mask[row]] for row in range(3)] for part in (BATCH.source, BATCH.labels))
    sides = ((torch.cat(side).numpy(), np.array(list(map(len, side)))) for side in (source, outputs))
    model = model_of(dropout=0.2)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        gradients(model, packing.pack((next(sides), next(sides)), lines))
    assert launches == expected("pre", True, True)


@pytest.mark.usefixtures("launches")
def test_gradients_of_joint_projections_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 attentions, and what made their queries, keys and values: all of those, or keys and values alone."""
    found: list[int] = []

    def counting(parts: Any) -> bool:
        found.extend([len(parts)] if (so := adjacent(parts)) else [])
        return so

    adjacent = linear.adjacent
    monkeypatch.setattr(linear, "adjacent", counting)
    monkeypatch.setattr(attention, "adjacent", counting)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        gradients(model_of())
    assert Counter(found) == {3: 2 * 4, 2: 2 * 2}


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_has_the_same_mask_in_both_passes(norm: str) -> None:
    """The loss falls along its gradient as fast as the gradient says, where every pass draws alike."""
    model = model_of(norm=norm, dropout=0.3, activation="gelu")

    def found() -> list[Tensor]:
        torch.manual_seed(5)
        with captured_pass():
            return gradients(model)

    grads = found()[1:]
    length, step, losses = float(torch.stack([slope.norm() for slope in grads]).norm()), 1e-2, []
    for way in (-1, 2):
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), grads, strict=True):
                parameter.add_(slope, alpha=way * step / length)
        losses.append(float(found()[0]))
    assert (losses[1] - losses[0]) / (2 * step) == pytest.approx(length, rel=1e-2)


def test_eager_passes_and_evaluation_launch_no_kernel(launches: Counter[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        gradients(model_of())
    with captured_pass(), torch.no_grad():
        CrossEntropy()(model_of(), BATCH)
    assert not launches


@pytest.mark.usefixtures("any_precision")
def test_a_norm_with_a_hook_is_called(launches: Counter[str]) -> None:
    model = model_of()
    called: list[str] = []
    norm = next(part for name, part in model.named_modules() if name.endswith("cross_attention_norm"))
    norm.register_forward_hook(lambda *_: called.append("norm"))
    with captured_pass():
        gradients(model)
    assert called == ["norm"]
    assert launches["dropout_add_forward"] == 1  # the sum before it, which it could not make
