"""Chance enters; pictures of coloured shapes leave, each with a question about it and the answer.

A picture does not tell which question was asked, and a question does not tell the answer: whether and how many are
asked for with every answer equally often, and colours and shapes are what chance made them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product

from transduce.synthetic.files import Filed
from transduce.synthetic.shapes import COLOURS, KINDS, SIZE, Shape, paint, place_shapes, relation

Asked = tuple[str, str, list[Shape]]  # question, answer, the shapes that it is about
COLUMNS = ("left", "middle", "right")
RELATIONS = ("left of", "right of", "above", "below")


def _one_of(shapes: list[Shape], part: str, value: str) -> bool:
    return sum(getattr(shape, part) == value for shape in shapes) == 1


def _colours(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    """Of a shape that stands there once."""
    alone = [shape for shape in shapes if _one_of(shapes, "kind", shape.kind)]
    return [(f"what colour is the {shape.kind} ?", shape.colour, [shape]) for shape in alone]


def _kinds(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    alone = [shape for shape in shapes if _one_of(shapes, "colour", shape.colour)]
    return [(f"which shape is {shape.colour} ?", shape.kind, [shape]) for shape in alone]


def _columns(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    """Of three side by side: the colour of one, by its place."""
    if len({shape.colour for shape in shapes}) < len(COLUMNS):
        return []
    places = zip(COLUMNS, shapes, strict=True)
    return [(f"what colour is the {place} shape ?", shape.colour, [shape]) for place, shape in places]


def _beside(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    """The colour of the only shape that stands so to another one."""
    found = []
    for other, how in product(shapes, RELATIONS):
        there = [shape for shape in shapes if shape is not other and relation(shape, other) == how]
        if len(there) == 1 and _one_of(shapes, "kind", other.kind):
            found.append((f"what colour is the shape {how} the {other.kind} ?", there[0].colour, [there[0]]))
    return found


def _counts(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    """Every number that can be answered is answered equally often."""
    wholes = [("colour", value) for value in COLOURS] + [("kind", value) for value in KINDS]
    having = {whole: [shape for shape in shapes if getattr(shape, whole[0]) == whole[1]] for whole in wholes}
    number = chance.choice(sorted({len(found) for found in having.values()}))
    fitting = [(whole, found) for whole, found in having.items() if len(found) == number]
    (part, value), found = chance.choice(fitting)
    return [(f"how many {value} shapes ?" if part == "colour" else f"how many {value}s ?", str(number), found)]


def _there(chance: random.Random, shapes: list[Shape]) -> list[Asked]:
    """Yes and no equally often: a no is a yes with another relation."""
    unlike = [(one, other) for one, other in permutations(shapes, 2) if one.kind != other.kind]
    if not unlike:
        return []
    one, other = chance.choice(unlike)
    told, yes = f"{relation(one, other)} the {other.kind}", chance.random() < 0.5
    if not yes:
        stand = {relation(a, b) for a, b in permutations(shapes, 2) if (a.kind, b.kind) == (one.kind, other.kind)}
        told = f"{chance.choice([how for how in RELATIONS if how not in stand])} the {other.kind}"
    return [(f"is there a {one.kind} {told} ?", "yes" if yes else "no", [one, other])]


Ask = Callable[[random.Random, list[Shape]], list[Asked]]


def _side_by_side(chance: random.Random, held_out: bool) -> list[Shape]:
    """A shape in each third of the picture, high or low."""
    third, placed = SIZE // len(COLUMNS), []
    for column, shape in enumerate(place_shapes(chance, len(COLUMNS), held_out=held_out)):
        side = chance.randint(14, 18)
        left, top = column * third + chance.randint(1, third - side - 1), chance.randint(1, SIZE - side - 1)
        placed.append(replace(shape, box=(left, top, left + side, top + side)))
    return placed


def _anywhere(chance: random.Random, held_out: bool) -> list[Shape]:
    return place_shapes(chance, chance.randint(2, 3), held_out=held_out)


def _draw(
    chance: random.Random,
    held_out: bool,
    place: Callable[[random.Random, bool], list[Shape]],
    asks: tuple[Ask, ...],
) -> Iterator[Filed]:
    while True:
        shapes = place(chance, held_out)
        possible = chance.choice(asks)(chance, shapes)
        if possible:
            question, answer, about = chance.choice(possible)
            truth = {"boxes": [shape.box for shape in about]}
            yield Filed(question, answer, {"png": paint(shapes)}, truth)


def draw_looks(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """Three shapes side by side, in three colours: which colour has the one in this place. Learned in a minute."""
    return _draw(chance, held_out, _side_by_side, (_columns,))


def draw_scenes(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """Two or three shapes, and every kind of question."""
    return _draw(chance, held_out, _anywhere, (_colours, _kinds, _beside, _counts, _there))
