"""Visual questions: answers agree with the boxes of the shapes; neither image nor question alone determines them."""

from __future__ import annotations

import io
import random
from collections import Counter, defaultdict
from itertools import islice

import numpy as np
import pytest
from PIL import Image as Picture

from transduce.synthetic.media import COLOURS, generate_column_questions, generate_scene_questions


def examples(generate, count: int = 1500, drawn: int = 300) -> list:
    """Only the first ones are drawn: the laws of the others are about questions and boxes."""
    found = generate(random.Random(5), False)
    first = list(islice(found, drawn))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transduce.synthetic.media.render_png", lambda *_: b"")
        return first + list(islice(found, count - drawn))


@pytest.fixture(scope="module")
def scene_questions() -> list:
    return examples(generate_scene_questions)


@pytest.fixture(scope="module")
def column_questions() -> list:
    return examples(generate_column_questions)


def best_blind_accuracy(pairs: list[tuple[str, str]]) -> float:
    """The accuracy of the most frequent answer to each question: an upper bound without the image."""
    answers = defaultdict(Counter)
    for question, answer in pairs:
        answers[question][answer] += 1
    return sum(max(counts.values()) for counts in answers.values()) / len(pairs)


def test_question_alone_does_not_determine_the_answer(column_questions, scene_questions):
    assert best_blind_accuracy([(one.text, one.target) for one in column_questions]) < 0.35
    assert best_blind_accuracy([(one.text.split()[0], one.target) for one in scene_questions]) < 0.5


def test_yes_and_no_are_balanced(scene_questions):
    counts = Counter(one.target for one in scene_questions if one.text.startswith("is there"))
    assert set(counts) == {"yes", "no"}
    assert 0.4 < counts["yes"] / counts.total() < 0.6


def test_answer_colour_is_found_inside_the_box(column_questions, scene_questions):
    checked = 0
    for one in (*column_questions[:100], *scene_questions[:300]):
        if one.text.startswith("what colour"):
            pixels = np.asarray(Picture.open(io.BytesIO(one.files["png"])).convert("RGB"))
            (left, top, right, bottom) = one.truth["boxes"][0]
            middle = pixels[(top + bottom) // 2, (left + right) // 2].astype(int)
            assert np.abs(middle - COLOURS[one.target]).max() < 25, one.text
            checked += 1
    assert checked > 50


def test_column_in_the_question_agrees_with_the_box(column_questions):
    for one in column_questions:
        left, _, right, _ = one.truth["boxes"][0]
        position = ("left", "middle", "right")[int((left + right) / 2 // (64 / 3))]
        assert f"the {position} shape" in one.text


def test_image_alone_does_not_determine_the_question(column_questions):
    """Three colours in an image, each requested equally often: accuracy without the question is one third."""
    counts = Counter(one.text for one in column_questions)
    assert len(counts) == 3
    assert all(0.28 < count / len(column_questions) < 0.39 for count in counts.values())
    for one in column_questions[:50]:
        pixels = np.asarray(Picture.open(io.BytesIO(one.files["png"])).convert("RGB")).astype(int)
        shown = [colour for colour, value in COLOURS.items() if (np.abs(pixels - value).max(-1) < 12).sum() > 40]
        assert len(shown) == 3
        assert one.target in shown


def test_every_question_type_occurs(scene_questions):
    begins = Counter(" ".join(one.text.split()[:2]) for one in scene_questions)
    assert set(begins) == {"what colour", "which shape", "how many", "is there"}
    numbers = Counter(one.target for one in scene_questions if one.text.startswith("how many"))
    assert numbers["0"] < 0.6 * numbers.total()
