"""LinearOutput: bias gradients computed by the operation that reads the output of a linear layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_fixtures import replaces_kernels
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.kernels.add_norm import fused_post_norm, fused_pre_norm
from transduce.kernels.attention import AttentionInput, triton_attention
from transduce.kernels.dispatch import captured_pass
from transduce.kernels.linear import LinearOutput, fused_linear, linear_reference, output_projection, split

WIDTH = 16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return replaces_kernels(monkeypatch)


def linear_output(x: Tensor, layer: nn.Linear) -> LinearOutput:
    made = fused_linear(x, [layer.weight], [layer.bias])
    assert isinstance(made, LinearOutput)
    return made


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_views_keep_the_type_and_read_the_same_numbers(shape: list[int]) -> None:
    layer = nn.Linear(3, 4)
    made = linear_output(torch.randn(*shape, 3), layer)
    flat = made.view(-1, 4)
    for seen in (flat, made.flatten(0, 1), flat.unflatten(0, (1, -1)), flat.transpose(0, 1)):
        assert isinstance(seen, LinearOutput)
        assert torch.equal(seen.raw, seen.as_subclass(Tensor))
        assert seen.raw.data_ptr() == made.data_ptr()
        assert seen.biases == (layer.bias,)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda made: made + 0,
    "part of the rows": lambda made: made[1:],
    "part of the columns": lambda made: made[:, 1:].contiguous(),
    "detached": lambda made: made.detach(),
    "copy": torch.clone,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_other_results_are_plain_tensors(change: Callable[[Tensor], Tensor]) -> None:
    assert type(change(linear_output(torch.randn(4, 3), nn.Linear(3, 4)))) is Tensor


def test_which_layers_leave_their_bias_gradient_to_the_reader() -> None:
    rows, layer, bare = torch.randn(2, 3, 8), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH, bias=False)
    assert isinstance(fused_linear(rows, [layer.weight], [layer.bias]), LinearOutput)
    frozen = nn.Linear(8, WIDTH).requires_grad_(False)
    plain = (
        fused_linear(rows, [layer.weight], [layer.bias], "relu"),
        fused_linear(rows, [bare.weight]),
        fused_linear(rows, [frozen.weight], [frozen.bias]),
        layer(rows),
    )
    assert not any(isinstance(one, LinearOutput) for one in plain)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("parts", [1, 3])
def test_a_reader_that_knows_nothing_of_it_gets_all_gradients(parts: int) -> None:
    layers, x = [nn.Linear(8, WIDTH) for _ in range(parts)], torch.randn(2, 5, 8, requires_grad=True)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    inputs = [x, *weights, *biases]
    found = []
    for compute in (fused_linear, linear_reference):
        with captured_pass():
            made = split(compute(x, weights, biases), [WIDTH] * parts)
            found.append(torch.autograd.grad(sum(one.sin().sum() for one in made), inputs))
    assert_close(*found)


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("second", ["none", "earlier", "later", "both"])
def test_a_bias_whose_product_is_read_twice(place: str, rate: float, second: str, launches: Counter[str]) -> None:
    """Its gradient is the sum of those of all readers; only another reader costs a second pass."""
    layer, norm, values, rows = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), torch.randn(3, 5, WIDTH), torch.randn(3, 5, 8)
    values.requires_grad_()
    with captured_pass():
        made = linear_output(rows, layer)
        earlier = made.square().sum() if second in ("earlier", "both") else 0.0
        add_norm = fused_pre_norm if place == "pre" else fused_post_norm
        one, two = add_norm(norm, values, made, rate)
        later = made.sin().sum() if second in ("later", "both") else 0.0
        loss = (one.sin() * two).sum() + earlier + later
        seen: list[Tensor] = []
        made.raw.register_hook(lambda grad: seen.append(grad.clone()))
        loss.backward()
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None
    assert_close(layer.bias.grad, seen[0].sum((0, 1)))
    assert_close(layer.weight.grad, torch.einsum("rto,rti->oi", seen[0], rows))
    assert launches["sum_columns"] == (1 if second == "none" else 2)


def test_a_hook_that_changes_the_gradient_in_place(launches: Counter[str]) -> None:
    layer, norm, values = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), torch.randn(3, 5, WIDTH)
    with captured_pass():
        made = linear_output(torch.randn(3, 5, 8), layer).as_subclass(Tensor)
        seen: list[Tensor] = []
        made.register_hook(lambda grad: seen.append(grad.mul_(2).clone()))
        fused_post_norm(norm, values, made, 0.0)[1].sin().sum().backward()
    assert layer.bias.grad is not None
    assert_close(layer.bias.grad, seen[0].sum((0, 1)))
    assert launches["sum_columns"] == 2


@pytest.mark.parametrize("turned", ["none", "queries and keys", "all"])
def test_joint_projections_are_read_raw_as_a_whole_or_not_at_all(turned: str, launches: Counter[str]) -> None:
    """As with rotary positions: one pass sums all biases, either in attention or behind the projection."""
    heads, width, layers = 2, 16, [nn.Linear(8, 32) for _ in range(3)]
    x = torch.randn(3, 5, 8, requires_grad=True)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    found = []
    for compute in (fused_linear, linear_reference):
        with captured_pass():
            parts = [
                part.unflatten(-1, (heads, width)).transpose(1, 2)
                for part in split(compute(x, weights, biases), [heads * width] * 3)
            ]
            count = {"none": 0, "queries and keys": 2, "all": 3}[turned]
            query, keys, values = (part * 2 if number < count else part for number, part in enumerate(parts))
            context = triton_attention(AttentionInput(query, keys, values, None, None, 0.3, True, 0.0))
        before = launches["sum_columns"]
        found.append(torch.autograd.grad(context.sin().sum(), [x, *weights, *biases]))
        if compute is fused_linear:
            assert launches["sum_columns"] - before == 1
    assert_close(*found, rtol=1e-4, atol=1e-5)


def test_logits_are_marked_only_in_training() -> None:
    layer, x = nn.Linear(8, 40), torch.randn(3, 8)
    with torch.no_grad():
        assert type(output_projection(layer, x)) is Tensor
    hooked = nn.Linear(8, 40)
    hooked.register_forward_hook(lambda *_: None)
    assert type(output_projection(hooked, x)) is Tensor
