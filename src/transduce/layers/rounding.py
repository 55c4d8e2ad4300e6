"""A matrix in, whole numbers of 8 bits and one scale a row out; and the matrix that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

GREATEST = 127  # of an 8-bit weight
SCALES = "scales."  # before the name of a rounded matrix: the name of its scales


class Rounded(NamedTuple):
    whole: Tensor  # O I, int8
    scales: Tensor  # O


def round_rows(weight: Tensor) -> Rounded:
    """w = s round(w / s), s = max|w| / 127 for each row (Jacob 2018). What was rounded once stays as it is."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / GREATEST).clamp(min=torch.finfo(torch.float).tiny)
    return Rounded((weight / scales[:, None]).round().to(torch.int8), scales)


def rounded_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weights of a network, those of linear layers, embeddings and recurrent cells in whole numbers with scales."""
    kinds = (nn.Linear, nn.Embedding, nn.RNNBase)
    matrices = {
        parameter
        for part in network.modules()
        if isinstance(part, kinds)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    }
    places = {parameter.data_ptr() for parameter in matrices}
    found: dict[str, Tensor] = {}
    made: dict[int, Rounded] = {}  # what is tied is rounded once, and stays tied
    for name, tensor in network.state_dict().items():
        if tensor.dim() == 2 and tensor.data_ptr() in places:
            if tensor.data_ptr() not in made:
                made[tensor.data_ptr()] = round_rows(tensor)
            found[name], found[SCALES + name] = made[tensor.data_ptr()]
        else:
            found[name] = tensor
    return found


def whole_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the same names, every matrix in fp32."""
    found = {name: tensor for name, tensor in weights.items() if not name.startswith(SCALES)}
    for name, scales in weights.items():
        if name.startswith(SCALES):
            matrix = name.removeprefix(SCALES)
            found[matrix] = weights[matrix].float() * scales[:, None]
    return found
