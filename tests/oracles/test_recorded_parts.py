"""The faster way of a recorded pass is wired as the plain one, and is taken: here with torch's sums for its kernels."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.build import build_model, complete_recipe
from transduce.data.packing import Packing
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.kernels import add_norm as levelling
from transduce.kernels import attention_tiles as tiles
from transduce.kernels import dispatch as traits
from transduce.kernels import linear as products
from transduce.kernels import output_projection as scoring
from transduce.kernels import split as parting
from transduce.kernels import weight_cast as narrowing
from transduce.kernels.dispatch import free_launches
from transduce.objectives import CrossEntropy
from transduce.recipe import parse

VOCABULARY = 41  # no multiple of 8: the scores are spaced
BATCH = Batch(
    Padded.from_rows([[5, 6, 7, 8, EOS], [9, EOS], [4, 4, 6, EOS]]),
    Padded.from_rows([[BOS, 7, 5, EOS], [BOS, 4, EOS], [BOS, 8, 8, 6, 5, EOS]]),
)


class Launch:
    """Called as a kernel is, `name[grid](tensors, numbers)`, and written with torch's operations."""

    def __init__(self, work: Callable[..., None], launches: Counter[str]) -> None:
        self.work, self.launches = work, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int = 4, **options: Any) -> None:
            self.launches[self.work.__name__] += 1
            self.launches["with dropout"] += options.get("drops", False)
            with torch.autocast("cpu", enabled=False):
                self.work(grid, *given, **options)

        return launch


def kept(shape: torch.Size, seed: Tensor, limit: int) -> Tensor:
    dice = torch.Generator().manual_seed(int(seed))
    return torch.randint(0, 2**32, shape, generator=dice) >= limit


def joined(values: Tensor, changes: Tensor | None, seed: Tensor, limit: int, factor: float, drops: bool) -> Tensor:
    if changes is None:
        return values.float()
    change = changes.float()
    return values.float() + (change * factor * kept(change.shape, seed, limit) if drops else change)


def add_rows(grid: Any, values: Any, changes: Any, seed: Any, result: Any, size: int, *rest: Any, block: int) -> None:
    assert grid[0] * block >= size == values.numel()
    result.copy_(joined(values, changes, seed, *rest))


def drop_rows(grid: Any, changes: Any, seed: Any, result: Any, size: int, limit: int, factor: float, **_: Any) -> None:
    result.copy_(changes.float() * factor * kept(changes.shape, seed, limit))


def level_rows(grid: Any, *given: Any, width: int, drops: bool, centred: bool, block: int, rows: int) -> None:
    values, changes, seed, weight, bias, totals, result, means, scales, count, limit, factor, epsilon = given
    assert grid[0] * rows >= count == values.numel() // width
    assert block >= width == values.size(-1)
    total = joined(values, changes, seed, limit, factor, drops)
    if totals is not None:
        totals.copy_(total)
    total = total.view(count, width)
    if centred:
        means.copy_(total.mean(1))
        total = total - means[:, None]
    scales.copy_((total.square().mean(1) + epsilon).rsqrt())
    made = total * scales[:, None] * weight.float()
    result.copy_((made if bias is None else made + bias.float()).view_as(result))


