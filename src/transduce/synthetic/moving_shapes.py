"""Videos of one shape that moves, grows or shrinks, with captions or the kind of motion as the label."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import product

from transduce.modalities.video.files import write_animation
from transduce.synthetic.dataset import FileExample, is_held_out
from transduce.synthetic.shapes import COLOURS, KINDS, Box, Shape, render

SIZE = 32  # pixels per side
FRAMES = 8
DIRECTIONS = {"moves left": (-1, 0), "moves right": (1, 0), "moves up": (0, -1), "moves down": (0, 1)}
ACTIONS = (*DIRECTIONS, "grows", "shrinks")


def generate_captions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """`a red circle moves left`. Combinations of shape and colour are held out. The truth is the box in each frame."""
    names = [name for name in product(COLOURS, KINDS) if is_held_out(" ".join(name)) == held_out]
    while True:
        (colour, kind), action = rng.choice(names), rng.choice(ACTIONS)
        boxes = _boxes(rng, action)
        truth = {"colour": colour, "kind": kind, "action": action, "boxes": boxes}
        yield FileExample("", f"a {colour} {kind} {action}", {"gif": _animation(colour, kind, boxes)}, truth)


def generate_actions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """The same videos, each labelled with the kind of motion."""
    for example in generate_captions(rng, held_out):
        yield FileExample("", str(example.truth["action"]), example.files, example.truth)


def _boxes(rng: random.Random, action: str) -> list[Box]:
    """The bounding box in each frame. The path may lie anywhere, so no single frame reveals the action."""
    if action in DIRECTIONS:
        dx, dy = DIRECTIONS[action]
        side, step = rng.randint(8, 11), rng.choice((1, 2))
        path = step * (FRAMES - 1)
        left = rng.randint(1, SIZE - side - 1 - path * abs(dx)) + path * (dx < 0)
        top = rng.randint(1, SIZE - side - 1 - path * abs(dy)) + path * (dy < 0)
        corners = [(left + step * time * dx, top + step * time * dy) for time in range(FRAMES)]
        return [(x, y, x + side, y + side) for x, y in corners]
    smallest = rng.randint(3, 5)  # half a side
    halves = [smallest + time for time in range(FRAMES)]
    if action == "shrinks":
        halves.reverse()
    x, y = (rng.randint(max(halves) + 1, SIZE - max(halves) - 1) for _ in range(2))
    return [(x - half, y - half, x + half, y + half) for half in halves]


def _animation(colour: str, kind: str, boxes: list[Box]) -> bytes:
    stream = io.BytesIO()
    write_animation([render([Shape(colour, kind, box)], SIZE) for box in boxes], stream)
    return stream.getvalue()
