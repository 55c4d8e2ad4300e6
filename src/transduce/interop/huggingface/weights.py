"""A family's table and the weights of a folder in; our weights out, once all names and shapes were found to fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Family
from transduce.interop.huggingface.folder import Stored, read_weight
from transduce.interop.huggingface.tokenizers import Rows

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


INSIDE = ("embeddings.", "encoder.", "transformer.", "pooler.", "layernorm.")  # what lies below a head
TOLERANCE = 1e-6  # relative, where a number is multiplied and divided on its way
# Weights whose rows, columns, or only axis are the width of the model: all of them turn with it.
COLUMNS = (
    "embedding.table.weight", "output.layer.weight", "query.weight", "key.weight", "value.weight", "grow.weight",
    "gate.weight",
)  # fmt: skip
ROWS = (
    "attention.output.weight", "attention.output.bias", "cross.output.weight", "cross.output.bias", "shrink.weight",
    "shrink.bias", "norm.weight", "norm.bias", "entry.weight", "entry.bias",
)  # fmt: skip


def halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model with its width in another order, so that sines stand before cosines rather than turn by turn."""
    result = {}
    for name, tensor in weights.items():
        if name.endswith(COLUMNS):
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
        elif name.endswith(ROWS):
            tensor = torch.cat((tensor[0::2], tensor[1::2]), 0)
        result[name] = tensor
    return result


def theirs(family: Family, weights: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Every weight under their name, each once: those that are only copies are left out, as they leave them out."""
    result: dict[str, Tensor] = {}
    given, weights = weights, family.parted(dict(weights))
    for module, ours in family.table.items():
        for number in _numbers(ours, weights):
            for leaf in ("weight", "bias"):
                tensor = weights.get(f"{ours.replace('*', number)}.{leaf}")
                if tensor is not None:
                    result[f"{module.replace('*', number)}.{leaf}"] = tensor
    for name, place in family.special.items():
        for number in _numbers(place.names[0], weights):
            made = [weights.get(one.replace("*", number)) for one in place.names]
            present = [tensor for tensor in made if tensor is not None]
            if present:
                result[name.replace("*", number)] = place.back(present).contiguous()
    _check(family, given, result, where)
    return {_full(family, name): tensor.contiguous() for name, tensor in result.items()}


def _numbers(ours: str, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Of the layers that have such a part; one that all share is the first's."""
    if "*" not in ours:
        yield "0"
        return
    pattern = re.compile(re.escape(ours).replace(r"\*", r"(\d+)") + r"(\.|$)")
    found = {match[1] for name in weights if (match := pattern.match(name))}
    yield from sorted(found, key=int)


def _full(family: Family, name: str) -> str:
    """With the prefix of the part inside, where there is something around it: hidden states alone have none."""
    inside = bool(family.starts) or (family.headed and name.startswith(INSIDE))
    return family.prefix + name if inside else name


def _check(family: Family, weights: Mapping[str, Tensor], made: Mapping[str, Tensor], where: str) -> None:
    """What was made, read as the importer reads it, must be what it was made of."""
    again: dict[str, Tensor] = {}
    for name, tensor in made.items():
        place = family.place(name)
        assert place is not None, name
        again |= place.fill(tensor)
    again = family.joined(again)
    for name, tensor in weights.items():
        if name not in again:
            if name == OUTPUT_BIAS and _silent(tensor):
                continue
            remedy = (
                "train it with training.freeze=[decoder.output.layer.bias]" if name == OUTPUT_BIAS else "--to onnx does"
            )
            raise InputError(f"{name} has no place in this architecture", where=where, remedy=remedy)
        if not torch.allclose(again[name], tensor, rtol=TOLERANCE, atol=0):
            raise InputError(
                f"{name} is one with another weight in this architecture, and differs from it here",
                where=where,
                remedy="tie them in training (tie: all), or use --to onnx",
            )


def _silent(bias: Tensor) -> bool:
    """No token is made likelier by it: it only keeps those that are never said from being said."""
    return bool((bias <= 0).all()) and not bool(((bias < 0) & (bias > -1e3)).any())