def level_slopes(
    grid: Any, *given: Any, width: int, drops: bool, centred: bool, sums_up: bool, asked: bool, block: int, rows: int
) -> None:
    slopes, beside, values, changes, seed, weight, means, scales, to_values, to_changes, sums = given[:11]
    count, limit, factor = given[11:]
    assert sums.shape == (grid[0], (3 if asked else 2) * width)
    assert grid[0] <= -(-count // rows)
    total = joined(values, changes, seed, limit, factor, drops).view(count, width)
    level = (total - means[:, None] if centred else total) * scales[:, None]
    slope = slopes.float().view(count, width)
    if beside is not None and not sums_up:
        slope = slope + beside.float().view(count, width)
    sums.zero_()
    sums[0, : 2 * width] = torch.cat(((slope * level).sum(0), slope.sum(0)))
    slope = slope * weight.float()
    back = slope - level * (slope * level).mean(1, keepdim=True)
    back = (back - slope.mean(1, keepdim=True) if centred else back) * scales[:, None]
    back = back.view_as(values)
    if beside is not None and sums_up:
        back = back + beside.float()
    to_values.copy_(back)
    if changes is not None:
        back = back * factor * kept(back.shape, seed, limit) if drops else back
        to_changes.copy_(back)
        if asked:
            sums[0, 2 * width :] = back.view(count, width).sum(0)


def sum_columns(grid: Any, *given: Any, activation: str, tall: int, wide: int) -> None:
    values, gates, result, sums, count, size, stride = given
    assert values.shape == (count, size)
    assert values.stride() == (stride, 1)
    assert grid[0] * wide >= size
    part = values.float()
    if gates is not None:
        assert gates.stride() == result.stride() == values.stride()
        with torch.enable_grad():
            before = gates.float().requires_grad_()
            part = torch.autograd.grad(products.ACTIVATIONS[activation](before), before, part)[0]
        result.copy_(part)
    parts = sums.view(grid[1], size)
    parts.zero_()
    for tile, rows in enumerate(part.split(tall)):
        parts[tile % grid[1]] += rows.sum(0)


def weights_of(query: Tensor, keys: Tensor, real: Tensor | None, scale: float, causal: bool) -> Tensor:
    seen = torch.ones(query.size(2), keys.size(2), dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if real is None else seen & real
    scores = (query.float() @ keys.float().mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def check_places(parts: list[Tensor], numbers: tuple[int, ...], real: Tensor | None) -> None:
    query, keys = parts[0], parts[1]
    jumps = [0 if real is None or real.size(axis) == 1 else real.stride(axis) for axis in (0, 2)]
    steps = (step for part in parts for step in part.stride()[:3])
    wanted = (query.size(1), query.size(2), keys.size(2), *jumps, *steps)
    assert numbers == wanted
    assert all(part.stride(3) == 1 for part in parts)


def tile_contexts(grid: Any, *given: Any, causal: bool, by_step: bool, width: int, tall: int, wide: int) -> None:
    query, keys, values, real, result, scale, *numbers = given
    assert by_step == (real is not None and real.size(2) > 1)
    assert grid == (query.size(0) * query.size(1),)
    assert (width, tall >= query.size(2), wide >= keys.size(2)) == (query.size(3), True, True)
    check_places([query, keys, values, result], tuple(numbers), real)
    result.copy_(weights_of(query, keys, real, scale, causal).to(values.dtype).float() @ values.float())


def tile_slopes(grid: Any, *given: Any, causal: bool, by_step: bool, width: int, tall: int, wide: int) -> None:
    query, keys, values, real, slopes, to_query, to_keys, to_values, sums, scale, *numbers = given
    assert by_step == (real is not None and real.size(2) > 1)
    check_places([query, keys, values, slopes, to_query, to_keys, to_values], tuple(numbers), real)
    weights, slope = weights_of(query, keys, real, scale, causal), slopes.float()
    to_values.copy_(weights.to(slopes.dtype).float().mT @ slope)
    back = slope @ values.float().mT
    back = (weights * (back - (weights * back).sum(-1, keepdim=True)) * scale).to(keys.dtype).float()
    to_query.copy_(back @ keys.float())
    to_keys.copy_(back.mT @ query.float())
    if sums is not None:
        parts = [part.float().sum(2).flatten(1) for part in (to_query, to_keys, to_values)]  # each B (H K)
        sums.copy_(torch.cat(parts, 1))


KERNELS = {
    "transduce.kernels.triton.add_norm": (add_rows, drop_rows, level_rows, level_slopes, sum_columns),
    "transduce.kernels.triton.attention_tiles": (tile_contexts, tile_slopes),
}


def free(*_: Any) -> bool:
    """As on a GPU: whether it is a recorded pass."""
    return torch.is_grad_enabled() and getattr(traits._launching, "free", False)


def takes_any_device(patch: pytest.MonkeyPatch) -> None:
    for user in (levelling, narrowing, products, parting, tiles):
        patch.setattr(user, "own_kernels", free)
    patch.setattr(scoring, "suits", lambda layer, values: free() and layer.out_features % 8 > 0)


def replaces_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    launches: Counter[str] = Counter()
    for name, works in KERNELS.items():
        module: Any = ModuleType(name)
        for work in works:
            setattr(module, work.__name__, Launch(work, launches))
        patch.setitem(sys.modules, name, module)
    takes_any_device(patch)
    return launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Stand-ins for all kernels, on a CPU; how often each was launched."""
    return replaces_kernels(monkeypatch)


def takes_any_precision(patch: pytest.MonkeyPatch) -> None:
    """In fp32 too, where the same sums give the same numbers."""
    plain = tiles.suits
    patch.setattr(tiles, "suits", lambda query, keys, mask: plain(query.bfloat16(), keys, mask))
    patch.setattr(products, "suits", lambda layers, rows: free() and all(type(x) is nn.Linear for x in layers))


@pytest.fixture
def any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_any_precision(monkeypatch)


def model_of(**options: Any) -> Any:
    torch.manual_seed(2)
    part = {"kind": "transformer", "width": 32, "heads": 2, "ff_width": 48, "layers": 2, "dropout": 0.0, **options}
    made = build_model(
        complete_recipe(parse({"model": {"encoder": part, "decoder": part}})).model, VOCABULARY, VOCABULARY
    )
    for name, parameter in made.named_parameters():
        if "table" not in name and parameter.dim() == 1:  # norms and biases too: a part that is left out must show
            nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return made.train()


def gradients(model: Any, batch: Batch = BATCH) -> list[Tensor]:
    model.zero_grad()
    loss = CrossEntropy(label_smoothing=0.1)(model, batch).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


COMMON: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {"norm": "post"},
    "gated": {"activation": "silu", "gated": True, "bias": False},
    "gated after": {"activation": "gelu_tanh", "gated": True, "norm": "post"},
    "gelu": {"activation": "gelu"},
    "no bias": {"bias": False},
    "rms": {"norm_kind": "rms"},
    "rms after": {"norm_kind": "rms", "norm": "post"},
    "embedding norm": {"embedding_norm": True, "norm": "post"},
    "shared keys": {"kv_heads": 1},
    "rotary": {"position": "rotary"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "ssru": {"token_mixer": "ssru"},
    "average": {"token_mixer": "average", "norm": "post"},
    "batch": {"norm_kind": "batch"},  # no norm of the kernels: the sum is made alone
    "batch after": {"norm_kind": "batch", "norm": "post"},
    "attention dropout": {"attention_dropout": 1e-9},
}
SHAPES = COMMON | OTHERS


@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_the_same_loss_and_gradients(options: dict[str, Any], launches: Counter[str]) -> None:
    model = model_of(**options)
    plain = gradients(model)
    assert not launches
    with free_launches():
        found = gradients(model)
    assert launches
    for one, other in zip(found, plain, strict=True):
        assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", COMMON.values(), ids=COMMON.keys())
def test_the_same_within_bf16(options: dict[str, Any], launches: Counter[str]) -> None:
    """As near to the exact gradient as the plain way (0.005 to 0.03), though sums after a norm go on in bf16."""
    model = model_of(**options)
    exact = gradients(model)
    with free_launches(), torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    apart = torch.stack([(one - other).norm() for one, other in zip(found, exact, strict=True)])
    assert apart.norm() / torch.stack([part.norm() for part in exact]).norm() < 0.03
    assert launches["tile_slopes"]
    assert launches["level_slopes"]


def expected(norm: str, biased: bool, drops: bool) -> dict[str, int]:
    """Of 2 + 2 layers: 4 + 6 residuals, 2 + 4 attentions; each norm, and each matrix with a bias, sums up columns.

    The bias of a product that goes into a residual is summed up with the norm.
    """
    norms = 12 if norm == "pre" else 10  # and one at the end of each stack
    matrices = 2 + 2 + 1  # only rectifiers and scores: the biases of attention are summed up in it, source by source
    matrices += 6 if biased else 0
    others = {"tile_contexts": 6, "tile_slopes": 6, "with dropout": 2 * 10 if drops else 0}
    return {"level_rows": norms, "level_slopes": norms, "sum_columns": norms + matrices, **others}


@pytest.mark.parametrize(("norm", ["pre", "post"]))
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
    with free_launches(), torch.autocast("cpu", torch.bfloat16):
        gradients(model)
    assert launches == expected(norm, biased, dropout > 0)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_made_together_are_the_same_and_are_taken(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = model_of(bias=bias), []
    layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features % 8 == 0]
    joined: list[int] = []

    def taken(weights: Any, kind: torch.dtype) -> Tensor:
        made = narrowing.narrow(weights, kind)
        joined.append(len(weights) if made.untyped_storage().nbytes() > made.nbytes else 0)
        return made

    monkeypatch.setattr(products, "narrow", taken)
    for some_layers in ([], layers):
        joined.clear()
        with free_launches(), torch.autocast("cpu", torch.bfloat16), narrowing.made_together(some_layers):
            found.append(gradients(model))
    assert_close(found[0], found[1], atol=0, rtol=0)
    # 2 + 2 layers: queries, keys and values; keys and values of the memory; outputs, queries and thoughts.
    once = {3: 4, 2: 2, 1: 4 + 2 + 2 + 8}
    assert Counter(joined) == {number: times * (2 if bias else 1) for number, times in once.items()}
    assert not hasattr(narrowing._made, "weights")


def test_a_packed_batch_falls_back_nowhere(launches: Counter[str]) -> None:
    packing, lines = Packing(2, 16, 16), np.array([0, 0, 1])
    source, said = ([part.values[row][part.mask[row]] for row in range(3)] for part in (BATCH.source, BATCH.labels))
    sides = ((torch.cat(side).numpy(), np.array(list(map(len, side)))) for side in (source, said))
    model = model_of(dropout=0.2)
    with free_launches(), torch.autocast("cpu", torch.bfloat16):
        gradients(model, packing.packed((next(sides), next(sides)), lines))
    assert launches == expected("pre", True, True)


@pytest.mark.usefixtures("launches")
def test_gradients_of_one_product_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 attentions, and what made their queries, keys and values: all of those, or keys and values alone."""
    found: list[int] = []

    def counting(parts: Any) -> bool:
        found.extend([len(parts)] if (so := adjacent(parts)) else [])
        return so

    adjacent = parting.adjacent
    monkeypatch.setattr(parting, "adjacent", counting)
    monkeypatch.setattr(tiles, "adjacent", counting)
    with free_launches(), torch.autocast("cpu", torch.bfloat16):
        gradients(model_of())
    assert Counter(found) == {3: 2 * 4, 2: 2 * 2}


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("norm", ["pre", "post"]))
def test_dropout_leaves_out_the_same_in_both_passes(norm: str) -> None:
    """The loss falls along its gradient as fast as the gradient says, where every pass draws alike."""
    model = model_of(norm=norm, dropout=0.3, activation="gelu")

    def found() -> list[Tensor]:
        torch.manual_seed(5)
        with free_launches():
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
    with free_launches(), torch.no_grad():
        CrossEntropy()(model_of(), BATCH)
    assert not launches


@pytest.mark.usefixtures("any_precision")
def test_a_layer_with_an_adapter_is_called(launches: Counter[str]) -> None:
    model = model_of()
    called: list[str] = []
    norm = next(part for name, part in model.named_modules() if name.endswith("residuals.1.norm"))
    norm.register_forward_hook(lambda *_: called.append("norm"))
    with free_launches():
        gradients(model)
    assert called == ["norm"]
    assert launches["add_rows"] == 1  # the sum before it, which it could not make


def parts_of(*sizes: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    rows = torch.randn(2, 5, sum(sizes), requires_grad=True)
    with free_launches():
        return rows, parting.part(rows, sizes)


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


@given(rows=some.integers(1, 5), size=some.integers(1, 130), spare=some.integers(0, 2))
def test_the_room_at_the_end_of_a_row_is_cleared(rows: int, size: int, spare: int) -> None:
    length = scoring._round(size)
    room = scoring.spaced(rows + spare, size, torch.ones(1))
    room.as_strided((rows + spare, length), (length, 1)).fill_(torch.nan)
    slopes = room[spare:]
    slopes.copy_(torch.randn(rows, size))
    wanted = nn.functional.pad(slopes, (0, length - size))
    apart = scoring._whole(slopes.clone(), length)
    inside = scoring._whole(slopes, length)
    assert torch.equal(apart, wanted)
    assert torch.equal(inside, wanted)
    assert inside.data_ptr() == slopes.data_ptr()


class Asked(torch.autograd.Function):
    """As the loss of a GPU does, gives back a gradient in rows that begin at round addresses."""

    places: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.shape = scores.shape
        return scores.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        made = scoring.spaced(ctx.shape[0], ctx.shape[1], grads[0]).fill_(1.0)
        Asked.places.append(made.data_ptr())
        return made


def test_the_gradient_of_the_loss_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through views, and is still known to have room."""
    found: list[int] = []

    def watching(slopes: Tensor, size: int) -> Tensor:
        made = whole(slopes, size)
        found.append(made.data_ptr())
        return made

    whole = scoring._whole
    monkeypatch.setattr(scoring, "_whole", watching)
    layer, values = nn.Linear(8, 41, bias=False), torch.randn(2, 3, 8, requires_grad=True)
    Asked.places.clear()
    Asked.apply(scoring.scores(layer, values).flatten(0, 1)).backward()
    assert found == Asked.places
    assert_close(values.grad, layer.weight.sum(0).expand(2, 3, 8).detach())


def test_room_of_others_is_left_alone() -> None:
    """Scores joined with others fill rows of the same length: their gradients are parts of one."""
    layer, values, others = nn.Linear(8, 41, bias=False), torch.randn(3, 8), torch.randn(3, 23, requires_grad=True)
    more = others.exp()  # made before the scores, so its gradient is asked for after theirs
    torch.cat((scoring.scores(layer, values), more), -1).backward(torch.ones(3, 64))
    assert_close(others.grad, others.detach().exp())


def test_rows_that_end_with_their_storage_are_copied() -> None:
    room = scoring.spaced(2, 41, torch.ones(1))
    slopes = room.as_strided((2, 23), (64, 1), 41)
    found = scoring._whole(slopes, 64)
    assert found.data_ptr() != slopes.data_ptr()
    assert found.shape == (2, 64)


@given(rows=some.integers(1, 200), size=some.integers(1, 140), most=some.integers(1, 8))
def test_sums_of_columns_by_several_programs(rows: int, size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = replaces_kernels(patch)
        patch.setattr(products, "PROGRAMS", most)
        values = torch.randn(rows, size)
        same, sums = products.column_sums(values)
    assert same is values
    assert_close(sums, values.sum(0))
    assert launches["sum_columns"] == (1 if rows <= 64 or most // -(-size // 64) <= 1 else 2)


THERE: Any = SimpleNamespace(is_cuda=True)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "compiles", lambda: True)


def test_without_their_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "compiles", lambda: False)
    with free_launches():
        assert not traits.own_kernels(THERE)


@pytest.mark.usefixtures("compiler")
def test_torchs_own_compiler_meets_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with free_launches():
        assert not traits.own_kernels(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_are_free_only_inside() -> None:
    assert not traits.own_kernels(THERE)
    with free_launches():
        assert traits.own_kernels(THERE)
        assert not traits.own_kernels(torch.ones(1))
        with torch.no_grad():
            assert not traits.own_kernels(THERE)
    assert not traits.own_kernels(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_cost_again_after_an_exception() -> None:
    with pytest.raises(KeyError), free_launches():
        raise KeyError
    assert not traits.own_kernels(THERE)


@pytest.mark.usefixtures("compiler")
def test_launches_are_free_in_their_own_thread() -> None:
    found: list[bool] = []
    with free_launches():
        other = threading.Thread(target=lambda: found.append(traits.own_kernels(THERE)))
        other.start()
        other.join()
    assert found == [False]
