"""Claims about order and asymmetry of self-attention: what positions and projections add to it."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.attention.positions import POSITIONS
from transduce.attention.self_attention import SelfAttention
from transduce.claims.claim import (
    LAYERS,
    TRANSFORMER,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    untrained,
)
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Padded
from transduce.model import EncoderDecoder

LENGTH, SOURCES = 12, 4
EXACT = 1e-10  # in double precision


def shuffle_error(position: str, seed: int) -> float:
    """The largest change when a shuffled source is encoded and its memory put back in order, relative to the memory.

    0: shuffled input gives shuffled output.
    """
    model = untrained({**TRANSFORMER, "encoder": {**LAYERS, "position": position}}, seed)
    assert isinstance(model, EncoderDecoder)
    encoder = model.encoder.double()
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 30, (SOURCES, LENGTH), generator=chance)
    order = torch.randperm(LENGTH, generator=chance)
    with torch.no_grad():
        memory, shuffled = (encoder(Batch(Padded(rows, rows > 0))).values for rows in (ids, ids[:, order]))
    return float((shuffled - memory[:, order]).abs().max() / memory.abs().max())


def measure_order(budget: Budget) -> Measurement:
    errors = {name: shuffle_error(name, budget.seed) for name in POSITIONS}
    rows = [(name, error, error <= EXACT) for name, error in errors.items()]
    others = {name: error for name, error in errors.items() if name != "none"}
    least = min(others.values())
    checks = [
        Check(
            "without positions, shuffled input gives shuffled output exactly",
            errors["none"] <= EXACT,
            {"largest difference": errors["none"], "limit": EXACT},
        ),
        Check(
            "with every position encoding it does not", least > 1e-4, {"smallest of the differences": least} | others
        ),
    ]
    shown = [max(error, 1e-17) for error in errors.values()]
    panel = Panel(
        "Encoding a shuffled source", "position encoding", "difference", [Series("", list(errors), shown)], "bar"
    )
    table = ClaimTable("", ["position encoding", "relative difference", "order is invisible"], rows)
    return Measurement([table], [Panel(**{**vars(panel), "log_y": True})], checks)


def relevance(projections: str, seed: int, *, tied: bool = False) -> Tensor:
    """The scores e_ij of a self-attention layer for random rows, T T; `tied`: the query projection is that of keys."""
    model = untrained({**TRANSFORMER, "encoder": {**LAYERS, "heads": 1, "projections": projections}}, seed)
    assert isinstance(model, EncoderDecoder)
    assert isinstance(model.encoder, TransformerEncoder)
    attention = model.encoder.layers[0].self_attention.double()
    assert isinstance(attention, SelfAttention)
    if tied:
        attention.q_proj = attention.k_proj
    rows = torch.randn(1, LENGTH, LAYERS["width"], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        query, keys, _ = attention.queries_keys_values(rows)
        scores: Tensor = attention.attend.score(query, keys)
    return scores[0, 0]


def asymmetry(scores: Tensor) -> float:
    """|E - E'| / |E|: 0 for a symmetric matrix, about 1.4 for one without any symmetry."""
    return float((scores - scores.T).norm() / scores.norm())


def measure_asymmetry(budget: Budget) -> Measurement:
    variants = {
        "no projections": relevance("none", budget.seed),
        "one projection for queries and keys": relevance("all", budget.seed, tied=True),
        "query and key projections": relevance("all", budget.seed),
    }
    found = {name: asymmetry(scores) for name, scores in variants.items()}
    bare, tied, separate = found.values()
    checks = [
        Check("without projections relevance is symmetric", bare <= EXACT, {"asymmetry": bare, "limit": EXACT}),
        Check("with one shared projection it is symmetric too", tied <= EXACT, {"asymmetry": tied, "limit": EXACT}),
        Check("with separate projections it is not", separate > 0.5, {"asymmetry": separate, "limit": 0.5}),
    ]
    places = [str(place) for place in range(1, LENGTH + 1)]
    panels = [
        Panel(name, "key", "query", _matrix(scores, places), "heat")
        for name, scores in variants.items()
        if name != "one projection for queries and keys"
    ]
    table = ClaimTable("", ["self-attention", "asymmetry |E - E'| / |E|"], list(found.items()))
    return Measurement([table], panels, checks)


def _matrix(scores: Tensor, places: list[str]) -> list[Series]:
    shifted = scores - scores.min()  # the scale of a heat map begins at 0
    return [Series(place, places, row.tolist()) for place, row in zip(places, shifted, strict=True)]


ORDER = Claim(
    "order",
    "Self-attention without position encodings does not see the order of its input.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.5",
    "A Transformer encoder of two layers, untrained, in double precision, encodes a source and a shuffled copy of it. "
    "The memory of the copy is put back in order and compared with the memory of the source, for every position "
    "encoding of the registry.",
    measure_order,
)
ASYMMETRY = Claim(
    "asymmetry",
    "Separate projections of queries and keys make relevance asymmetric: a word may need one that does not need it.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.2.1",
    "The matrix E of scores between the rows of one self-attention layer, untrained, in double precision, is compared "
    "with its transpose: without projections (e = x_i . x_j), with one projection for queries and keys, and with two.",
    measure_asymmetry,
)
