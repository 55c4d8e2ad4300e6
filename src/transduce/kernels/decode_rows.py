"""The few rows of a step in; products, attention and embeddings of them out, each with all around it as one kernel.

A kernel costs about a microsecond on a GPU however little it does. So a product takes the norm of what it reads, the
activation, the gate, the sum with the residual and the way into the cache along. `Plain` says the same by torch's
operations: it is what the kernels are measured against, and what runs where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.self_attention import CacheSlots
from transduce.kernels.attention_decode import MOST, attend_few
from transduce.kernels.linear import ACTIVATIONS

SINGLY = 4  # rows up to which a product is quicker without the matrix unit, which wants sixteen
PART = 1024  # scores that a program looks through for the best
HELD = 8192  # numbers that the 128 threads of a program keep at hand


@dataclass(frozen=True)
class Product:
    """f(W norm(x) + b), times the same of a gate: what a block does to its rows between two attentions."""

    matrix: nn.Linear
    norm: nn.LayerNorm | None = None
    keeps: bool = False  # True: what the norm made of the rows is wanted too, as the residual
    activation: str = ""
    gate: nn.Linear | None = None


@dataclass(frozen=True)
class Entry:
    """Ids and places -> vectors: s E[id] + P[place]."""

    table: Tensor  # V D
    scale: float
    waves: Tensor | None  # P D: a vector for every place


@dataclass(frozen=True)
class Entered:
    """What a step begins with."""

    rows: Tensor  # R D
    following: Tensor  # R: where the next row stands
    owners: Tensor  # R L: see `Slots`


class Plain:
    """By torch's operations, on any device and in any precision."""

    def product(self, work: Product, rows: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """R I -> R O, and the residual that the rows (R I) are for what follows."""
        read = rows if work.norm is None else nn.LayerNorm.forward(work.norm, rows)
        made = F.linear(read, work.matrix.weight, work.matrix.bias)
        made = ACTIVATIONS[work.activation](made) if work.activation else made
        if work.gate is not None:
            made = made * F.linear(read, work.gate.weight, work.gate.bias)
        return made if residual is None else made + residual, read if work.keeps else rows

    def look(
        self, work: Product, rows: Tensor, past: tuple[Tensor, Tensor], slots: CacheSlots
    ) -> tuple[Tensor, Tensor]:
        """Queries R H*K of rows, whose keys and values go into the caches (B N L G K); and the residual."""
        made, read = self.product(work, rows)
        size = past[0].size(3) * past[0].size(4)
        query, keys, values = made.split((made.size(1) - 2 * size, size, size), 1)
        for room, new in zip(past, (keys, values), strict=True):
            room.view(-1, size).index_copy_(0, slots.rows, new)
        return query, read

    def attend_slots(self, query: Tensor, past: tuple[Tensor, Tensor], slots: CacheSlots, scale: float) -> Tensor:
        """Queries R H*K over caches B N L G K, each beam over the slots that hold its tokens -> R H*K"""
        keys, values = (room.flatten(1, 2).transpose(1, 2) for room in past)  # B G N*L K
        asked = query.unflatten(1, (-1, keys.size(3))).unflatten(0, (-1, slots.beams)).transpose(1, 2)  # B H N K
        return _joined(self._attend(asked, keys, values, slots.mask, scale))

    def attend_memory(self, query: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor, scale: float) -> Tensor:
        """Queries R H*K over the memory of their source, B G S K, as far as it is real (B S) -> R H*K"""
        keys, values = memory
        asked = query.unflatten(1, (-1, keys.size(3))).unflatten(0, (len(keys), -1)).transpose(1, 2)  # B H N K
        return _joined(self._attend(asked, keys, values, mask[:, None, None], scale))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        grouped = keys.size(1) < query.size(1)
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)

    def embed(self, entry: Entry, tokens: Tensor, slots: CacheSlots) -> Entered:
        """Ids R at their places -> rows; and what the next step must know of places and owners."""
        places, owners = slots.places, slots.owners
        rows = entry.table[tokens] * entry.scale
        if entry.waves is not None:
            rows = rows + entry.waves[places.clamp(max=len(entry.waves) - 1)]
        if slots.beams > 1:
            own = torch.arange(slots.beams, dtype=owners.dtype, device=places.device)  # N
            owners = owners.scatter(1, places[:, None], own.repeat(len(places) // slots.beams)[:, None])
        return Entered(rows, (places + 1).clamp(max=owners.size(1) - 1), owners)

    def best(self, scores: Tensor, count: int, banned: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Scores R V -> log-probabilities and ids of the best ones that are not banned, R M; -inf: there are no more"""
        logs = scores.log_softmax(-1, dtype=torch.float)
        logs = logs.index_fill(1, torch.tensor(banned, dtype=torch.long, device=scores.device), -torch.inf)
        found = logs.topk(min(count, logs.size(1)))
        missing = (0, count - found.values.size(1))
        return F.pad(found.values, missing, value=-torch.inf), F.pad(found.indices, missing)


class Kernels(Plain):
    """Each as one GPU kernel; the best of many scores as two."""

    def __init__(self) -> None:
        self._banned: dict[Any, Tensor] = {}  # on their device: a recorded step cannot fetch them from the host

    def product(self, work: Product, rows: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._launch(work, rows, work.matrix.out_features, residual)

    def look(
        self, work: Product, rows: Tensor, past: tuple[Tensor, Tensor], slots: CacheSlots
    ) -> tuple[Tensor, Tensor]:
        width = work.matrix.out_features - 2 * past[0].size(3) * past[0].size(4)
        return self._launch(work, rows, width, None, (*past, slots.places, past[0].size(2)))

    def _launch(
        self, work: Product, rows: Tensor, width: int, residual: Tensor | None, cache: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        from transduce.kernels.triton.decode_rows import product

        number, wide_in = rows.shape
        wide_out = work.matrix.out_features
        made = rows.new_empty(number, width)
        kept = torch.empty_like(rows) if work.keeps else None
        keys, values, places, room = cache or (None, None, None, 1)
        tile_rows, tile_out, tile_in = tiles(number, wide_in, wide_out)
        product[(-(-wide_out // tile_out), -(-number // tile_rows))](
            rows, work.matrix.weight, work.matrix.bias,
            *((None, None) if work.gate is None else (work.gate.weight, work.gate.bias)),
            *((None, None) if work.norm is None else (work.norm.weight, work.norm.bias)),
            residual, kept, made, keys, values, places, number, wide_out, width, room,
            0.0 if work.norm is None else work.norm.eps,
            wide_in=wide_in, activation=work.activation, by_unit=number > SINGLY,
            tile_rows=tile_rows, tile_out=tile_out, tile_in=tile_in, num_warps=4,
        )  # fmt: skip
        return made, rows if kept is None else kept

    def attend_slots(self, query: Tensor, past: tuple[Tensor, Tensor], slots: CacheSlots, scale: float) -> Tensor:
        from transduce.kernels.triton.attention_decode import slot_queries

        keys, values = past
        room, groups, width = keys.shape[2:]
        heads, result = query.size(1) // width, torch.empty_like(query)
        slot_queries[(len(keys) * heads,)](
            query, keys, values, slots.places, slots.owners if slots.beams > 1 else None, result, scale, slots.reach,
            heads, heads // groups, slots.beams, room, width=width, block=_tile(slots.beams * room, 16, 128), most=MOST,
        )  # fmt: skip
        return result

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        return attend_few(query, keys, values, mask, scale)

    def embed(self, entry: Entry, tokens: Tensor, slots: CacheSlots) -> Entered:
        from transduce.kernels.triton.decode_rows import embed

        places, owners = slots.places, slots.owners
        number, wide = len(tokens), entry.table.size(1)
        rows = entry.table.new_empty(number, wide)
        following, several = torch.empty_like(places), slots.beams > 1
        after = torch.empty_like(owners) if several else owners
        end = 0 if entry.waves is None else len(entry.waves) - 1
        embed[(number,)](
            tokens, entry.table, entry.waves, places, owners if several else None, rows, following, after,
            entry.scale, tokens.stride(0), wide, owners.size(1), end, slots.beams, tile=_tile(wide, 16, 1024),
        )  # fmt: skip
        return Entered(rows, following, after)

    def best(self, scores: Tensor, count: int, banned: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        from transduce.kernels.triton.decode_rows import gather_best, survey

        rows, size = scores.shape
        key = (banned, scores.device)
        if key not in self._banned:
            self._banned[key] = torch.tensor(banned or (-1,), device=scores.device)
        parts, slots = -(-size // PART), _tile(count, 2, 64)
        peaks, sums = scores.new_empty(2, rows, parts, dtype=torch.float)
        values = scores.new_empty(rows, parts, count, dtype=torch.float)
        ids = scores.new_empty(rows, parts, count, dtype=torch.int32)
        survey[(parts, rows)](
            scores, self._banned[key], values, ids, peaks, sums, size, len(banned), count=count, slots=slots, tile=PART
        )
        logs = scores.new_empty(rows, count, dtype=torch.float)
        tokens = scores.new_empty(rows, count, dtype=torch.long)
        wide, high = _tile(parts * count, 16, 1 << 20), _tile(parts, 16, 1 << 20)
        gather_best[(rows,)](
            values, ids, peaks, sums, logs, tokens, parts, count=count, slots=slots, wide=wide, high=high
        )
        return logs, tokens


def _joined(context: Tensor) -> Tensor:
    """B H N K -> R H*K"""
    return context.transpose(1, 2).flatten(2).flatten(0, 1)


def tiles(rows: int, wide_in: int, wide_out: int) -> tuple[int, int, int]:
    """Rows, columns and numbers along them that a program takes at once.

    Few columns where there are few in all: a hundred programs or more must read the weights for memory to be busy.
    """
    if rows <= SINGLY:
        high = _tile(rows, 1, SINGLY)
        out = 4 if wide_out <= 1024 else 8 if wide_out <= 4096 else 16
        return high, out, _tile(wide_in, 16, HELD // (high * out))
    high = _tile(rows, 16, 64)
    return high, 16 if wide_out <= 2048 else 32, _tile(wide_in, 16, HELD // 2 // high)


def _tile(size: int, least: int, most: int) -> int:
    """The power of two that holds so many, within bounds."""
    return min(most, max(least, 1 << max(size - 1, 0).bit_length()))
