"""The kernels of training on a CPU: the same numbers as torch's, and a dropout that follows from torch's generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from transduce.attention.attend import Attend
from transduce.attention.normalisers import Softmax
from transduce.attention.scores import MLP
from transduce.kernels.attention import AttentionInput, accepts_native, native_attention
from transduce.kernels.cross_entropy import IGNORED, cross_entropy
from transduce.kernels.dropout import dropout_add
from transduce.kernels.linear import output_projection
from transduce.kernels.native.library import library
from transduce.layers.dropout import Dropout

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")


@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([0.0, 0.1]), st.booleans(), st.integers(0, 99))
def test_cross_entropy_is_that_of_torch(rows: int, size: int, smoothing: float, narrow: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    kind = torch.bfloat16 if narrow else torch.float32
    scores = (torch.randn(rows, size, generator=draw) * 8).to(kind).requires_grad_()
    gold = torch.randint(0, size, (rows,), generator=draw)
    gold[torch.rand(rows, generator=draw) < 0.2] = IGNORED
    other = scores.detach().double().requires_grad_()
    smoothed, plain = cross_entropy(scores, gold, smoothing)
    (smoothed * 0.3).backward()
    expected = F.cross_entropy(other, gold, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORED)
    (expected * 0.3).backward()
    assert smoothed.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)
    assert plain.item() == pytest.approx(F.cross_entropy(other, gold, reduction="sum").item(), rel=1e-5, abs=1e-4)
    assert scores.grad is not None
    assert other.grad is not None
    assert torch.allclose(scores.grad.double(), other.grad, rtol=1e-2 if narrow else 1e-4, atol=1e-6)


def test_scores_that_are_no_numbers_are_told() -> None:
    for bad in (float("nan"), float("inf")):
        scores = torch.zeros(2, 40)
        scores[1, 7] = bad
        assert not torch.isfinite(cross_entropy(scores, torch.tensor([1, 2]), 0.1)[0])


@given(st.sampled_from([0.1, 0.5, 0.9]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_dropout_keeps_its_law(rate: float, narrow: bool, adds: bool, seed: int) -> None:
    """Kept numbers are x / (1 - p), as many as p says, and the gradient passes where they were kept."""
    torch.manual_seed(seed)
    kind = torch.bfloat16 if narrow else torch.float32
    changes = torch.full((100, 200), 2.0, dtype=kind, requires_grad=True)
    values = torch.full((100, 200), 5.0, requires_grad=True)
    layer = Dropout(rate).train()
    made = dropout_add(values, changes, rate) if adds else layer(changes)
    kept = made.detach().float() - (5 if adds else 0)
    share = (kept != 0).float().mean().item()
    assert share == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    assert torch.allclose(kept[kept != 0], torch.tensor(2 / (1 - rate)), rtol=1e-2 if narrow else 1e-5)
    made.float().sum().backward()
    assert changes.grad is not None
    assert torch.allclose(changes.grad.float() * 2, kept, rtol=1e-2, atol=1e-6)
    assert not adds or (values.grad is not None and bool((values.grad == 1).all()))


def test_dropout_follows_from_the_generator() -> None:
    layer, values = Dropout(0.3).train(), torch.ones(50, 50)
    torch.manual_seed(4)
    first, second = layer(values), layer(values)
    torch.manual_seed(4)
    assert torch.equal(layer(values), first)
    assert not torch.equal(first, second)
    neighbours = ((first == 0)[:, 1:] & (first == 0)[:, :-1]).float().mean().item()
    assert neighbours == pytest.approx(0.09, abs=0.03)


def test_evaluation_and_double_precision_go_the_plain_way() -> None:
    values = torch.ones(4, 4)
    assert torch.equal(Dropout(0.5).eval()(values), values)
    torch.manual_seed(1)
    made = Dropout(0.5).train()(values.double())
    torch.manual_seed(1)
    assert torch.equal(made, F.dropout(values.double(), 0.5))


def test_without_kernels_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE", "0")
    values = torch.ones(8, 8)
    torch.manual_seed(1)
    made = dropout_add(values, values, 0.5)
    torch.manual_seed(1)
    assert torch.equal(made, values + F.dropout(values, 0.5))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_additive_scores_are_those_of_torch(sources: int, steps: int, rows: int, width: int, narrow: bool) -> None:
    torch.manual_seed(width)
    kind = torch.bfloat16 if narrow else torch.float32
    score = MLP(width, width)
    query, memory = torch.randn(sources, steps, width), torch.randn(sources, rows, width)
    other = MLP(width, width).double()
    other.load_state_dict(score.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        found = score(query, score.keys(memory))
    expected = other(query.double(), other.keys(memory.double()))  # in double precision the plain way is gone
    assert found.dtype == kind
    close = 0.06 if narrow else 1e-5
    assert torch.allclose(found.double(), expected, rtol=close, atol=close)
    slopes = torch.randn(found.shape)
    (found.float() * slopes).sum().backward()
    (expected * slopes.double()).sum().backward()
    for one, two in zip(score.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert float((one.grad - two.grad).norm()) <= close * float(two.grad.norm()) + close


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.booleans(),
    st.sampled_from(["all", "some", "causal"]),
)  # fmt: skip
def test_short_attention_is_that_of_torch(
    rows: int, heads: int, steps: int, slots: int, width: int, narrow: bool, seen: str
) -> None:
    torch.manual_seed(slots)
    kind, slots = torch.bfloat16 if narrow else torch.float32, steps if seen == "causal" else slots
    joint = [torch.randn(rows, size, heads, width).to(kind) for size in (steps, slots, slots)]
    parts = [one.transpose(1, 2).detach().requires_grad_() for one in joint]  # as projections leave them
    mask = torch.rand(rows, 1, 1, slots) > 0.4 if seen == "some" else None
    if mask is not None:
        mask[..., -1] = True
    given_input = AttentionInput(*parts, mask, None, 0.3, seen == "causal", 0.0)
    assert accepts_native(given_input)
    found = native_attention(given_input)
    others = [part.detach().double().requires_grad_() for part in parts]
    expected = F.scaled_dot_product_attention(*others, mask, is_causal=seen == "causal", scale=0.3)
    slopes = torch.randn(found.shape)
    (found.float() * slopes).sum().backward()
    (expected * slopes.double()).sum().backward()
    close = 0.03 if narrow else 1e-5
    assert found.dtype == kind
    assert torch.allclose(found.double(), expected, rtol=close, atol=close)
    for part, other in zip(parts, others, strict=True):
        assert part.grad is not None
        assert other.grad is not None
        assert torch.allclose(part.grad.double(), other.grad, rtol=close, atol=close * (1 + other.grad.abs().max()))


def test_a_row_that_sees_nothing_has_no_context_and_nan_stays() -> None:
    query, keys, values = (torch.randn(2, 1, 3, 8).requires_grad_() for _ in range(3))
    mask = torch.tensor([[True, True, True], [False, False, False]])[:, None, None]
    found = native_attention(AttentionInput(query, keys, values, mask, None, 1.0, False, 0.0))
    found.sum().backward()
    assert bool((found[1] == 0).all())
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())
    bad = query.detach().clone()
    bad[0, 0, 1, 2] = torch.nan
    assert not native_attention(AttentionInput(bad, keys, values, mask, None, 1.0, False, 0.0)).isfinite().all()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans())
def test_additive_attention_in_one_go_is_that_in_steps(
    sources: int, steps: int, slots: int, width: int, narrow: bool, masked: bool
) -> None:
    torch.manual_seed(width)
    attend = Attend(MLP(width, width + 1), Softmax(), carries_past=True)
    query, memory = torch.randn(sources, steps, width), torch.randn(sources, slots, width + 1, requires_grad=True)
    mask = torch.rand(sources, 1, slots) > 0.4 if masked else torch.ones(1, 1, slots, dtype=torch.bool)
    mask[..., 0] = True
    found, slopes = [], torch.randn(sources, steps, width + 1)
    for with_attention in (False, True):  # told weights go the plain way
        query.grad = memory.grad = None
        attend.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            context, weights = attend(query, attend.keys(memory), memory, mask, with_attention=with_attention)
        assert (weights is not None) == with_attention
        (context.float() * slopes).sum().backward()
        grads = [one.grad for one in (memory, *attend.parameters()) if one.grad is not None]
        found.append([context.detach().float(), *grads])
    close = 0.1 if narrow else 1e-5
    assert len(found[0]) == len(found[1]) == 6
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= close * float(other.norm()) + close


def test_scores_of_a_product_are_written_over_and_only_once() -> None:
    torch.manual_seed(1)
    rows, layer, gold = torch.randn(6, 8), nn.Linear(8, 40), torch.tensor([1, 2, 3, IGNORED, 4, 39])
    cross_entropy(layer(rows), gold, 0.1)[0].backward()
    expected = [one.grad for one in layer.parameters()]
    layer.zero_grad()
    total = cross_entropy(scores := output_projection(layer, rows), gold, 0.1, reuse_logits=True)[0]
    before = scores.detach().clone()
    total.backward(retain_graph=True)
    assert not torch.equal(scores.detach(), before)
    for one, other in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(one.grad, other)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        total.backward()


def test_scores_that_others_need_are_not_written_over() -> None:
    rows, layer, gold = torch.randn(6, 8), nn.Linear(8, 40), torch.tensor([1, 2, 3, IGNORED, 4, 39])
    scores = output_projection(layer, rows).tanh()  # whose gradient is made from what it gave
    before = scores.detach().clone()
    cross_entropy(scores, gold, 0.1, reuse_logits=True)[0].backward()
    assert torch.equal(scores.detach(), before)
