"""The models that the laws are tested on: made from the shelves, so a new row is tested the day it appears."""

from __future__ import annotations

import torch

from transduce.attention.normalisers import NORMALISERS
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import SCORES
from transduce.build import build_model, complete_recipe
from transduce.decoders import DECODERS
from transduce.decoders.readers import READERS
from transduce.encoders import ENCODERS
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.layers.recurrent import CELLS
from transduce.recipe import parse

SIZE = 11  # of both vocabularies
WIDTH = 16
SMALL = {
    "recurrent": {"kind": "recurrent", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "transformer": {"kind": "transformer", "width": WIDTH, "layers": 2, "heads": 2, "hidden": 24, "dropout": 0.3},
}
SCORED_READERS = ("bahdanau", "luong")


def _cases() -> dict[str, dict]:
    cases: dict[str, dict] = {}

    def add(encoder: dict | None, decoder: dict, tie: str = "none") -> None:
        name = f"{_name(encoder)}>{_name(decoder)}" + ("" if tie == "none" else f"+tie-{tie}")
        shared = tie == "all" or encoder is None
        cases[name] = {
            "tokens": {"shared": shared},
            "model": {"encoder": encoder, "decoder": decoder, "tie": tie},
        }

    base_encoder, base_decoder = SMALL["recurrent"], SMALL["recurrent"]
    for encoder in ENCODERS:  # every encoder with every decoder, and every decoder alone
        for decoder in DECODERS:
            add(SMALL[encoder], SMALL[decoder])
            add(SMALL[encoder], SMALL[decoder], "target")
            add(SMALL[encoder], SMALL[decoder], "all")
    for decoder in DECODERS:
        add(None, SMALL[decoder])
    for cell in CELLS:
        for reader in READERS:
            add({**base_encoder, "cell": cell}, {**base_decoder, "cell": cell, "reader": reader})
        add(None, {**base_decoder, "cell": cell, "residual": True})
    for score in SCORES:
        for normaliser in NORMALISERS:
            part = {"score": score, "normaliser": normaliser}
            for reader in SCORED_READERS:
                add(base_encoder, {**base_decoder, "reader": {"kind": reader, **part}})
            add(base_encoder, {**SMALL["transformer"], **part})
        add({**SMALL["transformer"], "score": score}, base_decoder)
    add(base_encoder, {**base_decoder, "reader": {"kind": "luong", "input_feeding": False}})
    for options in ({"bidirectional": False}, {"bidirectional": False, "reverse": True}, {"residual": True}):
        add({**base_encoder, **options}, base_decoder)
    for position in POSITIONS:
        for norm in ("before", "after"):
            part = {"position": position, "norm": norm}
            add({**SMALL["transformer"], **part}, {**SMALL["transformer"], **part})
        add(None, {**SMALL["transformer"], "position": position})
    return cases


def _name(spec: dict | None) -> str:
    if spec is None:
        return "alone"
    parts = [spec["kind"]]
    for key, value in spec.items():
        if key in SMALL[spec["kind"]]:
            continue
        parts.append(f"{key}={'-'.join(map(str, value.values())) if isinstance(value, dict) else value}")
    return ",".join(parts)


CASES = _cases()


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    recipe = complete_recipe(parse(CASES[name]))
    return build_model(recipe.model, SIZE, SIZE).eval()


def example_batch(lengths: list[tuple[int, int]], seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def row(length: int) -> list[int]:
        return torch.randint(4, SIZE, (length,), generator=generator).tolist()

    sources = [[*row(source), EOS] for source, _ in lengths]
    targets = [[BOS, *row(target), EOS] for _, target in lengths]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets))
