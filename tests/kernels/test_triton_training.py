"""Triton kernels of training against torch's operations: on a GPU, or anywhere in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_fixtures import BATCH, gradients, model_of, takes_any_device, takes_any_precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from triton_support import DEVICE, DTYPES, INSTALLED, INTERPRETED, NOT_INSTALLED

from transduce.kernels import add_norm, linear
from transduce.kernels.add_norm import fused_norm, fused_post_norm, fused_pre_norm, triton_dropout_add
from transduce.kernels.attention import AttentionInput, triton_attention
from transduce.kernels.cross_entropy import IGNORED, cross_entropy, logits_grad, logits_grad_with_sums
from transduce.kernels.dispatch import captured_pass
from transduce.kernels.linear import (
    ACTIVATIONS,
    LinearOutput,
    column_sums,
    fused_linear,
    padded_projection,
    split,
)

if not INSTALLED:
    pytest.skip(NOT_INSTALLED, allow_module_level=True)
NARROW = torch.float16 if INTERPRETED else torch.bfloat16
KINDS = [torch.float32, NARROW]
# Where a row of scores ends, the kernel reads numbers that fp16 holds as minus infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")
ROOM = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def numbers(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, kind).requires_grad_()


def near(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], kind: torch.dtype = torch.float32) -> None:
    """The same, but for the rounding of this kind; where torch knows of no gradient, ours may be zero."""
    for one, other in zip(found, wanted, strict=True):
        other = torch.zeros_like(one) if other is None and one is not None else other
        assert one is not None
        assert_close(one.float(), other.float(), atol=ROOM[kind], rtol=ROOM[kind])  # type: ignore[union-attr]


def results_and_gradients(made: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [made, *torch.autograd.grad(made, inputs, grad.to(made))]


NORMS: dict[str, Any] = {
    "layer": nn.LayerNorm,
    "no bias": lambda width: nn.LayerNorm(width, bias=False),
    "rms": nn.RMSNorm,  # whose epsilon is that of its numbers
    "epsilon": lambda width: nn.RMSNorm(width, eps=0.1),
}


def norm_of(name: str, width: int) -> nn.Module:
    made: nn.Module = NORMS[name](width)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.to(DEVICE)


@pytest.mark.parametrize(("width", "kind"), [(48, KINDS[0]), (64, NARROW), (1100, KINDS[0])], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm_equals_that_of_torch(name: str, width: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values alone, and of their sum with changes, which a matrix made in its own precision."""
    monkeypatch.setattr(
        add_norm, "_multiprocessors", lambda device: 1
    )  # so few programs that some have two of the longest rows
    norm, values, changes = norm_of(name, width), numbers(2, 5, width), numbers(2, 5, width, kind=kind)
    grad, learned = torch.randn(2, 5, width, device=DEVICE), list(norm.parameters())
    inputs = [values, *learned]
    near(
        results_and_gradients(fused_norm(norm, values), inputs, grad), results_and_gradients(norm(values), inputs, grad)
    )
    found = results_and_gradients(fused_post_norm(norm, values, changes, 0.0)[1], [changes, *inputs], grad)
    near(found, results_and_gradients(norm(values + changes), [changes, *inputs], grad), kind)
    assert found[1].dtype == kind
    with torch.autocast(DEVICE, NARROW):
        assert fused_norm(norm, values).dtype == NARROW  # as the matrix after it reads it


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=["both", "first", "second"])
def test_add_norm_adds_the_gradients_of_two_readers(name: str, given: tuple[bool, bool]) -> None:
    norm, values, changes = norm_of(name, 40), numbers(30, 40), numbers(30, 40)
    inputs, grads = [values, changes, *norm.parameters()], torch.randn(2, 30, 40, device=DEVICE)
    total = values + changes
    for found, wanted in (
        (fused_pre_norm(norm, values, changes, 0.0), (total, norm(total))),
        (fused_post_norm(norm, values, changes, 0.0), (norm(total),) * 2),
    ):
        near(found, wanted)
        chosen = [number for number, so in enumerate(given) if so]
        ours, theirs = (
            torch.autograd.grad([made[x] for x in chosen], inputs, [grads[x] for x in chosen], True, allow_unused=True)
            for made in (found, wanted)
        )
        near(ours, theirs)


