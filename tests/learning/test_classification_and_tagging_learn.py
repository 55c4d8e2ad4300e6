"""Classifiers and taggers learn."""

from __future__ import annotations

import random

import pytest

from transduce.autoconfig import recipe_for
from transduce.errors import InputError
from transduce.training.experiment import train

pytestmark = pytest.mark.slow

NOUNS, VERBS, OTHERS = ("cat", "dog", "tree"), ("sees", "eats", "likes"), ("the", "a", "red", "old")


def sentence(chance: random.Random) -> list[tuple[str, str]]:
    kinds = [("DET", "the"), ("ADJ", "red"), ("NOUN", ""), ("VERB", ""), ("DET", "a"), ("NOUN", "")]
    words = {"NOUN": NOUNS, "VERB": VERBS}
    return [(chance.choice(words[kind]) if kind in words else word, kind) for kind, word in kinds]


def write(path, lines):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in lines))
    return str(path)


SMALL = ["model.encoder.width=32", "training.steps=120", "training.validate_every=60", "training.checkpoint_every=60"]


def settings(tmp_path, *more):
    return [*SMALL, f"data.cache={tmp_path / 'cache'}", "evaluation.resamples=10", *more]


def test_classification_learns(tmp_path):
    """Whether there is a noun. The labels are of two words each."""
    chance = random.Random(1)

    def line():
        words = [chance.choice(OTHERS + NOUNS) for _ in range(chance.randint(3, 8))]
        return " ".join(words), "has noun" if set(words) & set(NOUNS) else "no noun"

    path = write(tmp_path / "pairs.tsv", [line() for _ in range(1500)])
    trained = train(recipe_for(path, settings(tmp_path), "classify"), tmp_path / "run")
    assert trained.scores["dev"].scores["accuracy"].value >= 98
    (one,) = trained.model.generate(["the old tree"], nbest=2, beam=2)
    assert one.text == "has noun"
    assert {rival.text for rival in one.nbest} == {"has noun", "no noun"}
    assert one.tokens == ("has▁noun", "</s>")


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_tagging_learns(tmp_path, kind):
    chance = random.Random(2)
    lines = [sentence(chance) for _ in range(800)]
    pairs = [(" ".join(word for word, _ in line), " ".join(tag for _, tag in line)) for line in lines]
    path = write(tmp_path / "pairs.tsv", pairs)
    chosen = recipe_for(path, settings(tmp_path, f"tokens.source.kind={kind}", "tokens.source.size=300"), "tag")
    trained = train(chosen, tmp_path / "run")
    assert trained.scores["dev"].scores["accuracy"].value >= 99
    (one,) = trained.model.generate(["the red dog eats"])
    assert one.text.split() == ["DET", "ADJ", "NOUN", "VERB"]


def test_every_word_needs_a_label(tmp_path):
    path = write(tmp_path / "pairs.tsv", [("a b c", "X Y Z")] * 20 + [("a b", "X")])
    with pytest.raises(InputError, match="2 words but 1 labels") as message:
        train(recipe_for(path, settings(tmp_path), "tag"), tmp_path / "run")
    assert "pairs.tsv:21" in str(message.value)
