"""Pairs of parts: every compatible pair keeps the laws, every other pair is refused with a message.

A row chooses a part for each place of a model. Rows that cover all pairs are found here, greedily and always the same;
which pairs are impossible follows from the few rules in `allowed`, and recipe/build.py must agree with them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest
import test_model_laws as laws
import torch
from contract_fixtures import READERS_ONLY, SIZE, SMALL, WITHOUT_CROSS_ATTENTION, example_batch, read

from transduce.attention.positions import POSITIONS
from transduce.attention.scores import NORMALISERS, SCORES
from transduce.decoders import DECODERS
from transduce.decoders.recurrent import CONTEXT_MECHANISMS
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.recipe import Recipe, parse
from transduce.recipe.build import build_model, complete_recipe

Row = tuple[str | None, ...]  # one value a place; None where the model has no such place
Pair = tuple[tuple[int, str], tuple[int, str]]
PLACES = ("encoder", "decoder", "context", "score", "normaliser", "position", "copy", "share")
ATTENDING = [name for name, part in CONTEXT_MECHANISMS.items() if part.has_attention]
PLACED = ("convolutional", "transformer")  # encoders and decoders that have positions
EMBEDDED = ("none", "sinusoidal", "learned")  # positions that need no self-attention
REMEMBERING = [name for name, part in SCORES.items() if part.stateful]


def rows() -> Iterator[Row]:
    """Every model that can be written down. Without an encoder only a Transformer attends: to its own past."""
    for encoder, decoder in product(("alone", *ENCODERS), DECODERS):
        read = decoder == "recurrent" and encoder != "alone"
        for reader in CONTEXT_MECHANISMS if read else (None,):
            attends = reader in ATTENDING or decoder == "transformer" or (decoder in PLACED and encoder != "alone")
            yield from product(
                (encoder,),
                (decoder,),
                (reader,),
                SCORES if attends else (None,),
                NORMALISERS if attends else (None,),
                POSITIONS if encoder in PLACED or decoder in PLACED else (None,),
                ("no", "yes"),
                ("none", "layers", "all"),
            )


def allowed(row: Row) -> bool:
    """The rules, all of them."""
    encoder, decoder, reader, score, normaliser, position, copying, share = row
    wanted = copying == "yes" or share != "none"
    if encoder == "alone" and wanted:
        return False  # both are between an encoder and a decoder
    if decoder != "recurrent" and (score in REMEMBERING or normaliser in READERS_ONLY):
        return False  # only a recurrent reader carries a past, or tells its draws
    if "convolutional" in (encoder, decoder) and position not in EMBEDDED:
        return False  # a convolution has no self-attention for positions to speak in
    if copying == "yes" and decoder in WITHOUT_CROSS_ATTENTION:
        return False  # no weights over the source alone
    if copying == "yes" and (reader in ("initial", "every_step") or normaliser == "sampled"):
        return False  # nothing is looked at, or it learns by reward alone
    same = encoder == decoder and decoder != "convolutional"  # whose weights have other names on the other side
    same = same or (encoder, decoder) == ("transformer", "prefix")  # the same layers
    places = {encoder, decoder} <= set(PLACED) and position == "learned"  # a table that any two may share
    return share == "none" or same or places


def pairs(row: Row) -> list[Pair]:
    return list(combinations([(place, part) for place, part in enumerate(row) if part is not None], 2))


def cover() -> tuple[list[Row], dict[Pair, Row]]:
    """Few rows with every allowed pair, and for every other pair a row that has no further fault, if there is one."""
    chance = random.Random(1)
    known: dict[Pair, list[Row]] = {}
    wrong: dict[Pair, list[Row]] = {}
    for row in rows():
        found = known if allowed(row) else wrong
        for pair in pairs(row):
            found.setdefault(pair, []).append(row)
    left, chosen = dict.fromkeys(known), []
    while left:
        candidates = known[next(iter(left))]
        few = chance.sample(candidates, min(30, len(candidates)))
        best = max(few, key=lambda row: sum(pair in left for pair in pairs(row)))
        chosen.append(best)
        for pair in pairs(best):
            left.pop(pair, None)
    impossible = [pair for pair in wrong if pair not in known]
    faults = {pair: set(impossible) - {pair} for pair in impossible}
    least = {
        pair: min(chance.sample(wrong[pair], min(30, len(wrong[pair]))), key=lambda row: _count(row, faults[pair]))
        for pair in impossible
    }
    return chosen, least


def _count(row: Row, faults: set[Pair]) -> int:
    return sum(pair in faults for pair in pairs(row))


def recipe_of(row: Row) -> dict:
    encoder, decoder, reader, score, normaliser, position, copying, share = row
    parts = {} if score is None else {"score": score, "normaliser": normaliser}
    reading = {**SMALL[decoder]}
    if reader is not None:
        reading["context"] = {"kind": reader, **parts}
    elif decoder in PLACED:
        reading |= {**parts, "position": position}
    writing = None if encoder == "alone" else {**SMALL[encoder]}
    if encoder in PLACED:
        writing["position"] = position
    elif encoder == "recurrent" and share != "none":
        writing["bidirectional"] = False
    model = {"encoder": writing, "decoder": reading, "share": share, "copy": {} if copying == "yes" else None}
    objective = "reinforce" if normaliser == "sampled" and reader in ATTENDING else "cross_entropy"
    return {"tokens": {"shared": True}, "model": model, "training": {"objective": {"kind": objective}}}


def complete(row: Row) -> Recipe:
    return complete_recipe(parse(recipe_of(row)))


def name_of(row: Row) -> str:
    return "-".join(part or "" for part in row)


CHOSEN, IMPOSSIBLE = cover()


@pytest.mark.parametrize("row", CHOSEN, ids=name_of)
def test_compatible_pairs_obey_the_laws(row):
    torch.manual_seed(1)
    model, batch = build_model(complete(row).model, SIZE, SIZE).eval(), example_batch([(5, 3), (2, 4), (7, 1), (1, 2)])
    reading = read(model, batch)
    laws.test_whole_sequence_equals_stepwise(model, batch, reading)
    laws.test_logits_do_not_depend_on_later_tokens(model, batch, reading)
    laws.test_logits_do_not_depend_on_padding(model, batch, reading)
    laws.test_attention_rows_sum_to_one_and_respect_the_mask(model, batch, reading)
    laws.test_beams_share_the_fixed_state(model, batch, reading)


@pytest.mark.parametrize(
    "pair", IMPOSSIBLE, ids=lambda pair: "-".join(f"{PLACES[place]}={part}" for place, part in pair)
)
def test_incompatible_pairs_raise_input_errors_with_a_remedy(pair):
    refused(recipe_of(IMPOSSIBLE[pair]))


def refused(recipe: dict) -> None:
    with pytest.raises(InputError) as raised:
        complete_recipe(parse(recipe))
    assert raised.value.remedy
    assert raised.value.where


def test_compatibility_rules_match_build():
    """Of a hundred rows drawn at random build makes those that the rules allow, and refuses the others."""
    every = list(rows())
    for row in random.Random(2).sample(every, 100):
        if allowed(row):
            complete(row)
        else:
            refused(recipe_of(row))


@pytest.mark.parametrize(
    ("decoder", "place", "option"),
    [
        *((kind, "decoder", {"context": "luong"}) for kind in PLACED),
        ("recurrent", "decoder", {"position": "rotary"}),
        *(
            ("recurrent", "context", {"kind": kind, "score": "dot"})
            for kind in CONTEXT_MECHANISMS
            if kind not in ATTENDING
        ),
        *(
            ("recurrent", "context", {"kind": kind, "normaliser": "softmax"})
            for kind in CONTEXT_MECHANISMS
            if kind not in ATTENDING
        ),
        ("recurrent", "encoder", {"position": "rotary"}),
        ("recurrent", "encoder", {"score": "dot"}),
    ],
)
def test_misplaced_part_raises_an_input_error(decoder, place, option):
    encoder = {**SMALL["recurrent"], **(option if place == "encoder" else {})}
    reading = {**SMALL[decoder], **(option if place == "decoder" else {})}
    if place == "context":
        reading["context"] = option
    refused({"model": {"encoder": encoder, "decoder": reading}})


def test_every_pair_is_covered():
    """By count: allowed and impossible pairs are all the pairs there are."""
    every = {pair for row in rows() for pair in pairs(row)}
    covered = {pair for row in CHOSEN for pair in pairs(row)}
    assert covered | set(IMPOSSIBLE) == every
    assert not covered & set(IMPOSSIBLE)
    assert all(allowed(row) for row in CHOSEN)