def chosen(drawn: Tensor, rate: float) -> Tensor:
    """What was kept, as numbers: about as much as asked for, in every row and column, none because of another."""
    kept = (drawn != 0).float()
    count = drawn.numel()
    assert kept.mean().item() == pytest.approx(1 - rate, abs=4 * (rate * (1 - rate) / count) ** 0.5)
    apart = (kept - kept.mean()).flatten()
    for lag in (1, 2, drawn.size(-1), drawn.size(-1) + 1):
        assert abs((apart[lag:] * apart[:-lag]).mean().item()) < 4 * rate * (1 - rate) / count**0.5
    for sums in (kept.mean(0), kept.mean(1)):
        assert ((sums > 0.3 * (1 - rate)) & (sums < 1)).all()
    return kept


@pytest.mark.parametrize("rate", [0.25, 0.6])
def test_dropout_add(rate: float) -> None:
    values, changes = numbers(48, 64), torch.ones(48, 64, device=DEVICE).requires_grad_()
    found = triton_dropout_add(values, changes, rate)
    kept = chosen((found - values).detach().round(decimals=2), rate)
    grad = torch.randn(48, 64, device=DEVICE)
    near(
        results_and_gradients(found, [values, changes], grad),
        [values + kept / (1 - rate), grad, grad * kept / (1 - rate)],
    )
    again = (triton_dropout_add(values, changes, rate) - values).round(decimals=2) != 0
    assert (again.float() != kept).any()


