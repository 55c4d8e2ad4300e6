"""Images and videos of coloured shapes, and recordings of sung digits and of melodies."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np

from transduce.modalities.audio_files import to_int16
from transduce.modalities.image_files import pillow
from transduce.modalities.video import write_animation
from transduce.synthetic.dataset import FileExample, is_held_out

# Images of coloured shapes: captions, icons, and visual question answering.
#
# Neither the image alone nor the question alone determines the answer: yes and no, and every count, are equally
# frequent, and colours and shapes are random.

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 76),
    "blue": (38, 84, 200),
    "yellow": (244, 208, 63),
    "purple": (126, 60, 168),
    "orange": (240, 132, 32),
}
KINDS = ("circle", "square", "triangle", "cross")
IMAGE_SIZE = 64  # pixels per side
BACKGROUND = (236, 236, 230)
SUPERSAMPLING = 4  # images are drawn this many times larger, then reduced, which smooths the edges
COLUMNS = ("left", "middle", "right")
RELATIONS = ("left of", "right of", "above", "below")
Box = tuple[int, int, int, int]  # left, top, right, bottom
RATE = 8000  # samples per second
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PITCHES = (360.0, 540.0, 810.0, 1215.0, 1822.5)  # hertz, a fifth apart
CHORDS = dict(zip(WORDS, combinations(PITCHES, 2), strict=True))
MAX_WORDS = 4
NOTES = tuple(round(220 * 2 ** (step / 6), 1) for step in range(13))  # hertz, two octaves of whole tones
CONTOURS = {"rising": (0, 1, 2), "falling": (2, 1, 0), "peak": (0, 2, 1), "valley": (2, 0, 1)}


@dataclass(frozen=True)
class Shape:
    """One shape and its bounding box."""

    colour: str
    kind: str
    box: Box

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def centre(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


def place_shapes(rng: random.Random, count: int, *, held_out: bool) -> list[Shape]:
    """Different shapes that do not overlap.

    A held-out image has exactly one held-out combination of shape and colour; the others occur in training too.
    """
    names = list(product(COLOURS, KINDS))
    seen = [name for name in names if not is_held_out(" ".join(name))]
    unseen = [name for name in names if is_held_out(" ".join(name))]
    chosen = rng.sample(seen, count - held_out) + rng.sample(unseen, int(held_out))
    rng.shuffle(chosen)
    boxes: list[Box] = []
    while len(boxes) < count:
        side = rng.randint(14, 22)
        left, top = rng.randint(1, IMAGE_SIZE - side - 1), rng.randint(1, IMAGE_SIZE - side - 1)
        box = (left, top, left + side, top + side)
        if all(_disjoint(box, other) for other in boxes):
            boxes.append(box)
    return [Shape(colour, kind, box) for (colour, kind), box in zip(chosen, boxes, strict=True)]


def _disjoint(one: Box, other: Box) -> bool:
    return one[2] + 2 < other[0] or other[2] + 2 < one[0] or one[3] + 2 < other[1] or other[3] + 2 < one[1]


def render_png(shapes: list[Shape], background: tuple[int, int, int] = BACKGROUND) -> bytes:
    stream = io.BytesIO()
    render(shapes, IMAGE_SIZE, background).save(stream, "PNG")
    return stream.getvalue()


def render(shapes: list[Shape], size: int, background: tuple[int, int, int] = BACKGROUND) -> Any:
    """A Pillow image of `size` pixels per side."""
    from PIL import ImageDraw

    image = pillow().Image.new("RGB", (size * SUPERSAMPLING, size * SUPERSAMPLING), background)
    canvas = ImageDraw.Draw(image)
    for shape in shapes:
        left, top, right, bottom = (SUPERSAMPLING * side for side in shape.box)
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            canvas.ellipse((left, top, right, bottom), colour)
        elif shape.kind == "square":
            canvas.rectangle((left, top, right, bottom), colour)
        elif shape.kind == "triangle":
            canvas.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], colour)
        else:
            third = (right - left) / 3
            canvas.rectangle((left + third, top, right - third, bottom), colour)
            canvas.rectangle((left, top + third, right, bottom - third), colour)
    return image.resize((size, size), pillow().Image.Resampling.LANCZOS)


def relation(one: Shape, other: Shape) -> str:
    """The position of the first shape relative to the second, along the axis on which they are further apart."""
    dx, dy = one.centre[0] - other.centre[0], one.centre[1] - other.centre[1]
    if abs(dx) >= abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def generate_captions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """One or two shapes: `a red circle left of a blue square`. The truth is the box of each word for a shape."""
    while True:
        shapes = place_shapes(rng, rng.randint(1, 2), held_out=held_out)
        # Shapes are mentioned from left to right, so that an image has exactly one correct caption.
        shapes.sort(key=lambda shape: (shape.centre[0], shape.centre[1]))
        words = f"a {shapes[0].name}".split()
        if len(shapes) == 2:
            words += f"{relation(*shapes)} a {shapes[1].name}".split()
        boxes = {str(words.index(shape.kind, 3 * number)): shape.box for number, shape in enumerate(shapes)}
        yield FileExample("", " ".join(words), {"png": render_png(shapes)}, {"boxes": boxes})


def generate_icons(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """One shape in the centre: `a large red circle`. The caption determines the image, up to a few pixels."""
    names = [name for name in product(COLOURS, KINDS) if is_held_out(" ".join(name)) == held_out]
    while True:
        (colour, kind), (word, half) = rng.choice(names), rng.choice((("small", 14), ("large", 26)))
        half += rng.randint(-2, 2)
        box = (IMAGE_SIZE // 2 - half, IMAGE_SIZE // 2 - half, IMAGE_SIZE // 2 + half, IMAGE_SIZE // 2 + half)
        image = render_png([Shape(colour, kind, box)])
        yield FileExample("", f"a {word} {colour} {kind}", {"png": image}, {"box": box})


def generate_kinds(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """One shape anywhere, and its kind as label. Combinations of colour and kind are held out."""
    while True:
        (shape,) = place_shapes(rng, 1, held_out=held_out)
        yield FileExample("", shape.kind, {"png": render_png([shape])}, {"box": shape.box})


Question = tuple[str, str, list[Shape]]  # question, answer, the shapes it refers to
QuestionType = Callable[[random.Random, list[Shape]], list[Question]]


def generate_column_questions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """Three shapes side by side in three colours; the question asks for the colour at one position."""
    return _generate_questions(rng, held_out, _place_in_columns, (_colour_of_column,))


def generate_scene_questions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """Two or three shapes, and questions of every type."""
    types = (_colour_of_kind, _kind_of_colour, _colour_by_relation, _count, _existence)
    return _generate_questions(rng, held_out, _place_anywhere, types)


def _generate_questions(
    rng: random.Random,
    held_out: bool,
    place: Callable[[random.Random, bool], list[Shape]],
    types: tuple[QuestionType, ...],
) -> Iterator[FileExample]:
    while True:
        shapes = place(rng, held_out)
        possible = rng.choice(types)(rng, shapes)
        if possible:
            question, answer, about = rng.choice(possible)
            truth = {"boxes": [shape.box for shape in about]}
            yield FileExample(question, answer, {"png": render_png(shapes)}, truth)


def _place_in_columns(rng: random.Random, held_out: bool) -> list[Shape]:
    """One shape in each third of the image, at any height."""
    third, placed = IMAGE_SIZE // len(COLUMNS), []
    for column, shape in enumerate(place_shapes(rng, len(COLUMNS), held_out=held_out)):
        side = rng.randint(14, 18)
        left, top = column * third + rng.randint(1, third - side - 1), rng.randint(1, IMAGE_SIZE - side - 1)
        placed.append(replace(shape, box=(left, top, left + side, top + side)))
    return placed


def _place_anywhere(rng: random.Random, held_out: bool) -> list[Shape]:
    return place_shapes(rng, rng.randint(2, 3), held_out=held_out)


def _is_unique(shapes: list[Shape], attribute: str, value: str) -> bool:
    return sum(getattr(shape, attribute) == value for shape in shapes) == 1


def _colour_of_kind(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    """The colour of a shape whose kind occurs once."""
    unique = [shape for shape in shapes if _is_unique(shapes, "kind", shape.kind)]
    return [(f"what colour is the {shape.kind} ?", shape.colour, [shape]) for shape in unique]


def _kind_of_colour(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    unique = [shape for shape in shapes if _is_unique(shapes, "colour", shape.colour)]
    return [(f"which shape is {shape.colour} ?", shape.kind, [shape]) for shape in unique]


def _colour_of_column(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    if len({shape.colour for shape in shapes}) < len(COLUMNS):
        return []
    columns = zip(COLUMNS, shapes, strict=True)
    return [(f"what colour is the {column} shape ?", shape.colour, [shape]) for column, shape in columns]


def _colour_by_relation(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    """The colour of the only shape in a given relation to another shape."""
    questions = []
    for other, name in product(shapes, RELATIONS):
        related = [shape for shape in shapes if shape is not other and relation(shape, other) == name]
        if len(related) == 1 and _is_unique(shapes, "kind", other.kind):
            question = f"what colour is the shape {name} the {other.kind} ?"
            questions.append((question, related[0].colour, [related[0]]))
    return questions


def _count(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    """The number is drawn first, so that every possible count is equally frequent."""
    attributes = [("colour", value) for value in COLOURS] + [("kind", value) for value in KINDS]
    having = {pair: [shape for shape in shapes if getattr(shape, pair[0]) == pair[1]] for pair in attributes}
    number = rng.choice(sorted({len(counted) for counted in having.values()}))
    fitting = [(pair, counted) for pair, counted in having.items() if len(counted) == number]
    (attribute, value), counted = rng.choice(fitting)
    question = f"how many {value} shapes ?" if attribute == "colour" else f"how many {value}s ?"
    return [(question, str(number), counted)]


def _existence(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    """Yes and no are equally frequent: a negative question is a positive one with another relation."""
    pairs = [(one, other) for one, other in permutations(shapes, 2) if one.kind != other.kind]
    if not pairs:
        return []
    one, other = rng.choice(pairs)
    stated, yes = relation(one, other), rng.random() < 0.5
    if not yes:
        true = {relation(a, b) for a, b in permutations(shapes, 2) if (a.kind, b.kind) == (one.kind, other.kind)}
        stated = rng.choice([name for name in RELATIONS if name not in true])
    return [(f"is there a {one.kind} {stated} the {other.kind} ?", "yes" if yes else "no", [one, other])]


# Videos of one shape that moves, grows or shrinks, with captions or the kind of motion as the label.

VIDEO_SIZE = 32  # pixels per side
FRAMES = 8
DIRECTIONS = {"moves left": (-1, 0), "moves right": (1, 0), "moves up": (0, -1), "moves down": (0, 1)}
ACTIONS = (*DIRECTIONS, "grows", "shrinks")


def generate_video_captions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """`a red circle moves left`. Combinations of shape and colour are held out. The truth is the box in each frame."""
    names = [name for name in product(COLOURS, KINDS) if is_held_out(" ".join(name)) == held_out]
    while True:
        (colour, kind), action = rng.choice(names), rng.choice(ACTIONS)
        boxes = _boxes(rng, action)
        truth = {"colour": colour, "kind": kind, "action": action, "boxes": boxes}
        yield FileExample("", f"a {colour} {kind} {action}", {"gif": _animation(colour, kind, boxes)}, truth)


def generate_actions(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """The same videos, each labelled with the kind of motion."""
    for example in generate_video_captions(rng, held_out):
        yield FileExample("", str(example.truth["action"]), example.files, example.truth)


def _boxes(rng: random.Random, action: str) -> list[Box]:
    """The bounding box in each frame. The path may lie anywhere, so no single frame reveals the action."""
    if action in DIRECTIONS:
        dx, dy = DIRECTIONS[action]
        side, step = rng.randint(8, 11), rng.choice((1, 2))
        path = step * (FRAMES - 1)
        left = rng.randint(1, VIDEO_SIZE - side - 1 - path * abs(dx)) + path * (dx < 0)
        top = rng.randint(1, VIDEO_SIZE - side - 1 - path * abs(dy)) + path * (dy < 0)
        corners = [(left + step * time * dx, top + step * time * dy) for time in range(FRAMES)]
        return [(x, y, x + side, y + side) for x, y in corners]
    smallest = rng.randint(3, 5)  # half a side
    halves = [smallest + time for time in range(FRAMES)]
    if action == "shrinks":
        halves.reverse()
    x, y = (rng.randint(max(halves) + 1, VIDEO_SIZE - max(halves) - 1) for _ in range(2))
    return [(x - half, y - half, x + half, y + half) for half in halves]


def _animation(colour: str, kind: str, boxes: list[Box]) -> bytes:
    stream = io.BytesIO()
    write_animation([render([Shape(colour, kind, box)], VIDEO_SIZE) for box in boxes], stream)
    return stream.getvalue()


def generate_sung_digits(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """One to four digits. Some pairs of adjacent digits are held out. The truth is the time span of each digit."""
    while True:
        words = rng.choices(WORDS, k=rng.randint(1 + held_out, MAX_WORDS))
        if any(is_held_out(" ".join(pair)) for pair in pairwise(words)) == held_out:
            content, spans = record([CHORDS[word] for word in words], rng)
            yield FileExample("", " ".join(words), {"wav": content}, {"spans": spans})


def generate_melodies(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """Three notes, whose contour is the label. Some sets of notes are held out. The truth is the notes in hertz."""
    while True:
        label, notes = rng.choice(list(CONTOURS)), sorted(rng.sample(NOTES, 3))
        if is_held_out(" ".join(map(str, notes))) == held_out:
            melody = [notes[number] for number in CONTOURS[label]]
            content, _ = record([(note,) for note in melody], rng)
            yield FileExample("", label, {"wav": content}, {"notes": melody})


def record(chords: Sequence[tuple[float, ...]], rng: random.Random) -> tuple[bytes, list[tuple[float, float]]]:
    """A WAV file of chords, each of these pitches in hertz, and the time span of each in seconds."""
    parts, spans, now = [], [], 0
    for chord in [*chords, ()]:
        gap = np.zeros(int(RATE * rng.uniform(0.04, 0.12)))
        sung = sing(chord, rng) if chord else np.zeros(0)
        begin = now + len(gap)
        now = begin + len(sung)
        parts += [gap, sung]
        spans += [(round(begin / RATE, 4), round(now / RATE, 4))] if chord else []
    samples = np.concatenate(parts)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(size=len(samples))
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(to_int16(samples + 0.01 * noise).astype("<i2").tobytes())
    return stream.getvalue(), spans


def sing(chord: tuple[float, ...], rng: random.Random) -> np.ndarray:
    """The waveform of a chord, with random pitch, tempo and volume."""
    pitch, volume = rng.uniform(0.95, 1.05), rng.uniform(0.1, 0.25)
    time = np.arange(int(RATE * rng.uniform(0.16, 0.28))) / RATE
    envelope = np.sin(np.pi * np.arange(len(time)) / len(time)) ** 0.5
    notes = [np.sin(2 * np.pi * (note * pitch * time + rng.random())) for note in chord]
    return volume * envelope * np.sum(notes, 0)
