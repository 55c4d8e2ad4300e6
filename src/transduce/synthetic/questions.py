"""Reading comprehension: short stories of who went where and took what, each with a question and its answer.

The answer is a word of the story. Persons are invented, so the answer cannot be known without the story. Persons may
move, so only the latest sentence about a place counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.dataset import invented_names

PLACES = ("kitchen", "garden", "cellar", "attic", "office", "hall")
THINGS = ("apple", "book", "lamp", "key", "letter", "coin")
MOVES = ("{who} went to the {place} .", "{who} is in the {place} .", "{who} walked into the {place} .")
TAKES = ("the {thing} belongs to {who} .", "the {thing} is with {who} .", "the {thing} was found by {who} .")


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Persons are held out. Two or three persons, each in a place and with an object; at most one moves."""
    while True:
        people = invented_names(rng, held_out, rng.randint(2, 3))
        owned = dict(zip(people, rng.sample(THINGS, len(people)), strict=True))
        at = dict(zip(people, rng.sample(PLACES, len(people)), strict=True))
        sentences = [rng.choice(MOVES).format(who=who, place=at[who]) for who in people]
        sentences += [rng.choice(TAKES).format(who=who, thing=owned[who]) for who in people]
        rng.shuffle(sentences)
        for who in rng.sample(people, rng.randint(0, 1)):
            at[who] = rng.choice([place for place in PLACES if place not in at.values()])
            sentences.append(rng.choice(MOVES).format(who=who, place=at[who]))
        question, answer = _question(rng, rng.choice(people), owned, at)
        yield Example(f"{' '.join(sentences)}\t{question}", answer)


def _question(rng: random.Random, who: str, owned: dict[str, str], at: dict[str, str]) -> tuple[str, str]:
    questions = (
        (f"where is {who} ?", at[who]),
        (f"who has the {owned[who]} ?", who),
        (f"what does {who} have ?", owned[who]),
    )
    return rng.choice(questions)
