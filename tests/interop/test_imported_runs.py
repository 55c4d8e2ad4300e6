"""What was imported is a run like any other: written, opened, scored, explained, trained further."""

from __future__ import annotations

import json
import random

import pytest
import torch
from interop_fixtures import WORDS, make
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.run import Run


@pytest.mark.parametrize("family", ["marian", "bart", "t5", "gpt2", "bert"])
def test_converted_as_loaded(family, tmp_path):
    make(family, tmp_path / "given")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "given"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "run")
    direct, run = transduce.load(tmp_path / "given", device="cpu"), transduce.load(tmp_path / "run", device="cpu")
    assert direct.recipe == run.recipe
    assert direct.source.fingerprint == run.source.fingerprint
    ours = run.network.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in direct.network.state_dict().items())


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_searched_scored_and_explained(family, tmp_path):
    make(family, tmp_path, generation={"num_beams": 3, "max_length": 12})
    model = transduce.load(tmp_path, device="cpu")
    one = model.generate(["w1 w2 w3"])[0]
    scores = model.score([("w1 w2 w3", "w4 w5")])[0]
    assert len(scores.tokens) == 3 + len(model.target.prefix)
    assert one.explanation is not None
    packed = transduce.load(tmp_path, device="cpu", precision="fp32").generate(["w1 w2 w3"])[0]
    assert packed.text == one.text


@pytest.mark.parametrize("converted", [True, False])
def test_trained_further(tmp_path, monkeypatch, converted):
    """A random model learns to copy its source from imported weights: the loss falls. It need not be converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    make("bart", tmp_path / "given")
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "given"), str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS[:6], k=draw.randint(1, 3))) for _ in range(400)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    settings = [
        f"init.model={tmp_path / ('run' if converted else 'given')}",
        f"data.cache={tmp_path / 'cache'}",
        f"training.steps={120 if converted else 40}",
        "training.batch_tokens=400",
        "training.validate_every=30",
        "training.optimiser.learning_rate=0.003",
        "training.device=cpu",
    ]
    again = CliRunner().invoke(
        app, ["train", str(tmp_path / "pairs.tsv"), *settings, "--run", str(tmp_path / "tuned"), "-q"]
    )
    assert again.exit_code == 0, again.output
    tuned, given = Run(tmp_path / "tuned"), Run(tmp_path / "run")
    assert tuned.tokenizers()[0].fingerprint == given.tokenizers()[0].fingerprint
    assert tuned.recipe().model == given.recipe().model
    assert tuned.recipe().generation == given.recipe().generation
    assert len(list((tmp_path / "kept").rglob("recipe.yaml"))) == (0 if converted else 1)
    if not converted:
        return
    losses = [entry["loss"] for entry in _log(tuned) if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0], losses


def _log(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.log.read_text().splitlines()]
