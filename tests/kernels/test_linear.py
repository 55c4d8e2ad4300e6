"""Linear layers in training: LinearOutput, split, padded output projection, column sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_fixtures import replaces_kernels
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.kernels import linear
from transduce.kernels.add_norm import fused_post_norm, fused_pre_norm
from transduce.kernels.attention import AttentionInput, triton_attention
from transduce.kernels.cross_entropy import cross_entropy
from transduce.kernels.dispatch import captured_pass
from transduce.kernels.linear import (
    LinearOutput,
    column_sums,
    fused_linear,
    linear_reference,
    output_projection,
    padded_projection,
    split,
)

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
def test_gradients_are_complete_for_plain_readers_of_the_output(parts: int) -> None:
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


def parts_of(*sizes: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    rows = torch.randn(2, 5, sum(sizes), requires_grad=True)
    with captured_pass():
        return rows, tuple(split(rows, sizes))


@pytest.mark.usefixtures("launches")
def test_adjacent_gradients_of_split_are_not_copied() -> None:
    rows, parts = parts_of(4, 4, 4)
    assert all(one.data_ptr() == rows.data_ptr() + 16 * place for place, one in enumerate(parts))
    grads = torch.randn(2, 5, 12)
    (found,) = torch.autograd.grad(parts, rows, grads.split(4, -1))
    assert found.data_ptr() == grads.data_ptr()
    assert torch.equal(found, grads)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 2), (6, 6)], ids=str)
def test_other_gradients_of_split_are_concatenated(sizes: tuple[int, ...]) -> None:
    whole = torch.randn(2, 5, 2 * sum(sizes))
    for grads in (
        [torch.randn(2, 5, size) for size in sizes],  # each for itself
        list(reversed(whole[..., : sum(sizes)].contiguous().split(sizes[::-1], -1))),  # the last one first
        list(whole.split([*sizes, sum(sizes)], -1)[:-1]),  # of longer rows
        [torch.randn(1, 1, 1).expand(2, 5, size) for size in sizes],
        [torch.randn(5, 2, size).transpose(0, 1) for size in sizes],
    ):
        rows, parts = parts_of(*sizes)
        (found,) = torch.autograd.grad(parts, rows, grads)
        assert torch.equal(found, torch.cat(grads, -1))
    rows, parts = parts_of(*sizes)
    (found,) = torch.autograd.grad(parts[1].sum(), rows)  # nobody read the others
    assert torch.equal(found, torch.cat([torch.full_like(one, float(one is parts[1])) for one in parts], -1))


class PaddedLoss(torch.autograd.Function):
    """As the Triton loss does, reads padded logits and returns a gradient for all columns."""

    gradients: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int) -> Tensor:
        ctx.shape, ctx.size = logits.shape, size
        return logits[:, :size].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        made = grads[0].new_zeros(ctx.shape)
        made[:, : ctx.size] = 1.0
        PaddedLoss.gradients.append(made.data_ptr())
        return made, None


def test_the_gradient_of_padded_logits_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through views of the batch dimensions, and has the padding columns already."""
    found: list[int] = []

    def watching(grad: Tensor, x: Tensor, kind: torch.dtype) -> Tensor:
        found.append(grad.data_ptr())
        return weight_grad(grad, x, kind)

    weight_grad = linear.weight_grad
    monkeypatch.setattr(linear, "weight_grad", watching)
    layer, values = nn.Linear(8, 41, bias=False), torch.randn(2, 3, 8, requires_grad=True)
    logits = padded_projection(values, layer.weight, None).flatten(0, 1)
    assert isinstance(logits, LinearOutput)
    assert (logits.shape, logits.raw.shape, logits.padding) == ((6, 41), (6, 64), 23)
    PaddedLoss.gradients.clear()
    PaddedLoss.apply(logits.raw, 41).backward()
    assert found == PaddedLoss.gradients
    assert_close(values.grad, layer.weight.sum(0).expand(2, 3, 8).detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("launches")
def test_padded_logits_are_plain_for_every_other_operation(bias: bool) -> None:
    layer, values = nn.Linear(8, 41, bias), torch.randn(2, 3, 8, requires_grad=True)
    inputs, grad = [values, *layer.parameters()], torch.randn(2, 3, 41)
    logits = padded_projection(values, layer.weight, layer.bias if bias else None)
    assert_close(logits, layer(values), check_stride=False)
    for made in (logits, logits.view(2, 3, 41), logits.transpose(0, 1).transpose(0, 1), logits * 1):
        assert_close(torch.autograd.grad(made, inputs, grad, True), torch.autograd.grad(layer(values), inputs, grad))
    flat, labels = logits.flatten(0, 1), torch.tensor([3, 40, -100, 0, 7, 1])
    ours, theirs = (cross_entropy(one, labels, 0.1)[0] for one in (flat, layer(values).flatten(0, 1)))
    assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs))


def test_padded_logits_joined_with_others() -> None:
    """Rows of the same length hold the gradients of both: the padding columns are not those of the others."""
    layer, values, others = nn.Linear(8, 41, bias=False), torch.randn(3, 8), torch.randn(3, 23, requires_grad=True)
    more = others.exp()  # computed before the logits, so its gradient is computed after theirs
    torch.cat((padded_projection(values, layer.weight, None), more), -1).backward(torch.ones(3, 64))
    assert_close(others.grad, others.detach().exp())
    assert_close(layer.weight.grad, values.sum(0).expand(41, 8))


@given(rows=st.integers(1, 200), size=st.integers(1, 140), most=st.integers(1, 8))
def test_column_sums_by_several_programs(rows: int, size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = replaces_kernels(patch)
        patch.setattr(linear, "PROGRAMS", most)
        values = torch.randn(rows, size)
        same, sums = column_sums(values)
    assert same is values
    assert_close(sums, values.sum(0))
    assert launches["sum_columns"] == (1 if rows <= 64 or most // -(-size // 64) <= 1 else 2)
