"""Nothing enters; pairs of sentences that mean the same in other words leave, among many that nearly do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

from transduce.errors import InputError
from transduce.flow import Example

Ways = tuple[str, ...]  # the ways to say one thing: `a | b | c`


def _ways(*lines: str) -> tuple[Ways, ...]:
    return tuple(tuple(way.strip() for way in line.split("|")) for line in lines)


@dataclass(frozen=True)
class Topic:
    """Who does what to what, where and when."""

    people: tuple[Ways, ...]
    actions: tuple[Ways, ...]
    things: tuple[Ways, ...]
    places: tuple[Ways, ...]
    times: tuple[Ways, ...]

    @property
    def slots(self) -> tuple[tuple[Ways, ...], ...]:
        return self.people, self.actions, self.things, self.places, self.times


TOPICS = {
    "kitchen": Topic(
        _ways("the cook | a chef", "my mother | mum", "the baker | a pastry maker", "our guest | a visitor"),
        _ways("chops | cuts up", "burns | chars", "serves | dishes out", "tastes | samples"),
        _ways("the onions | some shallots", "the pie | a tart", "the soup | a broth", "the bread | a loaf"),
        _ways("in the kitchen | by the stove", "at the table | over dinner", "on the terrace | outside on the porch"),
        _ways(
            "at noon | for lunch",
            "after work | for supper",
            "every morning | for breakfast",
            "at christmas | for the feast",
        ),
    ),
    "office": Topic(
        _ways("the boss | our manager", "a clerk | the assistant", "the lawyer | an attorney", "a colleague | my peer"),
        _ways("signs | puts a name under", "loses | cannot find", "prints | makes a copy of", "checks | looks through"),
        _ways("the contract | an agreement", "the letter | a note", "the invoice | a bill", "the report | a summary"),
        _ways("at the office | at a desk", "in the meeting | before the board", "in the archive | among old files"),
        _ways(
            "on monday | as the week begins",
            "in time | before it is due",
            "too late | past the deadline",
            "each quarter | every three months",
        ),
    ),
    "sport": Topic(
        _ways(
            "the striker | a forward", "the goalkeeper | our keeper", "the coach | a trainer", "a fan | one supporter"
        ),
        _ways("kicks | shoots", "throws | hurls", "catches | grabs hold of", "misses | fails to reach"),
        _ways("the ball | a football", "the javelin | one spear", "the whistle | a pipe", "the medal | a trophy"),
        _ways("in the stadium | at the arena", "on the field | across the pitch", "in the gym | down at the hall"),
        _ways(
            "in the final | during the last match",
            "at half time | in the break",
            "in training | while warming up",
            "this season | in the league",
        ),
    ),
    "music": Topic(
        _ways(
            "the singer | a vocalist",
            "the pianist | a keyboard player",
            "my niece | a young girl",
            "the band | a group",
        ),
        _ways("plays | performs", "records | puts on tape", "practises | rehearses", "forgets | does not remember"),
        _ways("the song | a tune", "the sonata | one classical piece", "the march | a parade", "the hymn | a chorale"),
        _ways("on stage | before the crowd", "in the studio | behind glass", "in the church | under the organ"),
        _ways(
            "at the premiere | on opening night",
            "twice | two times over",
            "by heart | from memory",
            "much too fast | in a rush",
        ),
    ),
    "garden": Topic(
        _ways(
            "the gardener | a groundsman",
            "my grandfather | grandpa",
            "the farmer | a grower",
            "the neighbour | a man next door",
        ),
        _ways("waters | sprinkles", "plants | puts into the ground", "cuts down | fells", "picks | gathers"),
        _ways(
            "the roses | some flowers",
            "the apples | some ripe fruit",
            "the beans | some peas",
            "the hedge | a row of shrubs",
        ),
        _ways("in the garden | behind the house", "by the pond | at the water", "near the fence | along the wall"),
        _ways(
            "in spring | when it gets warm",
            "after the rain | once it is dry",
            "in autumn | as leaves fall",
            "before the frost | ahead of the cold",
        ),
    ),
    "travel": Topic(
        _ways(
            "the tourist | a traveller",
            "the pilot | an airman",
            "the driver | a chauffeur",
            "a student | one young scholar",
        ),
        _ways("books | reserves", "boards | gets on", "leaves | gets off", "photographs | takes a picture of"),
        _ways("the train | a railway carriage", "the ship | a ferry", "the plane | an aircraft", "the hotel | an inn"),
        _ways("in the mountains | high in the alps", "at the coast | along the shore", "at the border | by customs"),
        _ways(
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
    """`count` pairs of different meanings: no content word of the one sentence stands in the other.

    All slots are drawn from few fillers, so every sentence has many neighbours that differ from it in one slot.
    `extra` names the topic.
    """
    most = sum(prod(map(len, topic.slots)) for topic in TOPICS.values())
    if 4 * count > 3 * most:  # beyond, most draws would be known ones
        raise InputError(f"{count} different meanings asked for, but there are only {most}", remedy="ask for fewer")
    return islice(_draw(random.Random(seed)), count)


def _draw(chance: random.Random) -> Iterator[Example]:
    seen: set[tuple[Ways, ...]] = set()
    while True:
        name = chance.choice(list(TOPICS))
        meaning = tuple(chance.choice(ways) for ways in TOPICS[name].slots)
        if meaning in seen:
            continue
        seen.add(meaning)
        said = [chance.sample(ways, 2) for ways in meaning]
        one, other = (_sentence([ways[side] for ways in said], chance.choice(ORDERS)) for side in (0, 1))
        yield Example(one, other, {"topic": name})


def _sentence(parts: list[str], order: str) -> str:
    who, does, what, where, time = parts
    return order.format(who=who, does=does, what=what, where=where, time=time)
