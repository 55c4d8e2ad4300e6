"""Claims about representations: words in context, pronouns, and a map of sentences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.evaluation.claims.claim import (
    LAYERS,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    exact_match,
    recipe,
    training,
)
from transduce.flow import Example
from transduce.inference import Model, load
from transduce.inference.generation import encode_truncated
from transduce.inference.retrieval import pca
from transduce.layers.transformer import TransformerStack
from transduce.synthetic.dataset import is_held_out
from transduce.synthetic.sentences import generate_paraphrases

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
PRONOUN = "it"


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


@contextmanager
def first_layers(encoder: TransformerStack, count: int) -> Iterator[None]:
    """Inside, the stack has only its first layers."""
    layers = encoder.layers
    encoder.layers = nn.ModuleList(list(layers)[:count])  # type: ignore[assignment, arg-type]
    try:
        yield
    finally:
        encoder.layers = layers


def transformer_encoder(model: Model) -> TransformerStack:
    encoder = getattr(model.network, "encoder", None)
    if not isinstance(encoder, TransformerStack):
        raise InputError("this model has no Transformer encoder", remedy="give a run with encoder: {kind: transformer}")
    return encoder


@torch.no_grad()
def pronoun_states(model: Model, texts: Sequence[str]) -> list[Tensor]:
    """The vector of the pronoun in each text (N D), before the first layer and after each layer."""
    encoder = transformer_encoder(model)
    encoded, _ = encode_truncated(model.source_encoding, texts, model.max_source_tokens())
    batch = model.source_encoding.batch(encoded).to(model.device)
    assert batch.source is not None
    pieces = [[model.source.piece(number).strip("▁Ġ ") for number in row] for row in batch.source.values.tolist()]
    if missing := [text for text, row in zip(texts, pieces, strict=True) if PRONOUN not in row]:
        raise InputError(f"the tokenizer of this model has no token {PRONOUN!r} in {missing[0]!r}")
    places = torch.tensor([row.index(PRONOUN) for row in pieces], device=model.device)
    states = []
    for count in range(len(encoder.layers) + 1):
        with first_layers(encoder, count):
            values = encoder(batch).values
        states.append(values[torch.arange(len(texts), device=model.device), places].float().cpu())
    return states


def cosine_distances(one: Tensor, other: Tensor) -> Tensor:
    return 1 - nn.functional.cosine_similarity(one, other, dim=-1)


def context_distances(model: Model, count: int) -> dict[str, list[float]]:
    """Mean distances of the pronoun between sentences that differ in the last word alone, by layer.

    `same`: both words are said of an animal, or both of a place. `other`: one of each.
    """
    chosen: list[tuple[str, str, str]] = []
    for number, one in enumerate(islice(pronoun_sentences(5, held_out=True), count)):
        words = (ANIMAL_WORDS, PLACE_WORDS) if one.word in ANIMAL_WORDS else (PLACE_WORDS, ANIMAL_WORDS)
        same = [word for word in words[0] if word != one.word][number % (len(words[0]) - 1)]
        other = words[1][number % len(words[1])]
        variants = [PronounSentence(one.animal, one.place, word, one.frame, one.degree) for word in (same, other)]
        chosen.append((one.text, *(variant.text for variant in variants)))  # type: ignore[arg-type]
    base, *others = (pronoun_states(model, texts) for texts in zip(*chosen, strict=True))
    pairs = dict(zip(("same referent", "other referent"), others, strict=True))
    return {
        name: [float(cosine_distances(a, b).mean()) for a, b in zip(base, states, strict=True)]
        for name, states in pairs.items()
    }


def measure_context(budget: Budget) -> Measurement:
    trained = pronoun_resolver(budget)
    found = {"trained here": context_distances(trained, 64)}
    if budget.model is not None:
        found["imported"] = context_distances(load(budget.model, device=budget.device), 64)
    right = exact_match(trained, pronoun_examples(200, 7, held_out=True))
    checks = []
    for name, distances in found.items():
        same, other = distances["same referent"], distances["other referent"]
        numbers = {"before the layers": other[0], "other referent": other[-1], "same referent": same[-1]}
        statement = f"{name}: the word starts as one vector, and its contexts move it apart"
        checks.append(Check(statement, abs(other[0]) < 1e-5 and other[-1] > 1e-3, numbers))
        statement = f"{name}: contexts that change its meaning move it further than those that do not"
        checks.append(Check(statement, other[-1] > 1.2 * same[-1], {"ratio": other[-1] / max(same[-1], 1e-12)}))
    panels, rows = [], []
    for name, distances in found.items():
        series = [Series(label, list(range(len(values))), values) for label, values in distances.items()]
        panels.append(Panel(f"The word `it`, {name}", "layer", "cosine distance", series))
        rows += [(name, layer, *values) for layer, values in enumerate(zip(*distances.values(), strict=True))]
    columns = ["model", "layer", "same referent", "other referent"]
    table = ClaimTable("Mean cosine distance of `it` between two contexts", columns, rows)
    accuracy = ClaimTable("", ["model", "referents named, unseen combinations"], [("trained here", right)])
    return Measurement([table, accuracy], panels, checks)


CONTEXT = Claim(
    "context",
    "The representation of a word changes with its context, layer by layer: `it` in `it was too tired` is not `it` in "
    "`it was too wide`.",
    "Peters et al. 2018, Deep Contextualized Word Representations; Uszkoreit 2017, Transformer (blog post)",
    "A Transformer learns to name the noun that `it` refers to in sentences such as `the dog did not cross the street "
    "because it was too tired`. The vector of `it` is compared between sentences that differ in their last word "
    "alone: two words for the animal, or one for the animal and one for the place. With --model, the same for an "
    "imported encoder.",
    measure_context,
    frozenset({"model"}),
)


def paraphrase_embedder(budget: Budget, pairs: Sequence[Example]) -> Model:
    """A small encoder with one vector per sentence, trained with paraphrases as positives."""
    tokens = {"kind": "words", "size": 2000}
    objective = {"kind": "contrastive", "temperature": 0.05, "symmetric": True}
    optimiser = {"learning_rate": 0.005}
    steps = budget.pick(80, 200)
    settings = {
        "data": {
            "train": budget.write_pairs("paraphrases-train", pairs[:2000]),
            "dev": budget.write_pairs("paraphrases-dev", pairs[2000:2200]),
            "cache": str(budget.folder / "cache"),
        },
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {
            "encoder": {"kind": "convolutional", "width": 64, "layers": 1, "dropout": 0.0},
            "head": {"kind": "embedder", "pooling": "mean"},
        },
        "training": training(steps, objective=objective, optimiser=optimiser),
        "evaluation": {"metrics": ["recall@1"], "resamples": 100},
    }
    return budget.train("paraphrases", settings)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)


def word_counts(texts: Sequence[str]) -> np.ndarray:
    """Bags of words, the baseline that compares words alone."""
    words = {word: number for number, word in enumerate(sorted({word for text in texts for word in text.split()}))}
    counts = np.zeros((len(texts), len(words)))
    for row, text in enumerate(texts):
        for word in text.split():
            counts[row, words[word]] += 1
    return counts


def nearest_is_paraphrase(vectors: np.ndarray, count: int) -> float:
    """The share of the first `count` texts whose nearest one is text + count, their paraphrase."""
    similarity = unit(vectors) @ unit(vectors).T
    np.fill_diagonal(similarity, -np.inf)
    return float((similarity[:count].argmax(1) == np.arange(count) + count).mean())


def measure_map(budget: Budget) -> Measurement:
    pairs = list(generate_paraphrases(2400, 1))
    model, test = paraphrase_embedder(budget, pairs), pairs[2200:]
    texts = [*(one.source for one in test), *(one.target or "" for one in test)]
    topics = [one.extra["topic"] for one in test] * 2
    vectors = model.embed(texts)
    learned, words = (nearest_is_paraphrase(space, len(test)) for space in (vectors, word_counts(texts)))
    nearest = np.where(np.eye(len(texts), dtype=bool), -np.inf, unit(vectors) @ unit(vectors).T).argmax(1)
    same_topic = float(np.mean([topics[row] == topics[near] for row, near in enumerate(nearest)]))
    chance = float(np.mean([topics.count(topic) / len(topics) for topic in topics]))
    checks = [
        Check(
            "the nearest of all sentences is the paraphrase more often than by counting words",
            learned > words + 0.3,
            {"learned": learned, "words": words, "by chance": 1 / (len(texts) - 1)},
        ),
        Check(
            "the nearest sentence has the same topic more often than by chance",
            same_topic > chance + 0.3,
            {"same topic": same_topic, "by chance": chance},
        ),
    ]
    cosines = (unit(vectors) @ unit(vectors).T)[np.arange(8), nearest[:8]]
    rows = [(texts[row], texts[nearest[row]], float(cosine)) for row, cosine in enumerate(cosines)]
    table = ClaimTable("Nearest neighbours", ["sentence", "nearest other sentence", "cosine"], rows)
    return Measurement([table], _maps(vectors, topics, budget.seed), checks)


def _maps(vectors: np.ndarray, topics: Sequence[str], seed: int) -> list[Panel]:
    """PCA, and t-SNE and UMAP where their packages are installed."""
    projection = pca(vectors)
    maps: dict[str, Any] = {f"PCA, {projection.explained_variance:.0%} of the variance": projection.points}
    if find_spec("sklearn") is not None:
        from sklearn.manifold import TSNE

        maps["t-SNE"] = TSNE(random_state=seed, init="pca", perplexity=20).fit_transform(vectors)
    if find_spec("umap") is not None:
        from umap import UMAP

        maps["UMAP"] = UMAP(random_state=seed).fit_transform(vectors)
    panels = []
    for title, points in maps.items():
        series = []
        for topic in sorted(set(topics)):
            chosen = [row for row, one in enumerate(topics) if one == topic]
            series.append(Series(topic, points[chosen, 0].tolist(), points[chosen, 1].tolist()))
        panels.append(Panel(title, "", "", series, "points"))
    return panels


MAP = Claim(
    "map",
    "Sentences of similar meaning lie close together in the space of an encoder, whatever their words.",
    "Sutskever et al. 2014, Sequence to Sequence Learning with Neural Networks, figure 2; Reimers & Gurevych 2019",
    "An encoder with a contrastive objective learns from pairs of paraphrases that share no content word. 200 other "
    "pairs are embedded, projected on two dimensions, and each sentence is listed with its nearest neighbour among "
    "the 399 others. The baseline compares counts of words.",
    measure_map,
)
