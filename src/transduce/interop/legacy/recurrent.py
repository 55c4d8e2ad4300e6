"""What the recurrent models of three toolkits share: names of cells, attention after the step, narrow embeddings."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Place

# `encoder.rnn.weight_ih_l1_reverse`, `decoder.rnn.layers.0.weight_ih`, `decoder.layers.0.weight_ih`
CELL = re.compile(
    r"(encoder|decoder)\.(?:rnn|lstm|layers|rnn\.layers)\.(?:(\d+)\.)?((?:weight|bias)_[ih]h)(?:_l(\d+))?(_reverse)?"
)
TABLE = {f"{side}.cells.*": f"{side}.stack.layers.*" for side in ("encoder", "decoder")}
SCORE, COMBINE = "decoder.context.attend.score", "decoder.context.combine"


def renamed(name: str) -> str:
    """The numbers of a cell under its layer; other names as they are."""
    found = CELL.fullmatch(name)
    if found is None:
        return name
    side, layer, leaf, last, reverse = found.groups()
    return f"{side}.cells.{layer or last or 0}.{leaf}_l0{reverse or ''}"


def turned(weight: Tensor) -> list[Tensor]:
    """Theirs is (P s) . h, ours s . (W h): W is P turned."""
    return [weight.T.contiguous()]


BILINEAR = Place((f"{SCORE}.weight.weight",), turned)


def parts(shared: dict[str, Any], encoder: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    """The two halves of a model recipe whose decoder attends with the state after each step (Luong 2015)."""
    return {
        "encoder": {"kind": "recurrent", **shared, **encoder},
        "decoder": {"kind": "recurrent", **shared, **decoder},
        "scale_embedding": False,
    }


def widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Embeddings narrower than the network get columns of zeros, and the first cells zeros to read them with."""
    result = dict(weights)
    for side in ("encoder", "decoder"):
        table, first = f"{side}.embedding.table.weight", f"{side}.stack.layers.0"
        inputs = [name for name in (f"{first}.weight_ih_l0", f"{first}.weight_ih_l0_reverse") if name in weights]
        if table not in weights or not inputs or f"{first}.weight_hh_l0" not in weights:
            continue  # what is missing is told later
        narrow, wide = weights[table].size(-1), weights[f"{first}.weight_hh_l0"].size(-1) * len(inputs)
        if narrow > wide:
            raise InputError(f"{table} has vectors of {narrow} numbers, and the network only {wide}")
        for name in (table, *inputs):
            given = weights[name]
            between = given.new_zeros(given.size(0), wide - narrow)
            result[name] = torch.cat((given[:, :narrow], between, given[:, narrow:]), -1)
    return result
