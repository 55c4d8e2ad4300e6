"""Export to ONNX: equal logits and outputs in ONNX Runtime, with the documented loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from export_fixtures import make_run, pair, transformer
from safetensors.torch import load_file, save_file

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.interop.export import export
from transduce.interop.onnx import check_model

runtime = pytest.importorskip("onnxruntime")


DOCUMENT = Path(__file__).parents[2] / "docs" / "interop.md"


SECTION = DOCUMENT.read_text().partition("### ONNX")[2].partition("\n###")[0]


LINES = "\n".join(line[4:] for line in SECTION.splitlines() if line.startswith("    "))


SOURCES = [[5, 6, 7, 8, 9, 10, EOS], [9, EOS], [4, 5, 6, EOS]]


RECURRENT = {"kind": "recurrent", "width": 16}


MODELS = {
    "transformer": pair(),
    "recurrent": {"encoder": {**RECURRENT, "cell": "lstm"}, "decoder": {**RECURRENT, "cell": "lstm"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_outputs_equal_the_native_model(name, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", MODELS[name])
    export(run.folder, tmp_path / "model", "onnx")
    assert check_model(tmp_path / "model") < 1e-4
    model = transduce.load(run.folder, device="cpu")
    network = model.network
    start, step = (runtime.InferenceSession(tmp_path / "model" / file) for file in ("encoder.onnx", "step.onnx"))
    for rows in (SOURCES, SOURCES[1:2]):  # other sizes and lengths than the graph was made with
        source = Padded.from_rows(rows)
        state = network.start(Batch(source))
        kept = dict(
            zip(
                [one.name for one in start.get_outputs()],
                start.run(None, {"source": source.values.numpy(), "mask": source.mask.numpy()}),
                strict=True,
            )
        )
        for number in range(6):
            tokens = torch.full((len(source), 1), BOS if number == 0 else 4 + number)
            with torch.no_grad():
                made = network.advance(tokens, state)
            state = made.state
            kept["tokens"] = tokens.numpy()
            logits, *past = step.run(None, {one.name: kept[one.name] for one in step.get_inputs()})
            np.testing.assert_allclose(logits, made.logits[:, -1].numpy(), rtol=1e-4, atol=1e-4)
            kept |= dict(zip([one.name.removeprefix("next.") for one in step.get_outputs()[1:]], past, strict=True))
    compare_documented(model, tmp_path, monkeypatch)


def compare_documented(model: transduce.Model, folder: Path, monkeypatch) -> None:
    """The documented code gives the greedy output; a changed example fails the check."""
    monkeypatch.chdir(folder)
    text = "w1 w2 w3"
    ids = [*model.source.encode_source(text).ids, EOS]
    made: dict = {"source": np.array([ids])}
    exec(compile(LINES, "docs", "exec"), made)
    decoder_ids = [int(tokens[0, 0]) for tokens in made["outputs"]]
    decoder_ids = decoder_ids[: decoder_ids.index(EOS)] if EOS in decoder_ids else decoder_ids
    assert model.target.decode(decoder_ids) == model.generate([text], strategy="greedy", max_length=12)[0].text
    example = load_file("model/check.safetensors")
    example["logits"] += 0.1
    save_file(example, "model/check.safetensors")
    with pytest.raises(InputError, match="differ"):
        check_model("model")


@pytest.mark.slow
def test_language_model_is_exported(tmp_path):
    decoder = transformer(position={"kind": "learned", "max_positions": 40}, layers=1)
    export(make_run(tmp_path / "run", {"decoder": decoder}).folder, tmp_path / "model", "onnx")
    assert (tmp_path / "model" / "start.onnx").exists()
    assert check_model(tmp_path / "model") < 1e-4


def test_embedders_are_refused(tmp_path):
    recipe = {"encoder": transformer(), "head": {"kind": "embedder"}}
    training = {"objective": {"kind": "contrastive"}}
    run = make_run(tmp_path / "run", recipe, training=training, evaluation={"metrics": ["recall@1"]})
    with pytest.raises(InputError, match="models with a decoder"):
        export(run.folder, tmp_path / "model", "onnx")
    assert not (tmp_path / "model").exists()
