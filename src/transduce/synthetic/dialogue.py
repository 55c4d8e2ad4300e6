"""Nothing enters; talks between a guest who wants a table and the host leave: the turns so far, and what the host says.

The host needs four things: how many, which day, what time, which name. The guest says some of them in the first
turn; the host asks for the first that is missing, and when none is, says all of them, some of which were told two or
four turns before. In the last turn the guest may choose another day: the latest word counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from transduce.flow import Example
from transduce.synthetic.words import invent_name

TURNS = 5  # that a source holds, the oldest first; empty before the talk began
PEOPLE = ("two", "three", "four", "five", "six")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
TIMES = ("five", "six", "seven", "eight", "nine")
ASKED = {
    "people": "how many people ?",
    "day": "for which day ?",
    "time": "at what time ?",
    "name": "under which name ?",
}
SAID = {
    "people": ("for {people}", "we are {people}"),
    "day": ("on {day}", "{day} it is"),
    "time": ("at {time} o'clock", "at {time}"),
    "name": ("under {name}", "my name is {name}"),
}
OPENINGS = ("good evening , a table please ,", "hello , i would like to come ,", "is there a table ,")
BOOKED = "a table for {people} on {day} at {time} for {name} , see you then ."


def draw(chance: random.Random, held_out: bool) -> Iterator[Example]:
    """Held out are names. Every turn of the host is an example; a talk has at most three of them."""
    while True:
        wanted = {
            "people": chance.choice(PEOPLE),
            "day": chance.choice(DAYS),
            "time": chance.choice(TIMES),
            "name": invent_name(chance, held_out),
        }
        yield from _talk(chance, wanted)


def _talk(chance: random.Random, wanted: dict[str, str]) -> Iterator[Example]:
    first = chance.sample(list(ASKED), chance.randint(2, 3))
    turns = [" ".join((chance.choice(OPENINGS), _say(chance, first, wanted), "."))]
    missing = [slot for slot in ASKED if slot not in first]
    while missing:
        slot, *missing = missing
        yield _example(turns, ASKED[slot])
        answer = [_say(chance, [slot], wanted)]
        if slot != "day" and not missing and chance.random() < 0.3:
            wanted = {**wanted, "day": chance.choice([day for day in DAYS if day != wanted["day"]])}
            answer.append(f"and better on {wanted['day']}")
        turns += [ASKED[slot], " ".join((*answer, "."))]
    yield _example(turns, BOOKED.format(**wanted))


def _say(chance: random.Random, slots: list[str], wanted: Mapping[str, str]) -> str:
    return " , ".join(chance.choice(SAID[slot]) for slot in slots).format(**wanted)


def _example(turns: list[str], answer: str) -> Example:
    return Example("\t".join([""] * (TURNS - len(turns)) + turns), answer)
