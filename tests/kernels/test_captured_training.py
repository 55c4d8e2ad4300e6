"""The faster way of a recorded pass is wired as the plain one, and is taken: here with torch's sums for its kernels."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from kernel_fixtures import BATCH, gradients, model_of, replaces_kernels, takes_any_precision
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.data.packing import Packing
from transduce.kernels import attention, dispatch, linear
from transduce.kernels.cross_entropy import cross_entropy
from transduce.kernels.dispatch import captured_pass, current_pass
from transduce.kernels.linear import LinearOutput, column_sums, padded_projection, split
from transduce.kernels.weight_cast import cast_weights, weight_cast
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
def test_the_same_loss_and_gradients(options: dict[str, Any], launches: Counter[str]) -> None:
    model = model_of(**options)
    plain = gradients(model)
    assert not launches
    with captured_pass():
        found = gradients(model)
    assert launches
    for one, other in zip(found, plain, strict=True):
        assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", COMMON.values(), ids=COMMON.keys())
def test_the_same_within_bf16(options: dict[str, Any], launches: Counter[str]) -> None:
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
def test_no_common_transformer_falls_back(
    norm: str, dropout: float, options: dict[str, Any], biased: bool, launches: Counter[str]
) -> None:
    model = model_of(norm=norm, dropout=dropout, **options)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        gradients(model)
    assert launches == expected(norm, biased, dropout > 0)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_made_together_are_the_same_and_are_taken(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_packed_batch_falls_back_nowhere(launches: Counter[str]) -> None:
    packing, lines = Packing(2, 16, 16), np.array([0, 0, 1])
    source, said = ([part.values[row][part.mask[row]] for row in range(3)] for part in (BATCH.source, BATCH.labels))
    sides = ((torch.cat(side).numpy(), np.array(list(map(len, side)))) for side in (source, said))
    model = model_of(dropout=0.2)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16):
        gradients(model, packing.pack((next(sides), next(sides)), lines))
    assert launches == expected("pre", True, True)


@pytest.mark.usefixtures("launches")
def test_gradients_of_one_product_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_dropout_leaves_out_the_same_in_both_passes(norm: str) -> None:
    """The loss falls along its gradient as fast as the gradient says, where every pass draws alike."""
    model = model_of(norm=norm, dropout=0.3, activation="gelu")

    def found() -> list[Tensor]:
        torch.manual_seed(5)
        with captured_pass():
            return gradients(model)

    slopes = found()[1:]
    length, step, losses = float(torch.stack([slope.norm() for slope in slopes]).norm()), 1e-2, []
    for way in (-1, 2):
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter.add_(slope, alpha=way * step / length)
        losses.append(float(found()[0]))
    assert (losses[1] - losses[0]) / (2 * step) == pytest.approx(length, rel=1e-2)


def test_outside_a_recording_nothing_is_launched(launches: Counter[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        gradients(model_of())
    with captured_pass(), torch.no_grad():
        CrossEntropy()(model_of(), BATCH)
    assert not launches


@pytest.mark.usefixtures("any_precision")
def test_a_layer_with_an_adapter_is_called(launches: Counter[str]) -> None:
    model = model_of()
    called: list[str] = []
    norm = next(part for name, part in model.named_modules() if name.endswith("cross_attention_norm"))
    norm.register_forward_hook(lambda *_: called.append("norm"))
    with captured_pass():
        gradients(model)
    assert called == ["norm"]
    assert launches["dropout_add_forward"] == 1  # the sum before it, which it could not make


def parts_of(*sizes: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    rows = torch.randn(2, 5, sum(sizes), requires_grad=True)
    with captured_pass():
        return rows, tuple(split(rows, sizes))


@pytest.mark.usefixtures("launches")
def test_gradients_side_by_side_stay_where_they_are() -> None:
    rows, parts = parts_of(4, 4, 4)
    assert all(one.data_ptr() == rows.data_ptr() + 16 * place for place, one in enumerate(parts))
    slopes = torch.randn(2, 5, 12)
    (found,) = torch.autograd.grad(parts, rows, slopes.split(4, -1))
    assert found.data_ptr() == slopes.data_ptr()
    assert torch.equal(found, slopes)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 2), (6, 6)], ids=str)
def test_other_gradients_are_joined(sizes: tuple[int, ...]) -> None:
    whole = torch.randn(2, 5, 2 * sum(sizes))
    for slopes in (
        [torch.randn(2, 5, size) for size in sizes],  # each for itself
        list(reversed(whole[..., : sum(sizes)].contiguous().split(sizes[::-1], -1))),  # the last one first
        list(whole.split([*sizes, sum(sizes)], -1)[:-1]),  # of longer rows
        [torch.randn(1, 1, 1).expand(2, 5, size) for size in sizes],
        [torch.randn(5, 2, size).transpose(0, 1) for size in sizes],
    ):
        rows, parts = parts_of(*sizes)
        (found,) = torch.autograd.grad(parts, rows, slopes)
        assert torch.equal(found, torch.cat(slopes, -1))
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


@given(rows=some.integers(1, 200), size=some.integers(1, 140), most=some.integers(1, 8))
def test_sums_of_columns_by_several_programs(rows: int, size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = replaces_kernels(patch)
        patch.setattr(linear, "PROGRAMS", most)
        values = torch.randn(rows, size)
        same, sums = column_sums(values)
    assert same is values
    assert_close(sums, values.sum(0))
    assert launches["sum_columns"] == (1 if rows <= 64 or most // -(-size // 64) <= 1 else 2)


THERE: Any = SimpleNamespace(is_cuda=True)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)


def test_without_their_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with captured_pass():
        assert not dispatch.fused_training(THERE)


@pytest.mark.usefixtures("compiler")
def test_torchs_own_compiler_meets_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with captured_pass():
        assert not dispatch.fused_training(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_are_free_only_inside() -> None:
    assert not dispatch.fused_training(THERE)
    with captured_pass():
        assert dispatch.fused_training(THERE)
        assert not dispatch.fused_training(torch.ones(1))
        with torch.no_grad():
            assert not dispatch.fused_training(THERE)
    assert not dispatch.fused_training(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_cost_again_after_an_exception() -> None:
    with pytest.raises(KeyError), captured_pass():
        raise KeyError
    assert not dispatch.fused_training(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_are_free_in_their_own_thread() -> None:
    found: list[bool] = []
    with captured_pass():
        other = threading.Thread(target=lambda: found.append(dispatch.fused_training(THERE)))
        other.start()
        other.join()
    assert found == [False]
