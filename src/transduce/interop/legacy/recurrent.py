"""Recurrent models of legacy toolkits: names of cells, attention after the step, narrow embeddings."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Content, TensorMap, Weights

# `encoder.rnn.weight_ih_l1_reverse`, `decoder.rnn.layers.0.weight_ih`, `decoder.layers.0.weight_ih`
CELL = re.compile(
    r"(encoder|decoder)\.(?:rnn|lstm|layers|rnn\.layers)\.(?:(\d+)\.)?((?:weight|bias)_[ih]h)(?:_l(\d+))?(_reverse)?"
)
MODULES = {f"{side}.cells.*": f"{side}.rnn.layers.*" for side in ("encoder", "decoder")}
SCORE, COMBINE = "decoder.context.attend.score", "decoder.context.combine"


def rename_cell(name: str) -> str:
    """Weights of a cell under the number of its layer; other names unchanged."""
    found = CELL.fullmatch(name)
    if found is None:
        return name
    side, layer, leaf, last, reverse = found.groups()
    return f"{side}.cells.{layer or last or 0}.{leaf}_l0{reverse or ''}"


def transpose(weight: Tensor) -> list[Tensor]:
    """Their score is (P s) . h, the native one s . (W h): W is P transposed."""
    return [weight.T.contiguous()]


BILINEAR = TensorMap((f"{SCORE}.k_proj.weight",), transpose)


def sections(shared: Content, encoder: Content, decoder: Content) -> Content:
    """Model section of a recipe whose decoder attends with the state after each step (Luong et al., 2015)."""
    return {
        "encoder": {"kind": "recurrent", **shared, **encoder},
        "decoder": {"kind": "recurrent", **shared, **decoder},
        "scale_embedding": False,
    }


def widen_embeddings(weights: Weights) -> Weights:
    """Pads embeddings narrower than the network with zero columns, and the input weights of the first cells."""
    result = dict(weights)
    for side in ("encoder", "decoder"):
        table, first = f"{side}.embedding.weight", f"{side}.rnn.layers.0"
        inputs = [name for name in (f"{first}.weight_ih_l0", f"{first}.weight_ih_l0_reverse") if name in weights]
        if table not in weights or not inputs or f"{first}.weight_hh_l0" not in weights:
            continue  # missing weights are reported later
        narrow, wide = weights[table].size(-1), weights[f"{first}.weight_hh_l0"].size(-1) * len(inputs)
        if narrow > wide:
            raise InputError(f"{table} has width {narrow}, but the network only {wide}")
        for name in (table, *inputs):
            given = weights[name]
            padding = given.new_zeros(given.size(0), wide - narrow)
            result[name] = torch.cat((given[:, :narrow], padding, given[:, narrow:]), -1)
    return result
