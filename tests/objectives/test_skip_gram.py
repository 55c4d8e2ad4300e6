"""Skip-gram against its formula, finite differences, and known neighbours; word vectors in files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import transduce
from transduce.data.readers.word_vectors import WordVectors, read_word_vectors, write_word_vectors
from transduce.errors import InputError
from transduce.evaluation.retrieval_metrics import normalise_rows
from transduce.flow import EOS, SPECIALS, UNK, Batch, Padded
from transduce.interop.export import export, word_vectors_of
from transduce.objectives import SkipGram
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.experiment import train

CLASSES = {
    "animal": ["cat", "dog", "cow", "fox", "owl", "hen"],
    "food": ["rice", "bread", "soup", "cake", "corn", "beans"],
    "place": ["barn", "field", "house", "yard", "forest", "river"],
}


def small_recipe(**changes: object) -> dict:
    return {
        "data": {"format": "text", "noise": {"kind": "nothing"}},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {
            "encoder": {"kind": "identity", "width": 4, "dropout": 0.0},
            "head": {"kind": "cbow", "window": 2},
            "scale_embedding": False,
        },
        "training": {"objective": {"kind": "skip_gram", "window": 3, "negatives": 2}},
        **changes,
    }


def pair_by_pair(objective: SkipGram, rows: list[list[int]], drawn: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
    """The loss, one pair of words after the other."""
    total = 0.0
    for row, ids in enumerate(rows):
        for t, word in enumerate(ids):
            for c, other in enumerate(ids):
                distance = abs(t - c)
                if not 0 < distance <= objective.window or min(word, other) < len(SPECIALS):
                    continue
                weight = (objective.window - distance + 1) / objective.window
                total += weight * np.log1p(np.exp(-u[word] @ v[other]))
                total += weight * sum(np.log1p(np.exp(u[word] @ v[negative])) for negative in drawn[row, t])
    return float(total)


def test_the_loss_equals_its_formula_and_finite_differences() -> None:
    torch.manual_seed(1)
    model = build_model(complete_recipe(parse(small_recipe())).model, 12, 12)
    rows = [[5, 7, UNK, 9, 11, 5, EOS], [6, 8, EOS], [10, EOS]]
    batch = Batch(Padded.from_rows(rows))
    objective = SkipGram(window=3, negatives=2)
    assert batch.source is not None
    torch.manual_seed(4)
    drawn = objective.draw(batch.source.values, batch.source.values >= len(SPECIALS)).numpy()
    assert drawn.min() >= len(SPECIALS)  # only words of the batch
    assert set(drawn.flatten()) <= {5, 6, 7, 8, 9, 10, 11}
    torch.manual_seed(4)
    loss = objective(model, batch)
    tables = [w.detach().double().numpy().copy() for w in (model.encoder.embedding.weight, model.head.output.weight)]
    assert loss.total.item() == pytest.approx(pair_by_pair(objective, rows, drawn, *tables), rel=1e-5)
    assert objective.count(batch) == 8
    loss.total.backward()
    for number, weight in enumerate((model.encoder.embedding.weight, model.head.output.weight)):
        ends = []
        for sign in (1, -1):
            moved = [table.copy() for table in tables]
            moved[number][7, 2] += sign * 1e-5
            ends.append(pair_by_pair(objective, rows, drawn, *moved))
        assert weight.grad[7, 2].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-5)


def test_frequent_words_are_drawn_more_often_but_less_than_they_occur() -> None:
    ids = torch.tensor([[5] * 16 + [6]])
    torch.manual_seed(2)
    drawn = SkipGram(negatives=500).draw(ids, ids > 0)
    share = float((drawn == 6).float().mean())
    assert share == pytest.approx(1 / 9, abs=0.02)  # 1 to 16 ** 0.75 = 8


def test_models_that_skip_gram_cannot_train_are_refused() -> None:
    other = small_recipe()
    other["model"] = {**other["model"], "encoder": {"kind": "recurrent", "width": 4}}
    with pytest.raises(InputError, match="independent rows"):
        complete_recipe(parse(other))
    part = {"kind": "recurrent", "width": 4}
    with pytest.raises(InputError, match="vectors of words alone"):
        complete_recipe(
            parse({"model": {"encoder": part, "decoder": part}, "training": {"objective": {"kind": "skip_gram"}}})
        )


def write_sentences(path: Path, count: int) -> None:
    """Words of a class occur in the same places of the same sentences, and never together."""
    rng = random.Random(3)
    frames = ["a {animal} eats {food} near the {place}", "in the {place} lives one {animal}", "they buy {food} today"]
    texts = (
        rng.choice(frames).format(**{name: rng.choice(words) for name, words in CLASSES.items()}) for _ in range(count)
    )
    path.write_text("".join(f"{text}\n" for text in texts))


def nearest_in_class(vectors: WordVectors) -> float:
    """The share of the words of the classes whose nearest neighbour among them is of their own class."""
    members = [(name, word) for name, words in CLASSES.items() for word in words]
    rows = [list(vectors.words).index(word) for _, word in members]
    unit = normalise_rows(vectors.vectors[rows])
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -1)
    found = [members[row][0] == members[int(best)][0] for row, best in enumerate(cosines.argmax(1))]
    return sum(found) / len(found)


@pytest.mark.slow
def test_words_with_the_same_contexts_become_neighbours(tmp_path: Path) -> None:
    """And their vectors survive export, import, and frozen training of another model."""
    write_sentences(tmp_path / "text.txt", 600)
    wanted = small_recipe(
        data={"format": "text", "noise": {"kind": "nothing"}, "train": str(tmp_path / "text.txt"), "dev_size": 20},
        training={
            "objective": {"kind": "skip_gram", "window": 2},
            "steps": 150,
            "batch_tokens": 1000,
            "validate_every": 150,
            "checkpoint_every": 150,
            "optimiser": {"learning_rate": 0.1},
        },
        evaluation={"metrics": ["accuracy"], "resamples": 5},
    )
    wanted["model"]["encoder"] = {"kind": "identity", "width": 16, "dropout": 0.0}
    trained = train(wanted, tmp_path / "words").model
    before = word_vectors_of(trained)
    assert nearest_in_class(before) >= 0.8  # by chance 0.29
    export(tmp_path / "words", tmp_path / "words.txt", "vectors")
    written = read_word_vectors(tmp_path / "words.txt")
    assert list(written.words) == list(before.words)
    np.testing.assert_allclose(written.vectors, before.vectors, rtol=1e-4, atol=1e-6)
    (tmp_path / "labelled.tsv").write_text("".join(f"the {one}\t{n}\n" for n, w in CLASSES.items() for one in w))
    classifier = {
        "data": {"train": str(tmp_path / "labelled.tsv"), "dev_size": 3},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "labels"}},
        "model": {"encoder": {"kind": "recurrent", "width": 16}, "head": {"kind": "classifier"}},
        "init": {"source_vectors": str(tmp_path / "words.txt")},
        "training": {"freeze": "encoder.embedding", "steps": 2, "validate_every": 2, "checkpoint_every": 2},
        "evaluation": {"metrics": ["accuracy"], "resamples": 5},
    }
    train(classifier, tmp_path / "labels")
    kept = word_vectors_of(transduce.load(tmp_path / "labels"))
    rows = {word: row for row, word in enumerate(before.words)}
    chosen = before.vectors[[rows[word] for word in kept.words]]
    np.testing.assert_allclose(kept.vectors, chosen, rtol=1e-4, atol=1e-5)
    assert f": {len(kept.words)} of" in (tmp_path / "labels" / "log.jsonl").read_text().splitlines()[0]


def test_word_vector_files_are_read_with_and_without_a_header(tmp_path: Path) -> None:
    given = WordVectors(["a", "B", "naïve"], np.array([[1, 2.5], [0, -1e-9], [3, 4]], np.float32))
    write_word_vectors(tmp_path / "one.txt", given)
    lines = (tmp_path / "one.txt").read_text().splitlines()
    assert lines[0] == "3 2"
    (tmp_path / "glove.txt").write_text("".join(f"{line}\n" for line in lines[1:]))
    for name in ("one.txt", "glove.txt"):
        found = read_word_vectors(tmp_path / name)
        assert list(found.words) == list(given.words)
        np.testing.assert_allclose(found.vectors, given.vectors)
    assert list(read_word_vectors(tmp_path / "one.txt", ["B", "z"]).words) == ["B"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 1 2\nb 1\n", "1 numbers, and 2 are expected"),
        ("a 1 x\n", "could not convert"),
        ("a 1 nan\n", "not finite"),
        ("", "has no vectors"),
    ],
)
def test_damaged_word_vector_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text(content)
    with pytest.raises(InputError, match=message):
        read_word_vectors(tmp_path / "bad.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_word_vectors(tmp_path / "missing.txt")
