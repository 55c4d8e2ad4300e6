"""Speech recognition: synthetic recordings, the chosen recipe, precomputed frames, learning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import transduce
from transduce.autoconfig import recipe_for
from transduce.errors import InputError
from transduce.modalities.audio import Audio, AudioFeatures, extract_features
from transduce.recipe.build import complete_recipe
from transduce.synthetic import write_files
from transduce.training.experiment import train

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sung-digits")
    write_files("sung-digits", folder / "train", 1000, 1)
    write_files("sung-digits", folder / "dev", 20, 2)
    write_files("sung-digits", folder / "test", 50, 1, held_out=True)
    return folder


def lines(pairs: Path) -> list[list[str]]:
    return [line.split("\t") for line in pairs.read_text().splitlines()]


def test_truth_gives_the_time_span_of_each_word(digits: Path) -> None:
    """Recordings are loud inside the spans and quiet between them; held-out digit pairs are new."""
    truth = [json.loads(line)["spans"] for line in (digits / "train" / "truth.jsonl").read_text().splitlines()]
    for (named, text), spans in list(zip(lines(digits / "train" / "pairs.tsv"), truth, strict=True))[:20]:
        samples = Audio(rate=8000).read(str(digits / "train" / named)).astype(float)
        inside = np.zeros(len(samples), bool)
        for begin, end in spans:
            inside[int(begin * 8000) : int(end * 8000)] = True
        assert len(spans) == len(text.split())
        assert samples[inside].std() > 4 * samples[~inside].std()
    follows = [
        {
            pair
            for _, text in lines(digits / name / "pairs.tsv")
            for pair in zip(text.split(), text.split()[1:], strict=False)
        }
        for name in ("train", "test")
    ]
    assert follows[1] - follows[0]


def test_recipe_is_chosen_for_audio_and_for_frames(digits: Path, tmp_path: Path) -> None:
    chosen = complete_recipe(recipe_for(str(digits / "train" / "pairs.tsv"), task="transcribe"))
    assert chosen.data.sources["sound"]["kind"] == "audio"
    assert chosen.data.sources["sound"]["rate"] == 8000
    assert chosen.tokens.target.kind == "words"
    few = tmp_path / "few.tsv"
    few.write_text(
        "".join(f"{digits}/test/{named}\t{text}\n" for named, text in lines(digits / "test" / "pairs.tsv")[:4])
    )
    written = extract_features(few, tmp_path / "frames", rate=8000, mels=20)
    named = complete_recipe(recipe_for(str(written), task="transcribe"))
    assert named.data.sources["sound"]["kind"] == "audio_features"
    assert named.data.sources["sound"]["size"] == 20
    sound, frames = Audio(rate=8000, mels=20), AudioFeatures(size=20)
    first = lines(few)[0][0]
    np.testing.assert_allclose(
        frames.collate([frames.read(f"{written.parent}/{lines(written)[0][0]}")]).values,
        sound.collate([sound.read(first)]).values,
        atol=1e-4,
    )


def test_recipe_is_chosen_for_labels_of_sounds(digits: Path, tmp_path: Path) -> None:
    """Recordings keep their levels, stored frames are normalised; two updates lead to a model that names labels."""
    labels = tmp_path / "labels.tsv"
    spoken = lines(digits / "train" / "pairs.tsv")[:40]
    labels.write_text("".join(f"{digits}/train/{named}\t{text.split()[0]}\n" for named, text in spoken))
    changes = ["training.steps=2", "training.validate_every=2", "training.checkpoint_every=2"]
    recipe = recipe_for(str(labels), [*changes, f"data.cache={tmp_path}/cache"], "classify-audio")
    assert recipe.data.sources["sound"] | {"rate": 8000, "normalise": False} == recipe.data.sources["sound"]
    assert recipe.tokens.target.kind == "labels"
    train(recipe, tmp_path / "run")
    answers = transduce.load(tmp_path / "run").generate([line[0] for line in lines(labels)[:2]])
    assert {answer.text for answer in answers} <= {label for _, label in lines(labels)}
    frames = extract_features(labels, tmp_path / "frames", rate=8000, mels=20)
    assert "normalise" not in recipe_for(str(frames), task="classify-audio").data.sources["sound"]


def test_unreadable_recordings_are_reported(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("nothing.wav\tone\n")
    with pytest.raises(InputError, match="not a readable audio file"):
        recipe_for(str(pairs), task="transcribe")
    with pytest.raises(InputError, match="no such audio file"):
        extract_features(pairs, tmp_path / "frames")


@pytest.mark.parametrize(
    "path", sorted([*RECIPES.glob("an4/*.yaml"), *RECIPES.glob("fsdd/*.yaml")]), ids=lambda p: p.stem
)
def test_stored_recipes_run_from_frames_to_a_score(path: Path, digits: Path, tmp_path: Path) -> None:
    """Two updates of a narrower model."""
    few = tmp_path / "few.tsv"
    few.write_text(
        "".join(f"{digits}/train/{named}\t{text}\n" for named, text in lines(digits / "train" / "pairs.tsv")[:12])
    )
    size = yaml.safe_load(path.read_text())["data"]["sources"]["sound"]["size"]
    written = extract_features(few, tmp_path / "frames", rate=8000, mels=size)
    changes = ["training.steps=2", "training.validate_every=2", "training.checkpoint_every=2", "data.dev_size=4"]
    changes += ["generation.beam=2", "generation.max_length=5", "model.encoder.width=16", "model.encoder.layers=1"]
    changes += ["model.decoder.width=16"] if "decoder" in yaml.safe_load(path.read_text())["model"] else []
    files = [f"data.train={written}", f"data.test={written}", f"data.cache={tmp_path}/cache"]
    run = train(recipe_for(str(path), [*changes, *files]), tmp_path / "run")
    assert run is not None
    assert transduce.load(tmp_path / "run").generate([f"{written.parent}/frames.npz#0"])


@pytest.mark.slow
def test_model_learns_digits_and_attends_to_their_time_spans(digits: Path, tmp_path: Path) -> None:
    """The test set has digit pairs that do not occur in training; each row of the memory covers 85 ms.

    Location-aware attention (Chorowski 2015) is needed: without it the decoder cannot tell where the next word
    begins. With five seeds the attention peak lay within the word for 93 to 99 of 100 words.
    """
    files = {name: f"{digits}/{name}/pairs.tsv" for name in ("train", "dev", "test")} | {"cache": f"{tmp_path}/cache"}
    encoder = {"kind": "convolutional", "width": 64, "layers": 1, "kernel": 1, "position": "sinusoidal", "dropout": 0.0}
    context = {"kind": "bahdanau", "score": "location"}
    decoder = {"kind": "recurrent", "width": 64, "context": context, "dropout": 0.0}
    recipe = {
        "data": {**files, "sources": {"sound": {"kind": "audio", "rate": 8000, "mels": 24}}},
        "tokens": {"target": {"kind": "words"}},
        "model": {
            "encoder": {**encoder, "front": {"kind": "conv_subsampling"}},
            "decoder": decoder,
            "ctc": {},
        },
        "training": {
            "steps": 250,
            "batch_tokens": 3200,
            "optimiser": {"learning_rate": 6e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": 250,
            "validate_examples": 20,
            "objective": {"kind": "joint_ctc", "label_smoothing": 0.0},
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["wer"]},
    }
    train(recipe, tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert scores["test"]["scores"]["wer"]["value"] < 12
    model = transduce.load(tmp_path / "run")
    inside, total = attended_words(model, digits / "test")
    assert total > 90
    assert inside / total >= 0.9


def attended_words(model: transduce.Model, folder: Path) -> tuple[int, int]:
    """(inside, total): words of correct outputs, and those among them whose attention peak lies in their time span."""
    truth = [json.loads(line)["spans"] for line in (folder / "truth.jsonl").read_text().splitlines()]
    inside = total = 0
    for (named, text), spans in zip(lines(folder / "pairs.tsv"), truth, strict=True):
        explained = model.explain(str(folder / named))
        if explained.output == text:
            (visual,) = explained.visual_sources
            row = visual.extent / visual.grid[1]  # seconds
            for weights, (begin, end) in zip(explained.map().weights, spans, strict=False):  # S; without </s>
                inside += begin <= (weights.argmax() + 0.5) * row <= end
                total += 1
    return inside, total
