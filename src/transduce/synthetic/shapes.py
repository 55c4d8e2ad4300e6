"""Chance enters; pictures of coloured shapes leave, with what can be said of them and where each shape stands."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from transduce.modalities.image.files import pillow
from transduce.synthetic.files import Filed
from transduce.synthetic.words import is_held_out

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 76),
    "blue": (38, 84, 200),
    "yellow": (244, 208, 63),
    "purple": (126, 60, 168),
    "orange": (240, 132, 32),
}
KINDS = ("circle", "square", "triangle", "cross")
SIZE = 64  # pixels of a side
GROUND = (236, 236, 230)
ROOM = 4  # times larger when drawn: edges come out smooth


@dataclass(frozen=True)
class Shape:
    """One shape and its box: left, top, right, bottom."""

    colour: str
    kind: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def middle(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


def place_shapes(chance: random.Random, count: int, *, held_out: bool) -> list[Shape]:
    """Different shapes that do not touch. A shape in a colour is for ever on one side of the split.

    A held-out picture has one such pair of shape and colour; the others are like those that were trained on.
    """
    names = list(product(COLOURS, KINDS))
    seen = [name for name in names if not is_held_out(" ".join(name))]
    unseen = [name for name in names if is_held_out(" ".join(name))]
    chosen = chance.sample(seen, count - held_out) + chance.sample(unseen, int(held_out))
    chance.shuffle(chosen)
    boxes: list[tuple[int, int, int, int]] = []
    while len(boxes) < count:
        side = chance.randint(14, 22)
        left, top = chance.randint(1, SIZE - side - 1), chance.randint(1, SIZE - side - 1)
        box = (left, top, left + side, top + side)
        if all(_apart(box, other) for other in boxes):
            boxes.append(box)
    return [Shape(colour, kind, box) for (colour, kind), box in zip(chosen, boxes, strict=True)]


def _apart(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    return one[2] + 2 < other[0] or other[2] + 2 < one[0] or one[3] + 2 < other[1] or other[3] + 2 < one[1]


def paint(shapes: list[Shape], ground: tuple[int, int, int] = GROUND) -> bytes:
    """A PNG."""
    stream = io.BytesIO()
    sketch(shapes, SIZE, ground).save(stream, "PNG")
    return stream.getvalue()


def sketch(shapes: list[Shape], size: int, ground: tuple[int, int, int] = GROUND) -> Any:
    """A picture of the library, of so many pixels a side."""
    from PIL import ImageDraw

    picture = pillow().Image.new("RGB", (size * ROOM, size * ROOM), ground)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        left, top, right, bottom = (ROOM * side for side in shape.box)
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse((left, top, right, bottom), colour)
        elif shape.kind == "square":
            pen.rectangle((left, top, right, bottom), colour)
        elif shape.kind == "triangle":
            pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], colour)
        else:
            third = (right - left) / 3
            pen.rectangle((left + third, top, right - third, bottom), colour)
            pen.rectangle((left, top + third, right, bottom - third), colour)
    return picture.resize((size, size), pillow().Image.Resampling.LANCZOS)


def relation(one: Shape, other: Shape) -> str:
    """How the first stands to the second, along the axis where they are further apart."""
    across, down = one.middle[0] - other.middle[0], one.middle[1] - other.middle[1]
    if abs(across) >= abs(down):
        return "left of" if across < 0 else "right of"
    return "above" if down < 0 else "below"


def draw_captions(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """One or two shapes: `a red circle left of a blue square`. The truth tells the box of each word for a shape."""
    while True:
        shapes = place_shapes(chance, chance.randint(1, 2), held_out=held_out)
        # Said in reading order, so that a picture has one right caption.
        shapes.sort(key=lambda shape: (shape.middle[0], shape.middle[1]))
        words = f"a {shapes[0].name}".split()
        if len(shapes) == 2:
            words += f"{relation(*shapes)} a {shapes[1].name}".split()
        boxes = {str(words.index(shape.kind, 3 * place)): shape.box for place, shape in enumerate(shapes)}
        yield Filed("", " ".join(words), {"png": paint(shapes)}, {"boxes": boxes})


def draw_icons(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """One shape in the middle: `a large red circle`. So what is said of a picture tells how to draw it."""
    names = [name for name in product(COLOURS, KINDS) if is_held_out(" ".join(name)) == held_out]
    while True:
        (colour, kind), (word, half) = chance.choice(names), chance.choice((("small", 14), ("large", 26)))
        half += chance.randint(-2, 2)
        box = (SIZE // 2 - half, SIZE // 2 - half, SIZE // 2 + half, SIZE // 2 + half)
        yield Filed("", f"a {word} {colour} {kind}", {"png": paint([Shape(colour, kind, box)])}, {"box": box})
