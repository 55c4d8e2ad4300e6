"""Dates in several orders of their words, rewritten as year, month and day: attention finds the right words."""

from __future__ import annotations

import calendar
import random
from pathlib import Path

import pytest
from learning_fixtures import learn_examples

from transduce.explain.alignment import alignment_error_rate
from transduce.flow import Example

pytestmark = pytest.mark.slow
GRU = {"kind": "recurrent", "width": 64, "dropout": 0.0}
ORDERS = ("on {day} {month} {year}", "{month} {day} , {year}", "{year} {month} {day}", "the {day} of {month} {year}")
YEARS = range(1990, 2020)


def date(chance: random.Random) -> tuple[Example, set[tuple[int, int]]]:
    """A pair and its gold links (source word, target word)."""
    year, month, day = chance.choice(YEARS), chance.randrange(1, 13), chance.randrange(1, 29)
    words = {"year": str(year), "month": calendar.month_name[month].lower(), "day": f"{day}."}
    order = chance.choice(ORDERS)
    places = {part.strip("{}"): place for place, part in enumerate(order.split()) if part.startswith("{")}
    links = {(places[name], target) for target, name in enumerate(words)}
    return Example(order.format(**words), f"y{year} m{month} d{day}"), links


def test_attention_aligns_the_parts_of_a_date(tmp_path: Path) -> None:
    chance = random.Random(3)
    drawn = {pair.source: (pair, links) for pair, links in (date(chance) for _ in range(6000))}
    pairs = list(drawn.values())
    sets = [[pair for pair, _ in part] for part in (pairs[200:], pairs[:50], pairs[50:200])]
    decoder = {**GRU, "context": {"kind": "luong", "score": "mlp"}}
    trained = learn_examples(sets, GRU, decoder, 300, tmp_path, vocabulary=300)
    assert trained.scores["test"].scores["exact"].value >= 95
    found = trained.model.generate([one.source for one in sets[2]])
    predicted = {(number, *link) for number, output in enumerate(found) for link in output.alignment}
    gold = {(number, *link) for number, (_, links) in enumerate(pairs[50:200]) for link in links}
    assert alignment_error_rate(predicted, gold) <= 0.05
