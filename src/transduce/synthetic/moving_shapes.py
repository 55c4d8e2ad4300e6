"""Chance enters; films of one shape that moves, grows or shrinks leave, with what can be said of them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import product

from transduce.modalities.video.files import write_animation
from transduce.synthetic.files import Filed
from transduce.synthetic.shapes import COLOURS, KINDS, Shape, sketch
from transduce.synthetic.words import is_held_out

SIZE = 32  # pixels of a side
FRAMES = 8
MOVES = {"moves left": (-1, 0), "moves right": (1, 0), "moves up": (0, -1), "moves down": (0, 1)}
ACTIONS = (*MOVES, "grows", "shrinks")


def _boxes(chance: random.Random, action: str) -> list[tuple[int, int, int, int]]:
    """Where the shape stands in each frame. The middle of its way may lie anywhere, so no one frame tells it."""
    if action in MOVES:
        across, down = MOVES[action]
        side, step = chance.randint(8, 11), chance.choice((1, 2))
        way = step * (FRAMES - 1)
        left = chance.randint(1, SIZE - side - 1 - way * abs(across)) + way * (across < 0)
        top = chance.randint(1, SIZE - side - 1 - way * abs(down)) + way * (down < 0)
        begins = [(left + step * time * across, top + step * time * down) for time in range(FRAMES)]
        return [(x, y, x + side, y + side) for x, y in begins]
    small = chance.randint(3, 5)  # half a side
    halves = [small + time for time in range(FRAMES)]
    if action == "shrinks":
        halves.reverse()
    x, y = (chance.randint(max(halves) + 1, SIZE - max(halves) - 1) for _ in range(2))
    return [(x - half, y - half, x + half, y + half) for half in halves]


def _film(colour: str, kind: str, boxes: list[tuple[int, int, int, int]]) -> bytes:
    stream = io.BytesIO()
    write_animation([sketch([Shape(colour, kind, box)], SIZE) for box in boxes], stream)
    return stream.getvalue()


def draw_films(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """`a red circle moves left`. Held out are pairs of a shape and a colour. The truth tells the box in each frame."""
    names = [name for name in product(COLOURS, KINDS) if is_held_out(" ".join(name)) == held_out]
    while True:
        (colour, kind), action = chance.choice(names), chance.choice(ACTIONS)
        boxes = _boxes(chance, action)
        truth = {"colour": colour, "kind": kind, "action": action, "boxes": boxes}
        yield Filed("", f"a {colour} {kind} {action}", {"gif": _film(colour, kind, boxes)}, truth)


def draw_actions(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """The same films, each with what happens in it as its label."""
    for film in draw_films(chance, held_out):
        yield Filed("", str(film.truth["action"]), film.files, film.truth)
