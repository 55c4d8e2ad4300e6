"""Triton kernels of a decoding step against their torch reference: on a GPU, or in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/oracles/test_fused_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transduce.flow import CacheSlots
from transduce.kernels import decode_step
from transduce.kernels.decode_step import EmbeddingTables, FusedLinear, TorchOperations, TritonOperations

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("there is neither a GPU nor the interpreter", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16]
TORCH, TRITON = TorchOperations(), TritonOperations()


def near(found: Tensor, wanted: Tensor) -> None:
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def matrix(wide_in: int, wide_out: int, kind: torch.dtype, bias: bool = True) -> nn.Linear:
    made = nn.Linear(wide_in, wide_out, bias)
    nn.init.normal_(made.weight, std=wide_in**-0.5)
    return made.to(DEVICE, kind).requires_grad_(False)


def norm(wide: int, kind: torch.dtype, bias: bool = True) -> nn.LayerNorm:
    made = nn.LayerNorm(wide, bias=bias)
    nn.init.normal_(made.weight, mean=1.0, std=0.3)
    if bias:
        nn.init.normal_(made.bias)
    return made.to(DEVICE, kind).requires_grad_(False)


def numbers(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("number", [1, 3, 5, 20, 70])
@pytest.mark.parametrize("wide", [(48, 100), (130, 30)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_fused_linear_equals_torch(number: int, wide: tuple[int, int], kind: torch.dtype, bias: bool) -> None:
    wide_in, wide_out = wide
    rows, residual = numbers(number, wide_in, kind=kind) + 2, numbers(number, wide_out, kind=kind)
    plain, level = matrix(*wide, kind, bias), norm(wide_in, kind, bias)
    for work, beside in (
        (FusedLinear(plain), None),
        (FusedLinear(plain, level), None),
        (FusedLinear(plain, level, returns_norm=True, activation="relu"), None),
        (FusedLinear(plain, activation="gelu"), residual),
        (FusedLinear(plain, level, True, "gelu_tanh", matrix(*wide, kind, bias)), None),
        (FusedLinear(plain, level, False, "silu", matrix(*wide, kind, bias)), residual),
    ):
        found, wanted = (operations.linear(work, rows, beside) for operations in (TRITON, TORCH))
        near(found[0], wanted[0])
        near(found[1], wanted[1])


@pytest.mark.parametrize("number", [1, 20])
def test_rows_longer_than_a_tile(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "REGISTER_NUMBERS", 512)
    kind = KINDS[0]
    rows, work = numbers(number, 200, kind=kind), FusedLinear(matrix(200, 40, kind), norm(200, kind), True)
    assert decode_step.tile_sizes(number, 200, 40)[2] < 200
    for found, wanted in zip(TRITON.linear(work, rows), TORCH.linear(work, rows), strict=True):
        near(found, wanted)


def slots_of(sources: int, beams: int, capacity: int, window: int | None) -> CacheSlots:
    places = torch.randint(0, capacity, (sources, 1)).repeat(1, beams).flatten().to(DEVICE)
    owners = torch.randint(0, beams, (sources * beams, capacity)).to(DEVICE, torch.int16)
    own = torch.arange(beams).repeat(sources)[:, None].to(DEVICE, torch.int16)
    return CacheSlots(places, owners.scatter(1, places[:, None], own), beams, window)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("sources", "beams", "heads", "groups"), [(1, 1, 2, 2), (3, 1, 2, 1), (2, 5, 2, 2), (1, 16, 4, 2)]
)
@pytest.mark.parametrize("window", [None, 3])
def test_qkv_and_cache_attention_equal_torch(
    sources: int, beams: int, heads: int, groups: int, window: int | None, kind: torch.dtype
) -> None:
    capacity, width, count = 80, 32, sources * beams
    slots = slots_of(sources, beams, capacity, window)
    caches = [numbers(sources, beams, capacity, groups, width, kind=kind) for _ in range(2)]
    rows = numbers(count, 64, kind=kind)
    work = FusedLinear(matrix(64, (heads + 2 * groups) * width, kind), norm(64, kind), returns_norm=True)
    filled: list[Any] = [tuple(one.clone() for one in caches) for _ in range(2)]
    found, wanted = (p.qkv(work, rows, past, slots) for p, past in zip((TRITON, TORCH), filled, strict=True))
    for one, other in zip((*found, *filled[0]), (*wanted, *filled[1]), strict=True):
        near(one, other)
    assert not torch.equal(filled[0][0], caches[0])
    context = [p.attend_cache(wanted[0].contiguous(), filled[1], slots, 0.3) for p in (TRITON, TORCH)]
    near(*context)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("beams", [1, 5])
def test_memory_attention_equals_torch(beams: int, kind: torch.dtype) -> None:
    sources, heads, width, length = 3, 2, 32, 21
    query = numbers(sources * beams, heads * width, kind=kind)
    memory: Any = tuple(numbers(sources, heads, length, width, kind=kind) for _ in range(2))
    mask = (torch.arange(length) < torch.tensor([[21], [1], [9]]))[:, None, None].to(DEVICE)
    near(*(operations.attend_memory(query, memory, mask, 0.2) for operations in (TRITON, TORCH)))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("positions", [True, False])
def test_embedding_equals_torch(beams: int, positions: bool) -> None:
    kind, capacity = KINDS[0], 40
    slots = slots_of(2, beams, capacity, None)
    slots.positions[0] = capacity - 1  # the last one stays where it is
    entry = EmbeddingTables(numbers(30, 72, kind=kind), 3.0, numbers(30, 72, kind=kind) if positions else None)
    tokens = torch.randint(0, 30, (2 * beams, 7)).to(DEVICE)[:, -1]  # the last column of a history
    found, wanted = (operations.embed(entry, tokens, slots) for operations in (TRITON, TORCH))
    near(found.rows, wanted.rows)
    assert torch.equal(found.next_positions, wanted.next_positions)
    assert torch.equal(found.indirection, wanted.indirection)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 5000, 1), (3, 1025, 5), (2, 40, 10), (2, 4, 6)])
def test_top_k_equals_torch(rows: int, size: int, count: int, kind: torch.dtype) -> None:
    scores = 4 * torch.randn(rows, size).to(DEVICE)
    scores = (scores * 16).round() / 16 if kind != torch.float32 else scores  # the same in every precision
    scores += torch.linspace(0, 1e-3, size, device=DEVICE) if kind == torch.float32 else 0
    for banned in ((), (0, 1), (int(scores[0].argmax()), 2)):
        found, wanted = (operations.top_k(scores.to(kind), count, banned) for operations in (TRITON, TORCH))
        torch.testing.assert_close(found[0], wanted[0], atol=1e-4, rtol=1e-4)
        logs = scores.to(kind).float().log_softmax(-1)
        told = found[0] > -torch.inf
        torch.testing.assert_close(logs.gather(1, found[1])[told], found[0][told], atol=1e-4, rtol=1e-4)
        for row, kept in zip(found[1], told, strict=True):
            chosen = row[kept].tolist()
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & set(banned)
