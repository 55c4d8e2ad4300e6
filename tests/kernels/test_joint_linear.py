"""Several linear layers over the same rows as one matrix product."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.flow import BOS, EOS, Batch, Padded
from transduce.kernels import linear
from transduce.kernels.dispatch import to_matmul_dtype
from transduce.kernels.linear import can_join, joint_linear
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

BATCH = Batch(
    Padded.from_rows([[5, 6, 7, 8, EOS], [9, EOS], [4, 4, 6, EOS]]),
    Padded.from_rows([[BOS, 7, 5, EOS], [BOS, 4, EOS], [BOS, 8, 8, 6, 5, EOS]]),
)


def always(layers: Any) -> bool:
    return all(type(layer) is nn.Linear for layer in layers)


def never(layers: Any) -> bool:
    return False


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    loss = CrossEntropy()(model, BATCH).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def model_of(**options: object) -> nn.Module:
    torch.manual_seed(2)
    part = {"kind": "transformer", "width": 16, "heads": 4, "ff_width": 24, "layers": 2, "dropout": 0.0, **options}
    return build_model(complete_recipe(parse({"model": {"encoder": part, "decoder": part}})).model, 12, 12)


@pytest.mark.parametrize(("bias", "kv_heads", "projections"), list(product((False, True), (2, 4), ("all", "none"))))
def test_joint_projections_have_the_same_gradients(
    bias: bool, kv_heads: int, projections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if projections == "none" and kv_heads == 2:
        pytest.skip("heads are not shared there")
    model = model_of(bias=bias, kv_heads=kv_heads, projections=projections).double()
    monkeypatch.setattr(linear, "can_join", never)
    plain = gradients(model)
    monkeypatch.setattr(linear, "can_join", always)
    for one, other in zip(gradients(model), plain, strict=True):
        assert_close(one, other, rtol=0, atol=1e-10)


def test_joint_projections_are_as_exact_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not farther from the exact gradient than separate products, but for a rounding."""
    model = model_of()
    exact = gradients(model)

    def distance() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model)
        apart = [(one - other).norm() for one, other in zip(found, exact, strict=True)]
        return float(torch.stack(apart).norm() / torch.stack([part.norm() for part in exact]).norm())

    monkeypatch.setattr(linear, "can_join", never)
    separate = distance()
    monkeypatch.setattr(linear, "can_join", always)
    assert distance() < 1.2 * separate
    assert separate < 0.02


def test_joint_linear_computes_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_join", always)
    layers = [nn.Linear(4, 3), nn.Linear(4, 5)]
    for layer in layers:
        monkeypatch.setattr(layer, "forward", None)  # nobody calls them
    rows = torch.randn(2, 4)
    found = joint_linear(layers, rows)
    assert [one.shape for one in found] == [(2, 3), (2, 5)]
    assert_close(found[1], rows @ layers[1].weight.T + layers[1].bias)


def test_outside_training_and_with_hooks_layers_are_called() -> None:
    layer = nn.Linear(2, 2)
    assert can_join([layer])
    with torch.no_grad():
        assert not can_join([layer])
    layer.register_forward_hook(lambda one, given, result: result + 1)
    rows = torch.zeros(1, 2)
    assert not can_join([layer])
    assert_close(joint_linear([layer], rows)[0], layer(rows))


def test_matmul_dtype_is_that_of_autocast() -> None:
    values = torch.randn(3)
    assert to_matmul_dtype(values) is values
    with torch.autocast("cpu", torch.bfloat16):
        assert to_matmul_dtype(values).dtype == torch.bfloat16
        assert to_matmul_dtype(values.double()).dtype == torch.double
        assert to_matmul_dtype(to_matmul_dtype(values)).dtype == torch.bfloat16
