"""Paraphrases: pairs of sentences with the same meaning and no content word in common."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

Synonyms = tuple[str, ...]  # expressions of one meaning: `a | b | c`


def _synonyms(*lines: str) -> tuple[Synonyms, ...]:
    return tuple(tuple(expression.strip() for expression in line.split("|")) for line in lines)


@dataclass(frozen=True)
class Topic:
    """The fillers of the five slots of a sentence: who does what to what, where and when."""

    people: tuple[Synonyms, ...]
    actions: tuple[Synonyms, ...]
    things: tuple[Synonyms, ...]
    places: tuple[Synonyms, ...]
    times: tuple[Synonyms, ...]

    @property
    def slots(self) -> tuple[tuple[Synonyms, ...], ...]:
        return self.people, self.actions, self.things, self.places, self.times


TOPICS = {
    "kitchen": Topic(
        _synonyms("the cook | a chef", "my mother | mum", "the baker | a pastry maker", "our guest | a visitor"),
        _synonyms("chops | cuts up", "burns | chars", "serves | dishes out", "tastes | samples"),
        _synonyms("the onions | some shallots", "the pie | a tart", "the soup | a broth", "the bread | a loaf"),
        _synonyms(
            "in the kitchen | by the stove", "at the table | over dinner", "on the terrace | outside on the porch"
        ),
        _synonyms(
            "at noon | for lunch",
            "after work | for supper",
            "every morning | for breakfast",
            "at christmas | for the feast",
        ),
    ),
    "office": Topic(
        _synonyms(
            "the boss | our manager", "a clerk | the assistant", "the lawyer | an attorney", "a colleague | my peer"
        ),
        _synonyms(
            "signs | puts a name under", "loses | cannot find", "prints | makes a copy of", "checks | looks through"
        ),
        _synonyms(
            "the contract | an agreement", "the letter | a note", "the invoice | a bill", "the report | a summary"
        ),
        _synonyms("at the office | at a desk", "in the meeting | before the board", "in the archive | among old files"),
        _synonyms(
            "on monday | as the week begins",
            "in time | before it is due",
            "too late | past the deadline",
            "each quarter | every three months",
        ),
    ),
    "sport": Topic(
        _synonyms(
            "the striker | a forward", "the goalkeeper | our keeper", "the coach | a trainer", "a fan | one supporter"
        ),
        _synonyms("kicks | shoots", "throws | hurls", "catches | grabs hold of", "misses | fails to reach"),
        _synonyms("the ball | a football", "the javelin | one spear", "the whistle | a pipe", "the medal | a trophy"),
        _synonyms("in the stadium | at the arena", "on the field | across the pitch", "in the gym | down at the hall"),
        _synonyms(
            "in the final | during the last match",
            "at half time | in the break",
            "in training | while warming up",
            "this season | in the league",
        ),
    ),
    "music": Topic(
        _synonyms(
            "the singer | a vocalist",
            "the pianist | a keyboard player",
            "my niece | a young girl",
            "the band | a group",
        ),
        _synonyms("plays | performs", "records | puts on tape", "practises | rehearses", "forgets | does not remember"),
        _synonyms(
            "the song | a tune", "the sonata | one classical piece", "the march | a parade", "the hymn | a chorale"
        ),
        _synonyms("on stage | before the crowd", "in the studio | behind glass", "in the church | under the organ"),
        _synonyms(
            "at the premiere | on opening night",
            "twice | two times over",
            "by heart | from memory",
            "much too fast | in a rush",
        ),
    ),
    "garden": Topic(
        _synonyms(
            "the gardener | a groundsman",
            "my grandfather | grandpa",
            "the farmer | a grower",
            "the neighbour | a man next door",
        ),
        _synonyms("waters | sprinkles", "plants | puts into the ground", "cuts down | fells", "picks | gathers"),
        _synonyms(
            "the roses | some flowers",
            "the apples | some ripe fruit",
            "the beans | some peas",
            "the hedge | a row of shrubs",
        ),
        _synonyms("in the garden | behind the house", "by the pond | at the water", "near the fence | along the wall"),
        _synonyms(
            "in spring | when it gets warm",
            "after the rain | once it is dry",
            "in autumn | as leaves fall",
            "before the frost | ahead of the cold",
        ),
    ),
    "travel": Topic(
        _synonyms(
            "the tourist | a traveller",
            "the pilot | an airman",
            "the driver | a chauffeur",
            "a student | one young scholar",
        ),
        _synonyms("books | reserves", "boards | gets on", "leaves | gets off", "photographs | takes a picture of"),
        _synonyms(
            "the train | a railway carriage", "the ship | a ferry", "the plane | an aircraft", "the hotel | an inn"
        ),
        _synonyms(
            "in the mountains | high in the alps", "at the coast | along the shore", "at the border | by customs"
        ),
        _synonyms(
            "on holiday | in august",
            "with a backpack | carrying next to nothing",
            "without a ticket | having paid no fare",
            "by night | while others sleep",
        ),
    ),
}
ORDERS = (
    "{time} {who} {does} {what} {where}",
    "{where} {who} {does} {what} {time}",
    "{who} {does} {what} {time} {where}",
)


def generate(count: int, seed: int = 1) -> Iterator[Example]:
    """`count` pairs with distinct meanings; `extra` names the topic.

    Each slot has few fillers, so every sentence has many neighbours that differ from it in one slot.
    """
    total = sum(prod(map(len, topic.slots)) for topic in TOPICS.values())
    if 4 * count > 3 * total:  # beyond this most samples would be repetitions
        raise InputError(f"{count} distinct meanings requested, but there are only {total}", remedy="request fewer")
    return islice(_sample(random.Random(seed)), count)


def generate_split(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Every pair of one part of the split, in random order; meanings are held out."""
    meanings = [(name, meaning) for name, topic in TOPICS.items() for meaning in product(*topic.slots)]
    part = [one for one in meanings if is_held_out(" ".join(slot[0] for slot in one[1])) == held_out]
    rng.shuffle(part)
    return (_pair(rng, name, meaning) for name, meaning in part)


def _sample(rng: random.Random) -> Iterator[Example]:
    seen: set[tuple[Synonyms, ...]] = set()
    while True:
        name = rng.choice(list(TOPICS))
        meaning = tuple(rng.choice(fillers) for fillers in TOPICS[name].slots)
        if meaning in seen:
            continue
        seen.add(meaning)
        yield _pair(rng, name, meaning)


def _pair(rng: random.Random, topic: str, meaning: Sequence[Synonyms]) -> Example:
    chosen = [rng.sample(synonyms, 2) for synonyms in meaning]
    one, other = (_sentence([pair[side] for pair in chosen], rng.choice(ORDERS)) for side in (0, 1))
    return Example(one, other, {"topic": topic})


def _sentence(parts: list[str], order: str) -> str:
    who, does, what, where, time = parts
    return order.format(who=who, does=does, what=what, where=where, time=time)
