"""Nothing enters; short stories of who went where and took what leave, each with a question and its answer.

The answer is a word of the story. Persons are invented, so a model that has not read the story cannot know them; and
persons move on, so only the latest news counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.words import invent_names

PLACES = ("kitchen", "garden", "cellar", "attic", "office", "hall")
THINGS = ("apple", "book", "lamp", "key", "letter", "coin")
MOVES = ("{who} went to the {place} .", "{who} is in the {place} .", "{who} walked into the {place} .")
TAKES = ("the {thing} belongs to {who} .", "the {thing} is with {who} .", "the {thing} was found by {who} .")


def draw(chance: random.Random, held_out: bool) -> Iterator[Example]:
    """Held out are persons. Two or three of them, each somewhere and with a thing; at most one moves on."""
    while True:
        people = invent_names(chance, held_out, chance.randint(2, 3))
        owned = dict(zip(people, chance.sample(THINGS, len(people)), strict=True))
        at = dict(zip(people, chance.sample(PLACES, len(people)), strict=True))
        sentences = [chance.choice(MOVES).format(who=who, place=at[who]) for who in people]
        sentences += [chance.choice(TAKES).format(who=who, thing=owned[who]) for who in people]
        chance.shuffle(sentences)
        for who in chance.sample(people, chance.randint(0, 1)):
            at[who] = chance.choice([place for place in PLACES if place not in at.values()])
            sentences.append(chance.choice(MOVES).format(who=who, place=at[who]))
        question, answer = _ask(chance, chance.choice(people), owned, at)
        yield Example(f"{' '.join(sentences)}\t{question}", answer)


def _ask(chance: random.Random, who: str, owned: dict[str, str], at: dict[str, str]) -> tuple[str, str]:
    questions = (
        (f"where is {who} ?", at[who]),
        (f"who has the {owned[who]} ?", who),
        (f"what does {who} have ?", owned[who]),
    )
    return chance.choice(questions)
