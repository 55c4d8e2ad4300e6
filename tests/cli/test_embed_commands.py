"""`transduce embed`, `search`, `cluster` and `similarity`; commands that embedding models reject."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_fixtures import Command

import transduce
from transduce.autoconfig import recipe_for
from transduce.errors import InputError
from transduce.inference import Model
from transduce.synthetic import write_files
from transduce.synthetic.sentences import generate_paraphrases
from transduce.training.resolve import resolve

EXAMPLES = list(generate_paraphrases(330, seed=5))


@pytest.fixture(scope="module")
def embedder(bench: Path) -> Path:
    """A run trained with --task embed, hardly more than begun."""
    pairs = bench / "paraphrases.tsv"
    pairs.write_text("".join(f"{one.source}\t{one.target}\n" for one in EXAMPLES[:300]))
    small = ["model.encoder.width=16", "training.steps=20", "training.validate_every=20", "evaluation.resamples=20"]
    transduce.train(recipe_for(str(pairs), [*small, "data.dev_size=30"], "embed"), bench / "embedder")
    return bench / "embedder"


@pytest.fixture(scope="module")
def documents(bench: Path) -> Path:
    path = bench / "documents.txt"
    path.write_text("".join(f"{one.source}\n" for one in EXAMPLES[300:]))
    return path


def test_embed_writes_one_row_per_line(embedder: Path, documents: Path, command: Command, tmp_path: Path) -> None:
    lines = documents.read_text().splitlines()
    file = tmp_path / "vectors.npy"
    assert command("embed", embedder, documents, "--output", file).code == 0
    found = np.load(file, allow_pickle=False)
    assert found.dtype == np.float32
    assert found == pytest.approx(transduce.load(embedder).embed(lines), abs=1e-6)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    text = command("embed", embedder, "-", "--tsv", stdin=b"the cook\n\n" + lines[0].encode() + b"\n").out
    rows = np.array([line.split("\t") for line in text.splitlines()], dtype=float)
    assert len(rows) == 3  # the empty line has its row too
    assert rows[2] == pytest.approx(found[0], abs=1e-5)
    result = command("embed", embedder, documents)
    assert result.code == 2
    assert "--output" in result.err


def test_search_finds_the_query_itself_and_caches_documents(
    embedder: Path, documents: Path, command: Command, bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = documents.read_text().splitlines()
    first = command("search", embedder, documents, lines[7], "--top", "3")
    assert lines[7] in first.out
    assert "1.000" in first.out
    queries = bench / "queries.txt"
    queries.write_text("".join(f"{line}\n" for line in lines[:4]))
    read = Model.embed
    batch_sizes: list[int] = []
    monkeypatch.setattr(Model, "embed", lambda self, texts: batch_sizes.append(len(texts)) or read(self, texts))
    again = command("search", embedder, documents, "--queries", queries, "--json", "--top", "2")
    assert batch_sizes == [4]  # the documents were embedded by the first search
    found = [json.loads(line) for line in again.out.splitlines()]
    assert [one["query"] for one in found] == lines[:4]
    for number, one in enumerate(found):
        assert len(one["hits"]) == 2
        assert one["hits"][0]["text"] == lines[number]
        assert one["hits"][0]["line"] == number + 1
        assert one["hits"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    documents.write_text("".join(f"{line}\n" for line in [*lines, "one more"]))
    assert "one more" in command("search", embedder, documents, "one more", "--top", "1").out
    documents.write_text("".join(f"{line}\n" for line in lines))


def test_cluster_writes_labels_and_a_map(embedder: Path, documents: Path, command: Command, tmp_path: Path) -> None:
    picture, table = tmp_path / "map.png", tmp_path / "clusters.tsv"
    arguments = (embedder, documents, "--clusters", "4", "--png", picture, "--output", table)
    assert command("cluster", *arguments).code == 0
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    assert [line for _, line in rows] == documents.read_text().splitlines()
    assert {number for number, _ in rows} == {"1", "2", "3", "4"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = table.read_text()
    command("cluster", *arguments)
    assert table.read_text() == before
    result = command("cluster", embedder, documents, "--clusters", "99")
    assert result.code == 2
    assert "99 clusters" in result.err


def test_similarity_of_pairs_and_rank_correlation(embedder: Path, command: Command, tmp_path: Path) -> None:
    pairs = tmp_path / "sts.tsv"
    same, other = EXAMPLES[0].source, EXAMPLES[1].source
    pairs.write_text(f"{same}\t{same}\t5\n{same}\t{other}\t1\n{same}\t{EXAMPLES[0].target}\t4\n")
    found = command("similarity", embedder, pairs)
    assert float(found.out.splitlines()[0]) == pytest.approx(1, abs=1e-5)
    assert "Spearman" in found.err
    pairs.write_text(f"{same}\t{same}\n")
    assert "Spearman" not in command("similarity", embedder, pairs).err
    pairs.write_text(f"{same}\t{same}\tmuch\n")
    result = command("similarity", embedder, pairs)
    assert result.code == 2
    assert "sts.tsv:1" in result.err
    pairs.write_text(f"{same}\t{same}\t1\n{same}\t{other}\n")
    assert "sts.tsv:2" in command("similarity", embedder, pairs).err


def test_evaluate_prints_retrieval_metrics(embedder: Path, command: Command) -> None:
    out = command("evaluate", embedder).out
    for metric in ("recall@1", "recall@10", "mrr"):
        assert metric in out
    assert "30" in out


def test_a_translation_model_can_embed(model: Model, attention_run: Path, command: Command, tmp_path: Path) -> None:
    vectors = model.embed(["red blue", "", "green"])
    assert vectors.shape[0] == 3
    assert vectors[2] == pytest.approx(model.embed(["green"])[0], abs=1e-5)
    assert model.embed([]).shape[0] == 0
    (tmp_path / "lines.txt").write_text("red blue\ngreen\nblue blue\n")
    assert "red blue" in command("search", attention_run, tmp_path / "lines.txt", "red blue", "--top", "1").out


def test_cut_texts_give_a_warning(embedder: Path) -> None:
    model = transduce.load(embedder)
    with pytest.warns(UserWarning, match="1 texts were cut"):
        model.embed(["word " * 5000, "short"])


@pytest.mark.parametrize("arguments", [("generate", "{}", "{}"), ("explain", "{}", "a line"), ("score", "{}", "{}")])
def test_an_embedding_model_does_not_generate(
    arguments: tuple[str, ...], embedder: Path, bench: Path, documents: Path, command: Command
) -> None:
    name, *_, last = arguments
    file = {"generate": str(documents), "score": str(bench / "paraphrases.tsv")}.get(name, last)
    result = command(name, embedder, file)
    assert result.code == 2
    assert "transduce embed" in result.err


def test_metrics_must_fit_the_model() -> None:
    part = {"kind": "recurrent", "width": 16}
    vectors = {
        "tokens": {"shared": True},
        "model": {"encoder": part, "head": {"kind": "embedder"}},
        "training": {"objective": {"kind": "contrastive"}},
        "evaluation": {"metrics": ["bleu"]},
    }
    with pytest.raises(InputError, match="bleu needs a model that writes"):
        resolve(vectors)
    with pytest.raises(InputError, match="head embedder"):
        resolve({"model": {"encoder": part, "decoder": part}, "evaluation": {"metrics": ["recall@1"]}})


def test_files_are_embedded_and_searched(command: Command, tmp_path: Path) -> None:
    write_files("shapes", tmp_path / "shapes", 24, 1)
    pictures = sorted((tmp_path / "shapes").rglob("*.png"))
    small = ["training.steps=2", "training.validate_every=2", "evaluation.resamples=5", "data.dev_size=4"]
    sizes = [
        "data.sources.picture.size=16",
        "model.encoder.width=8",
        "model.decoder.width=8",
        "generation.strategy=greedy",
    ]
    recipe = recipe_for(str(tmp_path / "shapes" / "pairs.tsv"), [*small, *sizes], "caption")
    trained = transduce.train(recipe, tmp_path / "run")
    vectors = tmp_path / "vectors.npy"
    called = command("embed", tmp_path / "run", pictures[0].parent, "--output", vectors)
    assert called.code == 0, called.err
    expected = trained.model.embed(list(map(str, pictures)))
    assert np.load(vectors, allow_pickle=False) == pytest.approx(expected, abs=1e-5)
    found = command("search", tmp_path / "run", pictures[0].parent, pictures[3], "--top", "1", "--json")
    assert json.loads(found.out)["hits"][0]["text"] == str(pictures[3])
