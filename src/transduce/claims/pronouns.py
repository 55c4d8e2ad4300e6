"""Sentences whose pronoun refers to one of two nouns, decided by the last word; and a model that resolves it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from transduce.claims.claim import Budget
from transduce.claims.tasks import LAYERS, recipe
from transduce.flow import Example
from transduce.inference import Model
from transduce.synthetic.dataset import is_held_out

ANIMALS = [
    "dog",
    "cat",
    "horse",
    "sheep",
    "goat",
    "fox",
    "bear",
    "wolf",
    "duck",
    "mouse",
    "cow",
    "pig",
    "deer",
    "hare",
    "frog",
    "hen",
]
PLACES = ["street", "river", "road", "bridge", "field", "valley", "lake", "canal", "square", "forest", "swamp", "hill"]
ANIMAL_WORDS = ["tired", "hungry", "scared", "lazy", "sick", "young", "weak", "sleepy"]  # what an animal is
PLACE_WORDS = ["wide", "deep", "steep", "busy", "icy", "flooded", "narrow", "dark"]  # what a place is
PRONOUN_FRAMES = (
    "the {animal} did not cross the {place} because it was {degree} {word}",
    "the {animal} avoided the {place} since it was {degree} {word}",
    "today the {animal} left the {place} because it was {degree} {word}",
)
DEGREES = ("too", "very", "so")


@dataclass(frozen=True)
class PronounSentence:
    """The parts of a sentence; the last word decides what `it` refers to."""

    animal: str
    place: str
    word: str
    frame: str = PRONOUN_FRAMES[0]
    degree: str = "too"

    @property
    def text(self) -> str:
        return self.frame.format(animal=self.animal, place=self.place, degree=self.degree, word=self.word)

    @property
    def referent(self) -> str:
        return self.animal if self.word in ANIMAL_WORDS else self.place


def pronoun_sentences(seed: int, *, held_out: bool) -> Iterator[PronounSentence]:
    """Random sentences; combinations of animal, place and last word are held out."""
    chance = random.Random(f"{seed} {held_out}")
    while True:
        chosen = chance.choice(ANIMALS), chance.choice(PLACES), chance.choice([*ANIMAL_WORDS, *PLACE_WORDS])
        if is_held_out(" ".join(chosen)) == held_out:
            yield PronounSentence(*chosen, chance.choice(PRONOUN_FRAMES), chance.choice(DEGREES))


def pronoun_examples(count: int, seed: int, *, held_out: bool) -> list[Example]:
    """Pairs of a sentence and the noun that its pronoun refers to."""
    return [Example(one.text, one.referent) for one in islice(pronoun_sentences(seed, held_out=held_out), count)]


def pronoun_resolver(budget: Budget) -> Model:
    """A Transformer that was trained to name the referent."""
    data = {
        "train": budget.write_pairs("pronouns-train", pronoun_examples(6000, 1, held_out=False)),
        "dev": budget.write_pairs("pronouns-dev", pronoun_examples(200, 2, held_out=True)),
        "cache": str(budget.folder / "cache"),
    }
    model = {"encoder": {**LAYERS, "ff_width": 128}, "decoder": {**LAYERS, "layers": 1, "ff_width": 128}}
    return budget.train("pronouns", recipe(data, model, budget.pick(250, 600), batch_tokens=1024))
