"""Unseen names are copied: placeholders of unknown words, pointer-generator."""

from __future__ import annotations

import random

import pytest

from transduce.training.experiment import train

pytestmark = pytest.mark.slow

GRU = {"kind": "recurrent", "width": 32, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 32, "heads": 4, "ff_width": 64, "layers": 1, "dropout": 0.0}
TEMPLATES = (
    ("my name is {0} .", "hello {0} !"),
    ("i am {0} , not {1} .", "welcome {0} , goodbye {1} !"),
    ("{0} saw {1} .", "{1} was seen by {0} ."),
    ("{0} gave {1} to {2} .", "{2} has {1} from {0} ."),
    ("who is {0} ?", "nobody knows {0} ."),
)


def names(count: int, seed: int) -> list[str]:
    """Invented, no two alike."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(draw.choice("bcdfgklmnprstvz") + draw.choice("aeiou") for _ in range(4)).upper()] = None
    return list(found)


def write(path, people: list[str], count: int, seed: int) -> str:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            source, target = draw.choice(TEMPLATES)
            chosen = draw.sample(people, 3)
            file.write(f"{source.format(*chosen)}\t{target.format(*chosen)}\n")
    return str(path)


def known(path) -> list[str]:
    return sorted({word for word in path.read_text().split() if word.isupper()})


def learn(tmp_path, part: dict, copying: dict | None, oov_placeholders: int, rare: bool = False):
    """Exact match on names that training never saw, or, `rare`, on known words that it saw once or twice."""
    people = names(1500, 1)
    seen, unseen = (people, people) if rare else (people[:1000], people[1000:])
    steps, pairs = (200, 1000) if rare else (150, 2000)
    tokens = {"kind": "words", "size": 2000 if rare else 40}  # else the templates fit, and no name does
    recipe = {
        "data": {
            "train": write(tmp_path / "train.tsv", seen, pairs, 2),
            "dev": write(tmp_path / "dev.tsv", seen, 50, 3),
            "test": write(tmp_path / "test.tsv", known(tmp_path / "train.tsv") if rare else unseen, 200, 4),
            "cache": str(tmp_path / "cache"),
        },
        "tokens": {"source": tokens, "target": tokens, "shared": True, "oov_placeholders": oov_placeholders},
        "model": {"encoder": part, "decoder": part, "copy": copying},
        "training": {
            "steps": steps,
            "batch_tokens": 1024,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 6e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    trained = train(recipe, tmp_path / "run")
    return trained.scores["test"].scores["exact"].value, trained.model


@pytest.mark.parametrize("part", [GRU, TRANSFORMER], ids=["recurrent", "Transformer"])
def test_oov_placeholders_reproduce_unseen_names(part, tmp_path):
    exact, model = learn(tmp_path, part, {}, 3)
    assert exact >= 95
    (one,) = model.generate(["my name is ZORBLAX ."])
    assert one.text == "hello ZORBLAX !"
    assert one.tokens == ("hello", "<unk1>", "!", "</s>")
    explained = model.explain("my name is ZORBLAX .")
    assert explained.output == "hello ZORBLAX !"
    assert explained.target_tokens[1].strip() == "ZORBLAX"
    right, unsaid = model.score(
        [("my name is ZORBLAX .", "hello ZORBLAX !"), ("my name is ZORBLAX .", "hello FNORD !")]
    )
    assert right.score == pytest.approx(one.score, abs=1e-4)
    assert right.score > unsaid.score


def test_unseen_names_fail_without_oov_placeholders(tmp_path):
    exact, model = learn(tmp_path, GRU, None, 0)
    assert exact == 0
    assert "<unk>" in model.generate(["my name is ZORBLAX ."])[0].text


@pytest.mark.parametrize(("copying", "least", "most"), [({}, 90, 100), (None, 0, 20)], ids=["copy", "plain"])
def test_rare_words_are_copied_before_they_are_learned(copying, least, most, tmp_path):
    """Every name is in the vocabulary, but hardly ever was said: looking at it is enough to say it."""
    exact, _ = learn(tmp_path, GRU, copying, 0, rare=True)
    assert least <= exact <= most
