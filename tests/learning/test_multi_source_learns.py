"""Visual question answering is learned from image and question together, and from neither of them alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import transduce
from transduce.modalities.image_files import read_image
from transduce.synthetic import write_files
from transduce.synthetic.media import COLOURS

pytestmark = pytest.mark.slow

WIDTH = 64
IMAGE_ENCODER = {
    "kind": "identity",
    "width": WIDTH,
    "dropout": 0.0,
    "front": {"kind": "patches", "patch_size": 4, "position": "sinusoidal"},
}
PARTS = {"picture": IMAGE_ENCODER, "question": {"kind": "recurrent", "width": WIDTH, "dropout": 0.0}}
SOURCES = {"picture": {"kind": "image", "size": 12}, "question": "text"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    for name, count, seed in (("train", 3000, 1), ("test", 300, 2), ("dev", 50, 3)):
        write_files("colour-questions", folder / name, count, seed)
    return folder


def lines(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()]


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def learn(data: Path, folder: Path, names: tuple[str, ...], steps: int) -> transduce.Model:
    """Trains a model that reads only these sources: their columns and the answer."""
    files = {}
    for part in ("train", "dev"):
        files[part] = str(data / part / f"{'-'.join(names)}.tsv")
        columns = [[line[list(SOURCES).index(name)] for name in names] + line[-1:] for line in lines(data / part)]
        Path(files[part]).write_text("".join("\t".join(line) + "\n" for line in columns))
    joined = {"kind": "multi_source", "width": WIDTH, "parts": PARTS}
    recipe = {
        "data": {**files, "sources": {name: SOURCES[name] for name in names}, "cache": str(folder / "cache")},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {
            "encoder": joined if len(names) > 1 else PARTS[names[0]],
            "decoder": {
                "kind": "transformer",
                "width": WIDTH,
                "layers": 2,
                "heads": 4,
                "ff_width": 128,
                "dropout": 0.0,
            },
        },
        "training": {
            "steps": steps,
            "batch_tokens": 64 * 22,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2.5e-3},
            "schedule": {"kind": "cosine", "warmup": 30},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    transduce.train(recipe, folder / "run")
    return transduce.load(folder / "run")


def best_without_image(tested: list[list[str]]) -> float:
    """The accuracy of the most frequent answer to each question: an upper bound without the image."""
    known = defaultdict(Counter)
    for _, question, answer in tested:
        known[question][answer] += 1
    return sum(max(counts.values()) for counts in known.values()) / len(tested)


def best_without_question(tested: list[list[str]]) -> float:
    """One third, as each of the three colours is asked for equally often, plus three standard deviations."""
    return 1 / 3 + 3 * (1 / 3 * 2 / 3 / len(tested)) ** 0.5


def test_question_and_image_together_suffice(data, tmp_path):
    model, tested = learn(data, tmp_path, ("picture", "question"), 700), lines(data / "test")
    pictures = [str(data / "test" / name) for name, _, _ in tested]
    questions, answers = [question for _, question, _ in tested], [answer for *_, answer in tested]

    def accuracy(images: list[str], texts: list[str]) -> float:
        found = model.generate([f"{picture}\t{question}" for picture, question in zip(images, texts, strict=True)])
        return share([one.text == answer for one, answer in zip(found, answers, strict=True)])

    assert accuracy(pictures, questions) >= 0.95
    # With the question or the image of another line the answer is lost.
    assert accuracy(pictures[1:] + pictures[:1], questions) <= 0.5
    assert accuracy(pictures, questions[1:] + questions[:1]) <= 0.5


def test_question_alone_does_not_suffice(data, tmp_path):
    model, tested = learn(data, tmp_path, ("question",), 100), lines(data / "test")
    found = [one.text for one in model.generate([question for _, question, _ in tested])]
    assert set(found) <= set(COLOURS)  # it has learned which answers are possible
    correct = share([one == line[-1] for one, line in zip(found, tested, strict=True)])
    assert correct <= best_without_image(tested) <= 0.4


def test_image_alone_does_not_suffice(data, tmp_path):
    """The model learns which colours an image has, and guesses among them."""
    model, tested = learn(data, tmp_path, ("picture",), 250), lines(data / "test")
    found = [one.text for one in model.generate([str(data / "test" / name) for name, _, _ in tested])]
    shown = [colours_of(data / "test" / name) for name, _, _ in tested]
    assert share([one in colours for one, colours in zip(found, shown, strict=True)]) >= 0.95
    correct = share([one == line[-1] for one, line in zip(found, tested, strict=True)])
    assert correct <= best_without_question(tested) <= 0.42


def colours_of(picture: Path) -> list[str]:
    pixels = np.asarray(read_image(picture).convert("RGB")).astype(int)
    return [colour for colour, value in COLOURS.items() if (np.abs(pixels - value).max(-1) < 12).sum() > 40]
