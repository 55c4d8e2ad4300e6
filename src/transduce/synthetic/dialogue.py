"""Dialogues in which a guest books a table: the turns so far, and the next turn of the host.

The host needs four values: number of people, day, time, name. The guest gives some of them in the first turn; the
host asks for the first missing one, and once all are known repeats them all, some of which were given two or four
turns earlier. In the last turn the guest may choose another day: the latest value counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from transduce.flow import Example
from transduce.synthetic.dataset import invented_name

TURNS = 5  # in a source, the oldest first; empty before the first turn
PEOPLE = ("two", "three", "four", "five", "six")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
TIMES = ("five", "six", "seven", "eight", "nine")
QUESTIONS = {
    "people": "how many people ?",
    "day": "for which day ?",
    "time": "at what time ?",
    "name": "under which name ?",
}
STATEMENTS = {
    "people": ("for {people}", "we are {people}"),
    "day": ("on {day}", "{day} it is"),
    "time": ("at {time} o'clock", "at {time}"),
    "name": ("under {name}", "my name is {name}"),
}
OPENINGS = ("good evening , a table please ,", "hello , i would like to come ,", "is there a table ,")
CONFIRMATION = "a table for {people} on {day} at {time} for {name} , see you then ."


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Names are held out. Every turn of the host is an example; a dialogue has at most three of them."""
    while True:
        wanted = {
            "people": rng.choice(PEOPLE),
            "day": rng.choice(DAYS),
            "time": rng.choice(TIMES),
            "name": invented_name(rng, held_out),
        }
        yield from _dialogue(rng, wanted)


def _dialogue(rng: random.Random, wanted: dict[str, str]) -> Iterator[Example]:
    first = rng.sample(list(QUESTIONS), rng.randint(2, 3))
    turns = [" ".join((rng.choice(OPENINGS), _statement(rng, first, wanted), "."))]
    missing = [slot for slot in QUESTIONS if slot not in first]
    while missing:
        slot, *missing = missing
        yield _example(turns, QUESTIONS[slot])
        answer = [_statement(rng, [slot], wanted)]
        if slot != "day" and not missing and rng.random() < 0.3:
            wanted = {**wanted, "day": rng.choice([day for day in DAYS if day != wanted["day"]])}
            answer.append(f"and better on {wanted['day']}")
        turns += [QUESTIONS[slot], " ".join((*answer, "."))]
    yield _example(turns, CONFIRMATION.format(**wanted))


def _statement(rng: random.Random, slots: list[str], wanted: Mapping[str, str]) -> str:
    return " , ".join(rng.choice(STATEMENTS[slot]) for slot in slots).format(**wanted)


def _example(turns: list[str], answer: str) -> Example:
    return Example("\t".join([""] * (TURNS - len(turns)) + turns), answer)
