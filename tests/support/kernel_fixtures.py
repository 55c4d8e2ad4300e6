"""Stand-ins for the Triton kernels of training, written with torch's operations, and small models to train on them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transduce.flow import BOS, EOS, Batch, Padded
from transduce.kernels import attention, dispatch, linear
from transduce.kernels.attention import ATTENTION, AttentionInput, fits_tile
from transduce.kernels.dispatch import Backend, current_pass
from transduce.kernels.linear import LINEAR
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

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


def joined(values: Tensor, x: Tensor | None, seed: Tensor, limit: int, factor: float, drops: bool) -> Tensor:
    if x is None:
        return values.float()
    addend = x.float()
    return values.float() + (addend * factor * kept(addend.shape, seed, limit) if drops else addend)


def dropout_add_forward(
    grid: Any, values: Any, x: Any, seed: Any, result: Any, size: int, *rest: Any, block: int
) -> None:
    assert grid[0] * block >= size == values.numel()
    result.copy_(joined(values, x, seed, *rest))


def dropout_backward(grid: Any, x: Any, seed: Any, result: Any, size: int, limit: int, factor: float, **_: Any) -> None:
    result.copy_(x.float() * factor * kept(x.shape, seed, limit))


def add_norm_forward(grid: Any, *given: Any, width: int, drops: bool, centred: bool, block: int, rows: int) -> None:
    values, x, seed, weight, bias, totals, result, means, scales, count, limit, factor, epsilon = given
    assert grid[0] * rows >= count == values.numel() // width
    assert block >= width == values.size(-1)
    total = joined(values, x, seed, limit, factor, drops)
    if totals is not None:
        totals.copy_(total)
    total = total.view(count, width)
    if centred:
        means.copy_(total.mean(1))
        total = total - means[:, None]
    scales.copy_((total.square().mean(1) + epsilon).rsqrt())
    made = total * scales[:, None] * weight.float()
    result.copy_((made if bias is None else made + bias.float()).view_as(result))


def add_norm_backward(
    grid: Any, *given: Any, width: int, drops: bool, centred: bool, keep_sum: bool, sums_x: bool, block: int, rows: int
) -> None:
    grads, second_grads, values, x, seed, weight, means, scales, residual_grad, x_grad, sums = given[:11]
    count, limit, factor = given[11:]
    assert sums.shape == (grid[0], (3 if sums_x else 2) * width)
    assert grid[0] <= -(-count // rows)
    total = joined(values, x, seed, limit, factor, drops).view(count, width)
    level = (total - means[:, None] if centred else total) * scales[:, None]
    grad = grads.float().view(count, width)
    if second_grads is not None and not keep_sum:
        grad = grad + second_grads.float().view(count, width)
    sums.zero_()
    sums[0, : 2 * width] = torch.cat(((grad * level).sum(0), grad.sum(0)))
    grad = grad * weight.float()
    input_grad = grad - level * (grad * level).mean(1, keepdim=True)
    input_grad = (input_grad - grad.mean(1, keepdim=True) if centred else input_grad) * scales[:, None]
    input_grad = input_grad.view_as(values)
    if second_grads is not None and keep_sum:
        input_grad = input_grad + second_grads.float()
    residual_grad.copy_(input_grad)
    if x is not None:
        input_grad = input_grad * factor * kept(input_grad.shape, seed, limit) if drops else input_grad
        x_grad.copy_(input_grad)
        if sums_x:
            sums[0, 2 * width :] = input_grad.view(count, width).sum(0)


def sum_columns(grid: Any, *given: Any, activation: str, tile_rows: int, tile_columns: int) -> None:
    values, gates, result, sums, count, size, stride = given
    assert values.shape == (count, size)
    assert values.stride() == (stride, 1)
    assert grid[0] * tile_columns >= size
    part = values.float()
    if gates is not None:
        assert gates.stride() == result.stride() == values.stride()
        with torch.enable_grad():
            before = gates.float().requires_grad_()
            part = torch.autograd.grad(linear.ACTIVATIONS[activation](before), before, part)[0]
        result.copy_(part)
    parts = sums.view(grid[1], size)
    parts.zero_()
    for tile, rows in enumerate(part.split(tile_rows)):
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


def attention_forward(
    grid: Any, *given: Any, causal: bool, by_query: bool, width: int, query_block: int, key_block: int
) -> None:
    query, keys, values, real, result, scale, *numbers = given
    assert by_query == (real is not None and real.size(2) > 1)
    assert grid == (query.size(0) * query.size(1),)
    assert (width, query_block >= query.size(2), key_block >= keys.size(2)) == (query.size(3), True, True)
    check_places([query, keys, values, result], tuple(numbers), real)
    result.copy_(weights_of(query, keys, real, scale, causal).to(values.dtype).float() @ values.float())


def attention_backward(
    grid: Any, *given: Any, causal: bool, by_query: bool, width: int, query_block: int, key_block: int
) -> None:
    query, keys, values, real, grads, query_grad, keys_grad, residual_grad, sums, scale, *numbers = given
    assert by_query == (real is not None and real.size(2) > 1)
    check_places([query, keys, values, grads, query_grad, keys_grad, residual_grad], tuple(numbers), real)
    weights, grad = weights_of(query, keys, real, scale, causal), grads.float()
    residual_grad.copy_(weights.to(grads.dtype).float().mT @ grad)
    input_grad = grad @ values.float().mT
    input_grad = (weights * (input_grad - (weights * input_grad).sum(-1, keepdim=True)) * scale).to(keys.dtype).float()
    query_grad.copy_(input_grad @ keys.float())
    keys_grad.copy_(input_grad.mT @ query.float())
    if sums is not None:
        parts = [part.float().sum(2).flatten(1) for part in (query_grad, keys_grad, residual_grad)]  # each B (H K)
        sums.copy_(torch.cat(parts, 1))


KERNELS = {
    "transduce.kernels.triton.training": (
        dropout_add_forward,
        dropout_backward,
        add_norm_forward,
        add_norm_backward,
        sum_columns,
    ),
    "transduce.kernels.triton.attention": (attention_forward, attention_backward),
}


def free(*_: Any) -> bool:
    """As on a GPU: whether it is a recorded pass."""
    return torch.is_grad_enabled() and current_pass().captured


def takes_any_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "fused_training", free)
    patch.setattr(linear, "accepts_padding", lambda x, weight, bias: free() and len(weight) % 8 > 0)


def replaces_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    launches: Counter[str] = Counter()
    for name, works in KERNELS.items():
        module: Any = ModuleType(name)
        for work in works:
            setattr(module, work.__name__, Launch(work, launches))
        patch.setitem(sys.modules, name, module)
    takes_any_device(patch)
    return launches


def takes_any_precision(patch: pytest.MonkeyPatch) -> None:
    """In fp32 too, where the same sums give the same numbers."""

    def accepts_attention(given: AttentionInput) -> bool:
        return free() and given.bias is None and not given.dropout and given.query.dim() == 4 and fits_tile(given)

    tile = Backend("triton", accepts_attention, attention.triton_attention)
    patch.setattr(attention, "ATTENTION", replace(ATTENTION, backends=(tile, *ATTENTION.backends)))
    patch.setattr(linear, "accepts_linear", free)
    patch.setattr(linear, "LINEAR", replace(LINEAR, backends=(Backend("triton", free, linear.fused_linear),)))


def model_of(**options: Any) -> Any:
    torch.manual_seed(2)
    part = {"kind": "transformer", "width": 32, "heads": 2, "ff_width": 48, "layers": 2, "dropout": 0.0, **options}
    made = build_model(
        complete_recipe(parse({"model": {"encoder": part, "decoder": part}})).model, VOCABULARY, VOCABULARY
    )
    for name, parameter in made.named_parameters():
        if (
            not name.endswith("embedding.weight") and parameter.dim() == 1
        ):  # norms and biases too: a part that is left out must show
            nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return made.train()


def gradients(model: Any, batch: Batch = BATCH) -> list[Tensor]:
    model.zero_grad()
    loss = CrossEntropy(label_smoothing=0.1)(model, batch).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
