"""Several sources on the command line: generation, embedding, evaluation, explanation, training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from run_fixtures import Command

import transduce
from transduce.synthetic import SYNTHETIC, generate, write_files

TEXT_ENCODER = {"kind": "recurrent", "width": 16, "dropout": 0.0}
IMAGE_ENCODER = {"kind": "identity", "width": 16, "dropout": 0.0, "front": {"kind": "patches", "patch_size": 16}}
QUICK = {"steps": 4, "batch_tokens": 1024, "validate_every": 4, "checkpoint_every": 4}


def settings(pairs: Path, sources: dict, parts: dict, **tokens) -> dict:
    return {
        "data": {"train": str(pairs), "sources": sources, "dev_size": 8},
        "tokens": {side: {"kind": "words"} for side in ("source", "target")} | tokens,
        "model": {"encoder": {"kind": "multi_source", "width": 16, "parts": parts}, "decoder": TEXT_ENCODER},
        "training": QUICK,
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }


@pytest.fixture(scope="module")
def vqa_run(bench: Path) -> Path:
    write_files("colour-questions", bench / "questions", 60, 1)
    recipe = settings(
        bench / "questions" / "pairs.tsv",
        {"picture": {"kind": "image", "size": 32}, "question": "text"},
        {"picture": IMAGE_ENCODER, "question": TEXT_ENCODER},
    )
    transduce.train(recipe, bench / "vqa-run")
    return bench / "vqa-run"


def lines(folder: Path, count: int) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()[:count]]


def test_generate_reads_a_file_of_sources(command: Command, vqa_run: Path, bench: Path) -> None:
    inputs = bench / "inputs.tsv"
    inputs.write_text(
        "".join(f"{bench / 'questions' / name}\t{question}\n" for name, question, _ in lines(bench / "questions", 7))
    )
    called = command("generate", vqa_run, inputs, "--json")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 7
    assert all("text" in json.loads(line) for line in called.out.splitlines())


def test_file_names_are_relative_to_the_folder_of_the_file(command: Command, vqa_run: Path, bench: Path) -> None:
    beside = bench / "questions" / "inputs.tsv"
    beside.write_text("".join(f"{name}\t{question}\n" for name, question, _ in lines(bench / "questions", 3)))
    called = command("generate", vqa_run, beside)
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 3


def test_embedding_depends_on_both_sources(vqa_run: Path, bench: Path) -> None:
    (first, question, _), (other, _, _) = lines(bench / "questions", 2)
    texts = [
        f"{bench / 'questions' / name}\t{text}"
        for name, text in ((first, question), (other, question), (first, "red ?"))
    ]
    vectors = transduce.load(vqa_run).embed(texts)
    assert vectors.shape == (3, 16)
    assert all(abs(vectors[0] - one).max() > 1e-4 for one in vectors[1:])


def test_line_with_too_few_sources_is_reported(command: Command, vqa_run: Path, bench: Path) -> None:
    picture = bench / "questions" / lines(bench / "questions", 1)[0][0]
    called = command("generate", vqa_run, stdin=f"{picture}\n".encode())
    assert called.code == 2
    assert "1 of 2 sources (picture, question)" in called.err
    for verb in ("generate", "explain"):
        called = command(verb, vqa_run, picture)
        assert called.code == 2
        assert "one file, but this model reads picture and question" in called.err


def test_pairs_are_evaluated(command: Command, vqa_run: Path, bench: Path) -> None:
    called = command("evaluate", vqa_run, bench / "questions" / "pairs.tsv", "--json", bench / "judged.json")
    assert called.code == 0, called.err
    assert json.loads((bench / "judged.json").read_text())["count"] == 60


def test_rows_of_both_sources_are_explained(command: Command, vqa_run: Path, bench: Path) -> None:
    name, question, _ = lines(bench / "questions", 1)[0]
    source = f"{bench / 'questions' / name}\t{question}"
    explained = transduce.load(vqa_run).explain(source)
    words = question.split()
    assert list(explained.source_tokens) == ["1,1", "1,2", "2,1", "2,2", *words, "</s>"]
    assert explained.attention.shape[-1] == 4 + len(words) + 1
    assert explained.attention.sum(-1) == pytest.approx(1, abs=1e-4)
    assert [(visual.begin, visual.grid) for visual in explained.visual_sources] == [(0, (2, 2))]
    called = command("explain", vqa_run, source)
    assert called.code == 0, called.err
    assert question in called.out


def test_recipe_is_chosen_by_task(command: Command, vqa_run: Path, bench: Path) -> None:
    changes = [f"training.{name}={value}" for name, value in QUICK.items()]
    narrow = ("model.encoder.width=16", "model.encoder.parts.picture.width=16", "model.encoder.parts.question.width=16")
    line = (
        "train",
        bench / "questions" / "pairs.tsv",
        "--task",
        "vqa",
        "--run",
        bench / "vqa",
        *changes,
        *narrow,
    )
    called = command(*line, "model.decoder.width=16", "model.decoder.ff_width=16", "data.dev_size=8")
    assert called.code == 0, called.err
    saved = yaml.safe_load((bench / "vqa" / "recipe.yaml").read_text())
    assert list(saved["data"]["sources"]) == list(saved["model"]["encoder"]["parts"]) == ["picture", "question"]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_context_and_question_are_two_text_sources(kind: str, command: Command, bench: Path) -> None:
    """Each has its own encoder, and both can be copied from."""
    pairs = bench / f"context-{kind}.tsv"
    pairs.write_text("".join(f"{one.source}\t{one.target}\n" for one in generate("questions", 80)))
    both = {"context": TEXT_ENCODER, "question": {**TEXT_ENCODER, "bidirectional": False}}
    recipe = settings(pairs, dict.fromkeys(both, "text"), both, shared=True, source={"kind": kind, "size": 300})
    recipe["tokens"]["target"] = recipe["tokens"]["source"]
    recipe["model"]["copy"] = {}
    transduce.train(recipe, bench / f"context-{kind}")
    context, question, _ = pairs.read_text().splitlines()[0].split("\t")
    model = transduce.load(bench / f"context-{kind}")
    explained = model.explain(f"{context}\t{question}")
    assert [place for place, token in enumerate(explained.source_tokens) if token == "</s>"] == [
        model.source_encoding.encode([f"{context}\t{question}"])[0].rows[0] - 1,
        len(explained.source_tokens) - 1,
    ]
    scored = model.score([(f"{context}\t{question}", "kitchen"), (f"{question}\t{context}", "kitchen")])
    assert scored[0].score != scored[1].score


def test_translation_from_two_languages(bench: Path) -> None:
    """Two text sources, German and French, each with its own encoder."""
    pairs = bench / "two-languages.tsv"
    numbers = [("eins", "un", "one"), ("zwei", "deux", "two"), ("drei", "trois", "three"), ("vier", "quatre", "four")]
    pairs.write_text("".join("\t".join(numbers[place % 4]) + "\n" for place in range(80)))
    dev = bench / "two-languages-dev.tsv"
    dev.write_text("".join("\t".join(number) + "\n" for number in numbers))
    block = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "ff_width": 16, "dropout": 0.0}
    recipe = settings(pairs, {"german": "text", "french": "text"}, {"german": block, "french": TEXT_ENCODER})
    recipe["training"] = {**QUICK, "steps": 60, "optimiser": {"learning_rate": 1e-2}, "schedule": {"warmup": 5}}
    recipe["data"] = {"train": str(pairs), "dev": str(dev), "sources": recipe["data"]["sources"]}
    transduce.train(recipe, bench / "two-languages")
    model = transduce.load(bench / "two-languages")
    found = model.generate([f"{german}\t{french}" for german, french, _ in numbers])
    assert [one.text for one in found] == [english for *_, english in numbers]


def test_data_command_writes_file_datasets(command: Command, bench: Path) -> None:
    listed = command("data")
    assert all(f"{name} " in listed.out for name, dataset in SYNTHETIC.items() if dataset.writes_files)
    written = command("data", "icons", "--count", "5", "--output", bench / "icons")
    assert written.code == 0, written.err
    assert len((bench / "icons" / "pairs.tsv").read_text().splitlines()) == 5
    refused = command("data", "icons")
    assert refused.code == 2
    assert "--output" in refused.err


def test_images_are_encoded_as_tokens_and_decoded(command: Command, bench: Path) -> None:
    command("data", "icons", "--count", "20", "--output", bench / "drawings")
    called = command(
        "encode-images",
        bench / "drawings" / "pairs.tsv",
        "--size",
        "8",
        "--codebook-size",
        "9",
        "--output",
        bench / "drawn",
    )
    assert called.code == 0, called.err
    pairs = [line.split("\t") for line in (bench / "drawn" / "pairs.tsv").read_text().splitlines()]
    assert len(pairs) == 20
    assert all(text.startswith("a ") and len(pixels.split()) == 64 for text, pixels in pairs)
    lined = "".join(f"{pixels}\n" for _, pixels in pairs) + "c0 c1\n"
    palette = bench / "drawn" / "palette.json"
    called = command("decode-images", "--tokenizer", palette, "--output", bench / "made", stdin=lined.encode())
    assert called.code == 0, called.err
    assert "unknown colours: 1" in called.err
    assert sorted(path.name for path in (bench / "made").iterdir())[-1] == "all.png"
    assert len(list((bench / "made").iterdir())) == 22
    again = command(
        "encode-images", bench / "drawings" / "pairs.tsv", "--tokenizer", palette, "--output", bench / "again"
    )
    assert again.code == 0, again.err
    assert (bench / "again" / "pairs.tsv").read_text() == (bench / "drawn" / "pairs.tsv").read_text()


def test_missing_image_is_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("none.png\ta red circle\n")
    called = command("encode-images", tmp_path / "pairs.tsv", "--output", tmp_path / "out")
    assert called.code == 2
    assert "pairs.tsv:1" in called.err
    (tmp_path / "pairs.tsv").write_text("none.png\n")
    assert command("encode-images", tmp_path / "pairs.tsv", "--output", tmp_path / "out").code == 2
