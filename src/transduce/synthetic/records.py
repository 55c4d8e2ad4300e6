"""Data-to-text: attributes of invented restaurants, and sentences that verbalise them.

The attributes of a record appear in any order, and some are missing. A held-out record comes with all its reference
sentences, one per line.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping

from transduce.flow import Example
from transduce.synthetic.dataset import invented_name, is_held_out

VALUES = {
    "food": ("french", "indian", "thai", "greek", "polish", "vegan"),
    "area": ("centre", "harbour", "suburbs", "hills"),
    "price": ("cheap", "moderate", "expensive"),
    "view": ("river", "park", "market"),
}


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Names are held out, and combinations of food and area: training has both values, never together."""
    while True:
        record = {"name": invented_name(rng, held_out)}
        present = rng.sample(list(VALUES), rng.randint(2, len(VALUES)))
        record |= {slot: rng.choice(VALUES[slot]) for slot in present}
        combination_held_out = is_held_out(f"{record.get('food')} {record.get('area')}")
        if {"food", "area"} <= record.keys() and combination_held_out != held_out:
            continue
        slots = rng.sample(list(record), len(record))
        source = " ".join(f"{slot}[ {record[slot]} ]" for slot in slots)
        sentences = references(record)
        for target in sentences if held_out else [rng.choice(sentences)]:
            yield Example(source, target)


def references(record: Mapping[str, str]) -> list[str]:
    """Three correct sentences for a record."""
    name, price = record["name"], record.get("price", "")
    kind = " ".join(word for word in (price, record.get("food", ""), "restaurant") if word)
    food = f"serves {record['food']} food" if "food" in record else "is a restaurant"
    area = f" in the {record['area']}" if "area" in record else ""
    view = f" with a view of the {record['view']}" if "view" in record else ""
    near = f" near the {record['view']}" if "view" in record else ""
    costs = f" at {price} prices" if price else ""
    return [
        f"{name} is {_article(kind)} {kind}{area}{view} .",
        f"{name}{near} {food}{costs}{area} .",
        f"there is {_article(kind)} {kind}{area} called {name}{view} .",
    ]


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def missing_values(source: str, text: str) -> list[str]:
    """The values of a record that do not appear in a text."""
    words = text.split()
    return [value for value in re.findall(r"\[ (\S+) \]", source) if value not in words]
