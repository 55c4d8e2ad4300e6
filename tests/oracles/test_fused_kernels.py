"""Each GPU kernel of a fused step gives what torch's operations give: on a GPU, or anywhere by Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/oracles/test_fused_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transduce.attention.self_attention import CacheSlots
from transduce.kernels import decode_rows as rows_module
from transduce.kernels.decode_rows import Entry, Kernels, Plain, Product

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("there is neither a GPU nor the interpreter", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16]
PLAIN, KERNELS = Plain(), Kernels()


def near(found: Tensor, wanted: Tensor) -> None:
    room = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=room, rtol=room)


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
def test_products(number: int, wide: tuple[int, int], kind: torch.dtype, bias: bool) -> None:
    wide_in, wide_out = wide
    rows, residual = numbers(number, wide_in, kind=kind) + 2, numbers(number, wide_out, kind=kind)
    plain, level = matrix(*wide, kind, bias), norm(wide_in, kind, bias)
    for work, beside in (
        (Product(plain), None),
        (Product(plain, level), None),
        (Product(plain, level, keeps=True, activation="relu"), None),
        (Product(plain, activation="gelu"), residual),
        (Product(plain, level, True, "gelu_tanh", matrix(*wide, kind, bias)), None),
        (Product(plain, level, False, "silu", matrix(*wide, kind, bias)), residual),
    ):
        found, wanted = (pieces.product(work, rows, beside) for pieces in (KERNELS, PLAIN))
        near(found[0], wanted[0])
        near(found[1], wanted[1])


@pytest.mark.parametrize("number", [1, 20])
def test_rows_longer_than_a_tile_are_read_in_several(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "HELD", 512)
    kind = KINDS[0]
    rows, work = numbers(number, 200, kind=kind), Product(matrix(200, 40, kind), norm(200, kind), True)
    assert rows_module.tiles(number, 200, 40)[2] < 200
    for found, wanted in zip(KERNELS.product(work, rows), PLAIN.product(work, rows), strict=True):
        near(found, wanted)


def slots_of(sources: int, beams: int, room: int, reach: int | None) -> CacheSlots:
    places = torch.randint(0, room, (sources, 1)).repeat(1, beams).flatten().to(DEVICE)
    owners = torch.randint(0, beams, (sources * beams, room)).to(DEVICE, torch.int16)
    own = torch.arange(beams).repeat(sources)[:, None].to(DEVICE, torch.int16)
    return CacheSlots(places, owners.scatter(1, places[:, None], own), beams, reach)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("sources", "beams", "heads", "groups"), [(1, 1, 2, 2), (3, 1, 2, 1), (2, 5, 2, 2), (1, 16, 4, 2)]
)
@pytest.mark.parametrize("reach", [None, 3])
def test_looking_back(sources: int, beams: int, heads: int, groups: int, reach: int | None, kind: torch.dtype) -> None:
    room, width, count = 80, 32, sources * beams
    slots = slots_of(sources, beams, room, reach)
    caches = [numbers(sources, beams, room, groups, width, kind=kind) for _ in range(2)]
    rows = numbers(count, 64, kind=kind)
    work = Product(matrix(64, (heads + 2 * groups) * width, kind), norm(64, kind), keeps=True)
    filled: list[Any] = [tuple(one.clone() for one in caches) for _ in range(2)]
    found, wanted = (p.look(work, rows, past, slots) for p, past in zip((KERNELS, PLAIN), filled, strict=True))
    for one, other in zip((*found, *filled[0]), (*wanted, *filled[1]), strict=True):
        near(one, other)
    assert not torch.equal(filled[0][0], caches[0])
    context = [p.attend_slots(wanted[0].contiguous(), filled[1], slots, 0.3) for p in (KERNELS, PLAIN)]
    near(*context)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("beams", [1, 5])
def test_looking_up(beams: int, kind: torch.dtype) -> None:
    sources, heads, width, length = 3, 2, 32, 21
    query = numbers(sources * beams, heads * width, kind=kind)
    memory: Any = tuple(numbers(sources, heads, length, width, kind=kind) for _ in range(2))
    mask = (torch.arange(length) < torch.tensor([[21], [1], [9]])).to(DEVICE)
    near(*(pieces.attend_memory(query, memory, mask, 0.2) for pieces in (KERNELS, PLAIN)))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("waves", [True, False])
def test_entering(beams: int, waves: bool) -> None:
    kind, room = KINDS[0], 40
    slots = slots_of(2, beams, room, None)
    slots.places[0] = room - 1  # the last one stays where it is
    entry = Entry(numbers(30, 72, kind=kind), 3.0, numbers(30, 72, kind=kind) if waves else None)
    tokens = torch.randint(0, 30, (2 * beams, 7)).to(DEVICE)[:, -1]  # the last column of a history
    found, wanted = (pieces.embed(entry, tokens, slots) for pieces in (KERNELS, PLAIN))
    near(found.rows, wanted.rows)
    assert torch.equal(found.following, wanted.following)
    assert torch.equal(found.owners, wanted.owners)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 5000, 1), (3, 1025, 5), (2, 40, 10), (2, 4, 6)])
def test_the_best_of_many(rows: int, size: int, count: int, kind: torch.dtype) -> None:
    scores = 4 * torch.randn(rows, size).to(DEVICE)
    scores = (scores * 16).round() / 16 if kind != torch.float32 else scores  # the same in every precision
    scores += torch.linspace(0, 1e-3, size, device=DEVICE) if kind == torch.float32 else 0
    for banned in ((), (0, 1), (int(scores[0].argmax()), 2)):
        found, wanted = (pieces.best(scores.to(kind), count, banned) for pieces in (KERNELS, PLAIN))
        torch.testing.assert_close(found[0], wanted[0], atol=1e-4, rtol=1e-4)
        logs = scores.to(kind).float().log_softmax(-1)
        told = found[0] > -torch.inf
        torch.testing.assert_close(logs.gather(1, found[1])[told], found[0][told], atol=1e-4, rtol=1e-4)
        for row, kept in zip(found[1], told, strict=True):
            chosen = row[kept].tolist()
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & set(banned)
