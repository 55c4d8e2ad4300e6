"""Sums of columns that are left with a gradient: found where they hold, and never where they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from test_recorded_parts import replaces_kernels
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.kernels import add_norm as levelling
from transduce.kernels.dispatch import free_launches
from transduce.kernels.linear import asks_for_sums, leave_sums, left_sums, product

WIDTH = 16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return replaces_kernels(monkeypatch)


def rows_with_sums(*shape: int) -> Tensor:
    made = torch.randn(*shape)
    leave_sums(made, made.flatten(0, -2).sum(0))
    return made


@given(some.lists(some.integers(1, 4), min_size=2, max_size=4))
def test_they_stay_with_the_numbers_however_these_are_seen(shape: list[int]) -> None:
    made = rows_with_sums(*shape)
    wanted, flat = made.flatten(0, -2).sum(0), made.detach().view(-1, shape[-1])
    again = flat.unsqueeze(0).transpose(0, 1).squeeze(1)
    del made
    for seen in (flat, again):
        found = left_sums(seen)
        assert found is not None
        assert_close(found, wanted)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "added to": lambda made: made.add_(1.0),
    "added to through a view": lambda made: made.view(-1).add_(1.0).view_as(made),
    "part of the rows": lambda made: made[1:],
    "part of the columns": lambda made: made[:, 1:].contiguous(),
    "other rows": lambda made: made.view(-1, 8),
    "on their side": lambda made: made.t(),
    "the same elsewhere": torch.clone,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
@pytest.mark.parametrize("size", [4, 6])
def test_they_are_not_those_of_other_numbers(change: Callable[[Tensor], Tensor], size: int) -> None:
    assert left_sums(change(rows_with_sums(size, 4))) is None


def test_who_asks() -> None:
    rows, layer, plain = torch.randn(2, 3, 8), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH, bias=False)
    made = product(rows, [layer.weight], [layer.bias])
    assert asks_for_sums(made)
    assert asks_for_sums(made.view(6, WIDTH))
    others = (product(rows, [layer.weight], [layer.bias], "relu"), product(rows, [plain.weight]), layer(rows), rows)
    assert not any(asks_for_sums(one) for one in (*others, made + 0, made.detach()))


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("second", ["none", "earlier", "later", "both"])
def test_a_bias_whose_product_is_read_twice(place: str, rate: float, second: str, launches: Counter[str]) -> None:
    """Its gradient is the sum of the gradient of what it was added to; summed up once more only where it must be."""
    layer, norm, values, rows = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), torch.randn(3, 5, WIDTH), torch.randn(3, 5, 8)
    values.requires_grad_()
    with free_launches():
        made = product(rows, [layer.weight], [layer.bias])
        earlier = made.square().sum() if second in ("earlier", "both") else 0.0
        level = levelling.level_sum if place == "before" else levelling.level_twice
        one, two = level(norm, values, made, rate)
        later = made.sin().sum() if second in ("later", "both") else 0.0
        loss = (one.sin() * two).sum() + earlier + later
        seen: list[Tensor] = []
        made.register_hook(lambda slopes: seen.append(slopes.clone()))
        loss.backward()
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None
    assert_close(layer.bias.grad, seen[0].sum((0, 1)))
    assert_close(layer.weight.grad, torch.einsum("rto,rti->oi", seen[0], rows))
    assert launches["sum_columns"] == (1 if second == "none" else 2)


def test_a_hook_that_changes_the_gradient_in_place(launches: Counter[str]) -> None:
    layer, norm, values = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), torch.randn(3, 5, WIDTH)
    with free_launches():
        made = product(torch.randn(3, 5, 8), [layer.weight], [layer.bias])
        seen: list[Tensor] = []
        made.register_hook(lambda slopes: seen.append(slopes.mul_(2).clone()))
        levelling.level(norm, values, made).sin().sum().backward()
    assert layer.bias.grad is not None
    assert_close(layer.bias.grad, seen[0].sum((0, 1)))
    assert launches["sum_columns"] == 2
