"""Import, training with all weights or with adapters, and export to the transformers library."""

from __future__ import annotations

import json
import random

import pytest
import torch
from huggingface_fixtures import WORDS, make
from torch.testing import assert_close
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.run import Run

library = pytest.importorskip("transformers")


def invoke(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("bart", ["training.optimiser.learning_rate=0.003"]),
        ("marian", ["training.optimiser.learning_rate=0.02", "training.adapters.rank=4"]),
    ],
)
def test_fine_tuned_model_is_exported(family, ways, tmp_path):
    make(family, tmp_path / "given")
    invoke("convert", tmp_path / "given", tmp_path / "run")
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS[:6], k=draw.randint(1, 3))) for _ in range(300)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    settings = {
        "init.model": tmp_path / "run",
        "data.cache": tmp_path / "cache",
        "training.steps": 60,
        "training.batch_tokens": 400,
        "training.validate_every": 30,
        "training.device": "cpu",
        "evaluation.resamples": 10,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    invoke("train", tmp_path / "pairs.tsv", *words, *ways, "--run", tmp_path / "tuned", "-q")
    log = [json.loads(line) for line in Run(tmp_path / "tuned").log.read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], losses
    invoke("export", tmp_path / "tuned", tmp_path / "back", "--to", "huggingface")
    model = transduce.load(tmp_path / "tuned", device="cpu")
    there = library.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", local_files_only=True).eval()
    tokens = library.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    batch = tokens(lines[:5], padding=True, return_tensors="pt")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    decoder_ids = torch.tensor([[6, 9, 7]] * 5)
    start = torch.full((5, 1), there.config.decoder_start_token_id)
    rows = torch.tensor(model.target.vocabulary.backend_ids)
    native = Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(lines[:5])])
    with torch.no_grad():
        step = model.network.advance(
            torch.cat((torch.full((5, 1), BOS), decoder_ids), 1), model.network.start(Batch(native))
        )
        found = there(**batch, decoder_input_ids=torch.cat((start, rows[decoder_ids]), 1)).logits
        made = there.generate(**batch, max_length=12, num_beams=1)
    known = torch.tensor([number for number, row in enumerate(rows.tolist()) if row >= 0 and number != BOS])
    assert_close(found[..., rows[known]], step.logits[..., known], rtol=1e-4, atol=1e-4)
    texts = [one.text for one in model.generate(lines[:5], strategy="greedy", max_length=11)]
    assert tokens.batch_decode(made, skip_special_tokens=True) == texts
    again = transduce.load(tmp_path / "back", device="cpu")
    assert [one.text for one in again.generate(lines[:5], strategy="greedy", max_length=11)] == texts
