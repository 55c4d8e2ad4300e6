"""Questions about pictures: every answer is right by the boxes of the shapes, and neither side alone tells it."""

from __future__ import annotations

import io
import random
from collections import Counter, defaultdict
from itertools import islice

import numpy as np
import pytest
from PIL import Image as Picture

from transduce.synthetic.shapes import COLOURS
from transduce.synthetic.visual_questions import draw_looks, draw_scenes


def examples(draw, count: int = 1500, held_out: bool = False) -> list:
    return list(islice(draw(random.Random(5), held_out), count))


@pytest.fixture(scope="module")
def scenes() -> list:
    return examples(draw_scenes)


@pytest.fixture(scope="module")
def looks() -> list:
    return examples(draw_looks)


def most_common(pairs: list[tuple[str, str]]) -> float:
    """How often the commonest answer to each question is right: at least as often as any who see no picture."""
    answers = defaultdict(Counter)
    for question, answer in pairs:
        answers[question][answer] += 1
    return sum(max(counts.values()) for counts in answers.values()) / len(pairs)


def test_a_question_does_not_tell_its_answer(looks, scenes):
    assert most_common([(one.text, one.target) for one in looks]) < 0.35
    assert most_common([(one.text.split()[0], one.target) for one in scenes]) < 0.5


def test_yes_and_no_are_balanced(scenes):
    counts = Counter(one.target for one in scenes if one.text.startswith("is there"))
    assert set(counts) == {"yes", "no"}
    assert 0.4 < counts["yes"] / counts.total() < 0.6


def test_the_colour_that_is_asked_for_stands_in_the_box(looks, scenes):
    checked = 0
    for one in (*looks[:100], *scenes[:300]):
        if one.text.startswith("what colour"):
            pixels = np.asarray(Picture.open(io.BytesIO(one.files["png"])).convert("RGB"))
            (left, top, right, bottom) = one.truth["boxes"][0]
            middle = pixels[(top + bottom) // 2, (left + right) // 2].astype(int)
            assert np.abs(middle - COLOURS[one.target]).max() < 25, one.text
            checked += 1
    assert checked > 50


def test_the_place_is_that_of_the_box(looks):
    for one in looks:
        left, _, right, _ = one.truth["boxes"][0]
        place = ("left", "middle", "right")[int((left + right) / 2 // (64 / 3))]
        assert f"the {place} shape" in one.text


def test_a_picture_does_not_tell_which_place_is_asked_for(looks):
    """Three colours in a picture, each asked for equally often: who hears no question is right in a third of them."""
    counts = Counter(one.text for one in looks)
    assert len(counts) == 3
    assert all(0.28 < count / len(looks) < 0.39 for count in counts.values())
    for one in looks[:50]:
        pixels = np.asarray(Picture.open(io.BytesIO(one.files["png"])).convert("RGB")).astype(int)
        shown = [colour for colour, value in COLOURS.items() if (np.abs(pixels - value).max(-1) < 12).sum() > 40]
        assert len(shown) == 3
        assert one.target in shown


def test_every_kind_of_question_is_asked(scenes):
    begins = Counter(" ".join(one.text.split()[:2]) for one in scenes)
    assert set(begins) == {"what colour", "which shape", "how many", "is there"}
    numbers = Counter(one.target for one in scenes if one.text.startswith("how many"))
    assert numbers["0"] < 0.6 * numbers.total()
