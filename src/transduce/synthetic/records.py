"""Nothing enters; the attributes of invented restaurants leave, each record with sentences that say just that.

The attributes of a record stand in any order, and some are missing. A record that is held out comes with all ways of
saying it, one a line: several right answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping

from transduce.flow import Example
from transduce.synthetic.words import invent_name, is_held_out

VALUES = {
    "food": ("french", "indian", "thai", "greek", "polish", "vegan"),
    "area": ("centre", "harbour", "suburbs", "hills"),
    "price": ("cheap", "moderate", "expensive"),
    "view": ("river", "park", "market"),
}


def draw(chance: random.Random, held_out: bool) -> Iterator[Example]:
    """Held out are names, and food in an area: who trains has seen both, never together."""
    while True:
        record = {"name": invent_name(chance, held_out)}
        kept = chance.sample(list(VALUES), chance.randint(2, len(VALUES)))
        record |= {slot: chance.choice(VALUES[slot]) for slot in kept}
        met = is_held_out(f"{record.get('food')} {record.get('area')}")
        if {"food", "area"} <= record.keys() and met != held_out:
            continue
        slots = chance.sample(list(record), len(record))
        source = " ".join(f"{slot}[ {record[slot]} ]" for slot in slots)
        said = ways(record)
        for target in said if held_out else [chance.choice(said)]:
            yield Example(source, target)


def ways(record: Mapping[str, str]) -> list[str]:
    """Three right sentences for a record."""
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


def missing(source: str, text: str) -> list[str]:
    """The values of a record that a text does not say."""
    words = text.split()
    return [value for value in re.findall(r"\[ (\S+) \]", source) if value not in words]
