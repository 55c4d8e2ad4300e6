"""Sentence embeddings, with the recipe chosen for pairs: paraphrases are near, clusters are topics."""

from __future__ import annotations

from functools import cache

import pytest

from transduce.autoconfig import recipe_for
from transduce.evaluation.retrieval_metrics import normalise_rows
from transduce.flow import Example
from transduce.inference.retrieval import k_means, purity
from transduce.synthetic.sentences import generate_paraphrases
from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

TRAIN, HELD_OUT, DOCUMENTS = slice(1500), slice(1500, 1700), slice(1700, None)


@cache
def examples() -> list[Example]:
    return list(generate_paraphrases(2500, seed=3))


def write(path, pairs):
    path.write_text("".join(f"{one.source}\t{one.target}\n" for one in pairs))
    return str(path)


def trained(folder, steps: int) -> TrainingResult:
    settings = [
        f"data.dev={write(folder / 'dev.tsv', examples()[HELD_OUT])}",
        f"data.cache={folder / 'cache'}",
        "tokens={source: {kind: words}, target: {kind: words}, shared: true}",
        "model.encoder={kind: convolutional, width: 64, layers: 1, dropout: 0.0}",
        f"training.steps={steps}",
        "training.batch_tokens=2048",
        "training.validate_every=1000",
        "training.schedule.warmup=10",
        "training.optimiser.learning_rate=0.005",
        "evaluation.resamples=100",
    ]
    return train(recipe_for(write(folder / "pairs.tsv", examples()[TRAIN]), settings, "embed"), folder / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingResult:
    return trained(tmp_path_factory.mktemp("embed"), 70)


def test_paraphrase_is_retrieved_among_two_hundred(run, tmp_path):
    scores = run.scores["dev"].scores
    assert scores["recall@1"].value >= 90
    assert scores["recall@10"].value >= scores["recall@1"].value
    assert scores["mrr"].low <= scores["mrr"].value <= scores["mrr"].high
    hardly = trained(tmp_path, 1).scores["dev"].scores
    assert hardly["recall@1"].value <= 10


def test_the_held_out_loss_falls(run):
    assert run.outcome.scores["loss"] < 0.5  # from the logarithm of the batch, some 4


def test_clusters_recover_topics(run):
    vectors = normalise_rows(run.model.embed([one.source for one in examples()[DOCUMENTS]]))
    topics = [one.extra["topic"] for one in examples()[DOCUMENTS]]
    found = k_means(vectors, len(set(topics)))
    assert purity(found.labels, topics) >= 0.9
