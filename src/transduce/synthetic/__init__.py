"""A name and a seed enter; the lines of an invented set leave, the same ones for the same seed.

What a set holds out (words, names, combinations) is told by the words themselves, never by the seed: whatever two
seeds made, nothing held out stands in a file to train on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.synthetic import dialogue, inflection, questions, records, summaries, transliteration

__all__ = ["SETS", "Made", "generate"]


@dataclass(frozen=True)
class Made:
    """An invented set: its lines, endless, and what they are."""

    about: str
    draw: Callable[[random.Random, bool], Iterator[Example]]  # chance, held out
    inputs: int = 1  # columns that make the source
    task: str = "generate"  # what `transduce train --task` calls it


SETS = {
    "transliteration": Made("Cyrillic words -> Latin letters", transliteration.draw, task="transliterate"),
    "inflection": Made("Turkish-like nouns TAB case and number -> their form", inflection.draw, 2, "inflect"),
    "summaries": Made("news of a few sentences -> one sentence", summaries.draw, task="summarise"),
    "questions": Made("who is where and has what TAB a question -> the answer", questions.draw, 2, "answer"),
    "dialogue": Made("five turns of booking a table -> the next turn", dialogue.draw, dialogue.TURNS, "converse"),
    "records": Made("attributes of a restaurant -> a sentence", records.draw, task="describe"),
}


def generate(name: str, count: int, seed: int = 1, *, held_out: bool = False) -> Iterator[Example]:
    """`count` different lines of a set; the parts of a source are parted by tabs."""
    if name not in SETS:
        raise InputError(f"no set is called {name!r}", remedy=nearest(name, SETS))
    return islice(_different(SETS[name].draw(random.Random(f"{name} {seed} {held_out}"), held_out)), count)


def _different(examples: Iterator[Example]) -> Iterator[Example]:
    seen: set[tuple[str, str | None]] = set()
    for one in examples:
        if (one.source, one.target) not in seen:
            seen.add((one.source, one.target))
            yield one
