"""A family's table and the weights of a folder in; our weights out, once all names and shapes were found to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.family import Family
from transduce.interop.folder import Stored, read_weight
from transduce.interop.tokens import Rows

OUTPUT_BIAS = "decoder.output.layer.bias"
# Weights with a row for each token.
OF_TOKENS = (".embedding.table.weight", ".output.layer.weight", ".output.layer.bias")


def check(
    family: Family, stored: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], rows: Rows, where: str
) -> None:
    """By names and shapes alone: what is missing, what would be dropped, what does not fit."""
    made: dict[str, Tensor] = {}
    whence: dict[str, str] = {}
    for name, one in stored.items():
        place = family.place(name)
        if place is None:
            if name in family.copies or family.ignores(name):
                continue
            raise InputError(
                f"{name} would be dropped: it has no place in this family",
                where=where,
                remedy="the folder holds another model than its config.json says, or one with additions",
            )
        for ours, tensor in place.fill(torch.empty(one.shape, device="meta")).items():
            if ours in made:
                raise InputError(f"{name} and {whence[ours]} are both {ours}", where=where)
            if ours.endswith(OF_TOKENS) and len(tensor) != rows.theirs:
                raise InputError(
                    f"{name} has {len(tensor)} rows, and config.json says vocab_size: {rows.theirs}",
                    where=where,
                    remedy="config.json and the weights belong to different models",
                )
            made[ours], whence[ours] = tensor, name
    for ours, tensor in _ordered(family.joined(made), rows, wanted).items():
        name = whence.get(ours, ours)
        if ours not in wanted:
            raise InputError(
                f"{name} would be dropped: config.json asks for no such part", where=where, remedy="fetch it again"
            )
        if tuple(tensor.shape) != wanted[ours]:
            raise InputError(
                f"{name} makes {ours} {tuple(tensor.shape)}, and config.json asks for {wanted[ours]}",
                where=where,
                remedy="config.json and the weights belong to different models",
            )
    if missing := sorted(set(wanted) - set(made) - {OUTPUT_BIAS}):
        raise InputError(f"the weights of {missing[0]} are missing", where=where, remedy="fetch the folder again")


def _ordered(weights: Mapping[str, Tensor], rows: Rows, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Rows of tokens in our order; an output bias where they have none, so that silent rows can be silent."""
    kept: dict[int, Tensor] = {}  # weights that are one stay one
    result = {}
    for name, tensor in weights.items():
        if name.endswith(OF_TOKENS):
            if id(tensor) not in kept:
                kept[id(tensor)] = rows.pick(tensor)
            tensor = kept[id(tensor)]
        result[name] = tensor
    if OUTPUT_BIAS in wanted:
        anywhere = next(iter(weights.values()))
        bias = result.get(OUTPUT_BIAS, torch.zeros(wanted[OUTPUT_BIAS], device=anywhere.device))
        result[OUTPUT_BIAS] = rows.hush(bias)
    return result


def fill(
    family: Family, stored: Mapping[str, Stored], rows: Rows, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, one in stored.items():
        place = family.place(name)
        if place is not None:
            weights |= place.fill(read_weight(one))
        elif name in family.copies and not torch.equal(read_weight(one), read_weight(stored[family.copies[name]])):
            raise InputError(
                f"{name} differs from {family.copies[name]}, of which it should be a copy",
                where=str(one.file),
                remedy="config.json says that these weights are tied: fetch the folder again",
            )
    return _ordered(family.joined(weights), rows, wanted)