def test_dropout_add_without_dropout() -> None:
    values, changes = numbers(5, 13), numbers(5, 13, kind=NARROW)
    grad = torch.randn(5, 13, device=DEVICE)
    found = results_and_gradients(triton_dropout_add(values, changes, 0.0), [values, changes], grad)
    near(found[:2], [values + changes, grad])
    assert torch.equal(found[2], grad.to(NARROW))


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_add_norm_has_the_same_dropout_mask_in_both_passes(name: str) -> None:
    """The backward pass leaves out what the forward pass left out."""
    rate, norm, values = 0.3, norm_of(name, 64), numbers(48, 64)
    changes = torch.ones(48, 64, device=DEVICE).requires_grad_()
    inputs, grads = [values, changes, *norm.parameters()], torch.randn(2, 48, 64, device=DEVICE)
    total, level = fused_pre_norm(norm, values, changes, rate)
    kept = chosen((total - values).detach().round(decimals=2), rate)
    whole = values + changes * kept / (1 - rate)
    near([total, level], [whole, norm(whole)])
    wanted = torch.autograd.grad([whole, norm(whole)], inputs, [*grads])
    near(torch.autograd.grad([total, level], inputs, [*grads]), wanted)
    for made in (fused_post_norm(norm, values, changes, rate)[number] for number in (1, 0)):
        found = results_and_gradients(made, inputs, grads[0])
        kept = chosen(found[2], rate)
        near(found, results_and_gradients(norm(values + changes * kept / (1 - rate)), inputs, grads[0]))


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize(("count", "size"), [(5, 77), (130, 64), (200, 130)])
def test_column_sums(activation: str, count: int, size: int) -> None:
    values = torch.randn(count, size, device=DEVICE)
    gates = 2 * numbers(count, size).detach() if activation else None
    result, sums = column_sums(values, gates, activation)
    wanted = values
    if gates is not None:
        before = gates.requires_grad_()
        after = ACTIVATIONS[activation](before)
        wanted = torch.autograd.grad(after, before, values)[0]
    near([result, sums], [wanted, wanted.sum(0)])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_linear_equals_that_of_torch(activation: str, bias: bool, kind: torch.dtype) -> None:
    """As torch's in the same precision: a rectifier would not forgive a rounding."""
    layer, rows = nn.Linear(48, 72, bias).to(DEVICE), numbers(2, 35, 48, kind=kind)
    grad, inputs = torch.randn(2, 35, 72, device=DEVICE), [rows, *layer.parameters()]
    made = F.linear(rows, layer.weight.to(kind), layer.bias.to(kind) if bias else None)
    wanted = results_and_gradients(ACTIVATIONS[activation](made) if activation else made, inputs, grad)
    found = results_and_gradients(
        fused_linear(rows, [layer.weight], [layer.bias] if layer.bias is not None else [], activation), inputs, grad
    )
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    near(found, wanted, kind)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("width", [40, 1100])
@pytest.mark.parametrize("made_by", [fused_pre_norm, fused_post_norm])
def test_add_norm_returns_the_bias_gradient_of_its_input(
    made_by: Any, width: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is the sum of the gradient of what it was added to, and nobody goes over that once more."""
    monkeypatch.setattr(add_norm, "_multiprocessors", lambda device: 1)
    layer, norm, rows, values = (
        nn.Linear(24, width).to(DEVICE),
        norm_of("layer", width),
        numbers(2, 7, 24),
        numbers(2, 7, width),
    )
    changes = fused_linear(rows, [layer.weight], [layer.bias])
    assert isinstance(changes, LinearOutput)
    kept = linear.column_sums
    summed: list[int] = []
    monkeypatch.setattr(linear, "column_sums", lambda *given: summed.append(1) or kept(*given))
    grads = torch.randn(2, 2, 7, width, device=DEVICE)
    inputs = [changes.raw, layer.bias, layer.weight, rows]
    found = torch.autograd.grad(made_by(norm, values, changes, rate), inputs, [*grads])
    assert not summed
    near(found[1:], [found[0].sum((0, 1)), *torch.autograd.grad(layer(rows), [layer.weight, rows], found[0])])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_padded_output_projection(bias: bool, kind: torch.dtype) -> None:
    layer, values = nn.Linear(48, 77, bias).to(DEVICE), numbers(2, 5, 48, kind=kind)
    grad, inputs = torch.randn(2, 5, 77).to(DEVICE, kind), [values, *layer.parameters()]
    made = F.linear(values, layer.weight.to(kind), layer.bias.to(kind) if bias else None)
    wanted = results_and_gradients(made, inputs, grad)
    found = padded_projection(values, layer.weight, layer.bias)
    assert found.stride() == (5 * 128, 128, 1)
    near(results_and_gradients(found, inputs, grad), wanted, kind)
    logits = padded_projection(values, layer.weight, layer.bias)
    assert isinstance(logits, LinearOutput)
    padded = F.pad(grad, (0, 128 - 77))
    near(torch.autograd.grad(logits.raw, inputs, padded), wanted[1:], kind)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return triton_attention(AttentionInput(query, keys, values, mask, None, scale, causal, 0.0))


def heads_of(sources: int, steps: int, heads: int, width: int, kind: torch.dtype, parts: int = 1) -> list[Tensor]:
    """B H T K, as matrices leave them: the parts of a row side by side, and its heads."""
    rows = numbers(sources, steps, parts * heads * width, kind=kind)
    return [part.unflatten(-1, (heads, width)).transpose(1, 2) for part in rows.chunk(parts, -1)]


ATTENTIONS: dict[str, Any] = {  # sources, heads, steps, slots, width, causal, lengths
    "masked": (2, 2, 5, 7, 16, False, (3, 7)),
    "one mask for all": (3, 1, 4, 20, 16, False, (9,)),
    "causal": (3, 2, 17, 17, 32, True, None),
    "causal and masked": (2, 1, 9, 9, 16, True, (4, 9)),
    "more steps than slots": (2, 1, 33, 20, 16, False, (1, 20)),
    "one of each": (1, 2, 1, 1, 64, False, None),
    "as many as there may be": (1, 1, 128, 128, 16, False, None),
}


@pytest.mark.parametrize("given", ATTENTIONS.values(), ids=ATTENTIONS.keys())
@pytest.mark.parametrize(
    ("joint", "kind"), [(True, KINDS[0] if INTERPRETED else torch.float16), (True, NARROW), (False, NARROW)], ids=str
)
def test_attention_equals_that_of_torch(given: Any, joint: bool, kind: torch.dtype) -> None:
    sources, heads, steps, slots, width, causal, lengths = given
    if joint and steps == slots:
        parts = heads_of(sources, steps, heads, width, kind, parts=3)
    elif joint:
        parts = heads_of(sources, steps, heads, width, kind) + heads_of(sources, slots, heads, width, kind, parts=2)
    else:
        query = numbers(sources, heads, width, steps, kind=kind).transpose(2, 3)  # its numbers lie far apart
        parts = [query, *(numbers(sources, heads, slots, width, kind=kind) for _ in range(2))]
    mask = None if lengths is None else torch.arange(slots) < torch.tensor(lengths)[:, None]
    mask = None if mask is None else mask[:, None, None].to(DEVICE)
    grad = heads_of(sources, steps, heads, width, kind)[0].detach()
    made = attend(parts[0], parts[1], parts[2], mask, 0.3, causal)
    found = results_and_gradients(made, parts, grad)
    visible = torch.ones(steps, slots, dtype=torch.bool, device=DEVICE)
    visible = visible.tril() if causal else visible
    near(found, exact_attention(parts, visible if mask is None else visible & mask, grad), kind)


@pytest.mark.parametrize("kind", [KINDS[0] if INTERPRETED else torch.float16, NARROW], ids=str)
def test_attention_with_a_mask_for_every_step(kind: torch.dtype) -> None:
    """As in packed batches: each step sees its own keys, and some see none."""
    parts = heads_of(3, 19, 2, 16, kind) + heads_of(3, 35, 2, 16, kind, parts=2)
    mask = (torch.rand(3, 1, 19, 35) < 0.4).to(DEVICE)
    mask[..., 0] = True
    mask[1, :, 4] = False
    grad = heads_of(3, 19, 2, 16, kind)[0].detach()
    found = results_and_gradients(attend(parts[0], parts[1], parts[2], mask, 0.3, False), parts, grad)
    near(found, exact_attention(parts, mask, grad), kind)


def exact_attention(parts: Sequence[Tensor], visible: Tensor, grad: Tensor) -> list[Tensor]:
    """The context and its gradients in fp64, where a GPU has neither TF32 nor conditions on strides; scale 0.3.

    A query without any visible key has the context 0.
    """
    query, keys, values = wide = [part.detach().double().requires_grad_() for part in parts]
    scores = (query @ keys.mT * 0.3).masked_fill(~visible, -1e30)
    return results_and_gradients(torch.where(visible, scores.softmax(-1), 0.0) @ values, wide, grad)


@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("given", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_returns_the_bias_gradients_of_its_projections(
    given: Any, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of queries and values are the sums of the rounded gradients of the rows. A bias of the keys does not change
    the softmax: its gradient is exactly 0, and the gradients of the rows add up to 0 but for their rounding."""
    sources, heads, steps, slots, width, causal, lengths = given
    wide, alike = heads * width, steps == slots
    rows, memory = numbers(sources, steps, 24, kind=kind), numbers(sources, slots, 24, kind=kind)
    layers = [nn.Linear(24, wide).to(DEVICE) for _ in range(3)]
    together = [layers] if alike else [layers[:1], layers[1:]]
    mask = None if lengths is None else torch.arange(slots) < torch.tensor(lengths)[:, None]
    mask = None if mask is None else mask[:, None, None].to(DEVICE)
    takes_any_device(monkeypatch)
    kept, summed = linear.column_sums, Counter[int]()
    monkeypatch.setattr(linear, "column_sums", lambda *given: summed.update([1]) or kept(*given))
    with captured_pass():
        made = [
            fused_linear(x, [layer.weight for layer in some], [layer.bias for layer in some])
            for x, some in zip((rows, memory), together, strict=False)
        ]
        parts = [one for whole in made for one in split(whole, [wide] * (whole.size(-1) // wide))]
        query, keys, values = (one.unflatten(-1, (heads, width)).transpose(1, 2) for one in parts)
        context = attend(query, keys, values, mask, 0.3, causal)
        raw = [whole.raw for whole in made if isinstance(whole, LinearOutput)]
        found = torch.autograd.grad(context, [*raw, *(layer.bias for layer in layers)], torch.randn_like(context))
    assert not summed
    query_bias, keys_bias, values_bias = found[len(raw) :]
    query_sum, keys_sum, values_sum = torch.cat([one.float().sum((0, 1)) for one in found[: len(raw)]]).split(wide)
    near([query_bias, values_bias], [query_sum, values_sum])
    assert (keys_bias == 0).all()
    near([keys_sum], [keys_bias], kind)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_a_fully_masked_source_is_zero(causal: bool) -> None:
    """Its contexts and gradients are zero, and the other source does not notice."""
    parts = heads_of(2, 6, 2, 16, NARROW, parts=3)
    mask = torch.tensor([[True] * 6, [False] * 6])[:, None, None].to(DEVICE)
    found = results_and_gradients(
        attend(parts[0], parts[1], parts[2], mask, 0.3, causal), parts, torch.ones_like(parts[0])
    )
    for one in found:
        assert torch.isfinite(one).all()
        assert (one[1] == 0).all()
    assert (found[0][0] != 0).any()


def test_gradients_of_joint_projections_are_adjacent() -> None:
    for count in (3, 2):
        parts = heads_of(2, 6, 2, 16, NARROW, parts=count)
        inputs = parts if count == 3 else heads_of(2, 4, 2, 16, NARROW) + parts
        made = attend(inputs[0], inputs[1], inputs[2], None, 0.3, False)
        found = torch.autograd.grad(made, parts, torch.ones_like(made))
        places = [one.data_ptr() - found[0].data_ptr() for one in found]
        assert places == [number * 2 * 16 * 2 for number in range(count)]


def padded_rows(values: Tensor) -> Tensor:
    """The same numbers in rows that are followed by what must not be read."""
    return F.pad(values, (0, 51), value=torch.nan)[:, : values.size(1)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [77, 128, 40, 1], ids=["odd", "two blocks", "less than one", "one"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("apart", [True, False], ids=["padded", "whole"])
def test_cross_entropy(size: int, smoothing: float, apart: bool, kind: torch.dtype) -> None:
    from transduce.kernels.triton.training import cross_entropy_backward, cross_entropy_forward

    rows = 6
    given = (5 * numbers(rows, size, kind=kind)).detach()
    table = padded_rows(given) if apart else given
    gold = torch.tensor([0, size - 1, IGNORED, size // 2, IGNORED, min(size - 1, 64)], device=DEVICE)
    sums, plain, smooth = torch.empty(3, rows, device=DEVICE)
    tile = {"tile_rows": 4, "tile_columns": 16}
    cross_entropy_forward[(rows,)](table, gold, sums, plain, smooth, table.stride(0), size, **tile)
    result, factor = torch.full_like(given, torch.nan), torch.tensor(0.7, device=DEVICE)
    strides = table.stride(0), result.stride(0)
    cross_entropy_backward[(rows,)](table, gold, sums, factor, result, *strides, size, smoothing, block=64)
    wide, real = given.float().requires_grad_(), gold != IGNORED
    near([sums], [wide.logsumexp(1)])
    near([plain[real]], [F.cross_entropy(wide, gold, reduction="none")[real]])
    near([smooth[real]], [F.cross_entropy(wide, gold, reduction="none", label_smoothing=1.0)[real]])
    total = F.cross_entropy(wide, gold, reduction="sum", label_smoothing=smoothing)
    near([result], torch.autograd.grad(total, wide, factor), kind)
    assert (result[~real] == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(6, 48), (150, 80)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_returns_the_bias_gradient_of_the_output_layer(
    rows: int, size: int, smoothing: float, kind: torch.dtype
) -> None:
    given, factor = (5 * numbers(rows, size, kind=kind)).detach(), torch.tensor(0.7, device=DEVICE)
    gold = torch.randint(size, (rows,), device=DEVICE)
    gold[::3] = IGNORED
    wide = given.float().requires_grad_()
    result, sums = logits_grad_with_sums(given, gold, wide.logsumexp(1).detach(), factor, smoothing)
    total = F.cross_entropy(wide, gold, reduction="sum", label_smoothing=smoothing)
    wanted = torch.autograd.grad(total, wide, factor)[0]
    near([result, sums], [wanted, wanted.sum(0)], kind)
    near([sums], [wanted.sum(0)])  # before anything was rounded
    assert (result[gold == IGNORED] == 0).all()
    near([logits_grad(given, gold, wide.logsumexp(1).detach(), factor, smoothing, size)], [wanted], kind)


@pytest.mark.skipif(INTERPRETED, reason="there the kernels are not asked")
@pytest.mark.parametrize("size", [80, 4096])
def test_bias_gradient_of_the_output_layer_on_a_gpu(size: int) -> None:
    layer, rows = nn.Linear(48, size).to(DEVICE), numbers(7, 48, kind=NARROW)
    gold, inputs = torch.randint(size, (7,), device=DEVICE), list(layer.parameters())
    with captured_pass():
        found = fused_linear(rows, [layer.weight], [layer.bias])
        assert isinstance(found, LinearOutput)
        losses = cross_entropy(found, gold, 0.1)[0], F.cross_entropy(found.float(), gold, label_smoothing=0.1) * 7
        ours, theirs = (torch.autograd.grad(loss, [found.raw, *inputs], retain_graph=True) for loss in losses)
    near(ours, theirs, NARROW)


@pytest.mark.skipif(INTERPRETED, reason="there the kernels are not asked")
@pytest.mark.parametrize("size", [77, 4096, 9001])
def test_cross_entropy_on_a_gpu(size: int) -> None:
    table = padded_rows(numbers(5, size).detach()).requires_grad_()
    gold = torch.tensor([0, size - 1, IGNORED, 5, 6], device=DEVICE)
    wanted = F.cross_entropy(table, gold, reduction="sum", label_smoothing=0.1)
    found, nll = cross_entropy(table, gold, 0.1)
    near([found, nll], [wanted, F.cross_entropy(table, gold, reduction="sum")])
    near(torch.autograd.grad(found, table), torch.autograd.grad(wanted, table))


SHAPES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post", "activation": "gelu"},
    "rms": {"norm_kind": "rms", "activation": "gelu_tanh"},
    "gated": {"activation": "silu", "gated": True, "bias": False},
    "embedding norm": {"embedding_norm": True, "norm": "post"},
    "ssru": {"token_mixer": "ssru"},
    "average": {"token_mixer": "average", "norm": "post"},
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_captured_passes_of_whole_models(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss and gradients as the plain way; in bf16, which a GPU's kernels ask for, to its roundings."""
    model, batch = model_of(layers=1, **options).to(DEVICE), BATCH.to(DEVICE)
    plain = gradients(model, batch)
    if INTERPRETED:
        takes_any_device(monkeypatch)
        takes_any_precision(monkeypatch)
        with captured_pass():
            near(gradients(model, batch), plain)
        return
    with captured_pass(), torch.autocast(DEVICE, NARROW):
        found = gradients(model, batch)
    apart = torch.stack([(one - other).norm() for one, other in zip(found, plain, strict=True)])
    assert apart.norm() / torch.stack([part.norm() for part in plain]).norm() < 0.03
