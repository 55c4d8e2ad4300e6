"""Export to ONNX: graphs equal to the native model; logits and outputs of ONNX Runtime, with the documented loop.

Every kind of model runs through the graphs as PyTorch modules. RECORD_ONNX=FILE also exports each and keeps the
differences that ONNX Runtime shows, for docs/interop.md; without it, a few are exported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from export_fixtures import make_run, pair, transformer
from safetensors.torch import load_file, save_file

import transduce
from transduce.errors import InputError
from transduce.interop import onnx
from transduce.interop.export import export
from transduce.interop.huggingface.weights import ExportRows
from transduce.interop.onnx import check_model
from transduce.interop.onnx_graphs import TokenIds, quantise

runtime = pytest.importorskip("onnxruntime")
DOCUMENT = Path(__file__).parents[2] / "docs" / "interop.md"
SECTION = DOCUMENT.read_text().partition("### ONNX")[2].partition("\n###")[0]
LINES = "\n".join(line[4:] for line in SECTION.splitlines() if line.startswith("    "))
RECURRENT = {"kind": "recurrent", "width": 16, "layers": 1}
IMAGE = {"kind": "image", "size": 8, "channels": 1}
SOUND = {"kind": "audio_features", "size": 6}
PATCHES = {"kind": "patches", "patch_size": 4}


def recurrent(context: str, **changes) -> dict:
    return {"encoder": dict(RECURRENT), "decoder": {**RECURRENT, "context": {"kind": context, **changes}}}


def read_by(front: dict, **changes) -> dict:
    return {"encoder": {**transformer(layers=1), "front": front}, "decoder": transformer(layers=1), **changes}


MODELS: dict[str, tuple[dict, dict]] = {  # name in the table -> model, sources
    "Transformer": (pair(layers=1), {}),
    "Transformer, rotary positions, one key-value head": (pair(layers=1, position={"kind": "rotary"}, kv_heads=1), {}),
    "Transformer with copying": ({**pair(layers=1), "copy": {}, "tie": "none"}, {}),
    "SSRU": ({"encoder": transformer(layers=1), "decoder": transformer(layers=1, token_mixer="ssru")}, {}),
    "average attention": ({"encoder": transformer(layers=1), "decoder": transformer(token_mixer="average")}, {}),
    "GRU, Luong": (recurrent("luong"), {}),
    "GRU, Luong without input feeding": (recurrent("luong", input_feeding=False), {}),
    "GRU, Bahdanau": (recurrent("bahdanau"), {}),
    "GRU, summary at every step": (recurrent("every_step"), {}),
    "LSTM": ({"encoder": {**RECURRENT, "cell": "lstm"}, "decoder": {**RECURRENT, "cell": "lstm"}}, {}),
    "convolutional": (
        {side: {"kind": "convolutional", "width": 16, "layers": 1} for side in ("encoder", "decoder")},
        {},
    ),
    "decoder-only Transformer": ({"decoder": transformer(layers=1)}, {}),
    "decoder-only GRU": ({"decoder": {**RECURRENT, "context": {"kind": "initial"}}}, {}),
    "images, Transformer": (read_by(PATCHES), {"picture": IMAGE}),
    "frames of sound, Transformer": (read_by({"kind": "conv_subsampling", "strides": (2,)}), {"sound": SOUND}),
    "frames of sound, GRU": (
        {"encoder": {**RECURRENT, "front": {"kind": "frame_stacking"}}, "decoder": RECURRENT},
        {"sound": SOUND},
    ),
    "image and question": (
        {
            "encoder": {
                "kind": "multi_source",
                "width": 16,
                "parts": {"picture": {**transformer(layers=1), "front": PATCHES}, "question": transformer(layers=1)},
            },
            "decoder": transformer(layers=1),
        },
        {"picture": IMAGE, "question": "text"},
    ),
    "tagger": ({"encoder": transformer(layers=1), "head": {"kind": "tagger"}}, {}),
    "embedder": ({"encoder": transformer(layers=1), "head": {"kind": "embedder"}}, {}),
}


def make_model(folder: Path, name: str) -> transduce.Model:
    recipe, sources = MODELS[name]
    sections: dict = {
        "data": {"format": "pairs" if recipe.get("encoder") else "text", "max_length": 20, "sources": sources}
    }
    if "head" in recipe:
        embeds = recipe["head"]["kind"] == "embedder"
        sections["training"] = {"objective": {"kind": "contrastive" if embeds else "cross_entropy"}}
        sections["evaluation"] = {"metrics": ["recall@1" if embeds else "accuracy"]}
    return transduce.load(make_run(folder, recipe, **sections).folder, device="cpu")


def run_modules(graphs: Sequence[onnx.Graph], inputs: dict, tokens: torch.Tensor) -> torch.Tensor:
    """The graphs as modules of PyTorch: the first three tokens at once where they can be, then one by one."""
    by_file = {graph.file: graph for graph in graphs}
    state = dict(inputs)

    def run(file: str, *given) -> dict:
        graph = by_file[file]
        names = graph.inputs[len(given) :]
        return dict(zip(graph.outputs, graph.module(*given, tuple(state[name] for name in names)), strict=True))

    if not tokens.numel():
        return next(iter(run(onnx.WHOLE).values()))
    if onnx.ENCODER in by_file:
        found = run(onnx.ENCODER)
        state |= {"encoder_attention_mask": state.get("attention_mask"), **found}
        state["encoder_hidden_states"] = found["last_hidden_state"]
    several = onnx.WHOLE in by_file or by_file[onnx.FIRST].examples[0][0].size(1) > 1
    if onnx.WHOLE in by_file:  # an empty cache
        cache = by_file[onnx.WHOLE].examples[0][1]
        state |= {
            name: tensor[:1, :, :0].expand(len(tokens), -1, -1, -1)
            for name, tensor in zip(by_file[onnx.WHOLE].inputs[1:], cache, strict=True)
        }
    logits = []
    for begin, end in [
        (0, 3 if several else 1),
        *((one, one + 1) for one in range(3 if several else 1, tokens.size(1))),
    ]:
        first = begin == 0 and onnx.FIRST in by_file
        file = onnx.FIRST if first else onnx.WHOLE if onnx.WHOLE in by_file else onnx.NEXT
        found = run(file, tokens[:, begin:end])
        logits.append(found.pop("logits"))
        state |= {name.replace("present", "past_key_values"): tensor for name, tensor in found.items()}
    return torch.cat(logits, 1)


def keep(file: Path, name: str, folder: Path) -> None:
    """Exports the run of a folder, and adds the differences of ONNX Runtime to a record."""
    export(folder / "run", folder / "fp32", "onnx")
    shutil.copytree(folder / "fp32", folder / "int8")
    precisions = ["fp32", "int8"]
    try:
        for graph in (folder / "int8").glob("*.onnx"):
            quantise(graph)
    except InputError:  # refused: the page says so
        precisions.remove("int8")
    config = json.loads((folder / "int8" / onnx.CONFIG).read_text())
    config["transduce"]["precision"] = "int8"
    (folder / "int8" / onnx.CONFIG).write_text(json.dumps(config))
    content = json.loads(file.read_text()) if file.exists() else {}
    content[name] = {precision: check_model(folder / precision) for precision in precisions}
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("name", MODELS)
def test_graphs_equal_the_native_model(name, tmp_path):
    model = make_model(tmp_path / "run", name)
    graphs, example = onnx.make_graphs(model, onnx.Vocabularies.of(model), "here")
    with torch.no_grad():
        for rows in (slice(None), slice(1, 2)):  # a row alone, with padding
            inputs = {name: tensor[rows] for name, tensor in example.inputs.items()}
            made = run_modules(graphs, inputs, example.tokens[rows])
            torch.testing.assert_close(made, example.logits[rows], rtol=1e-4, atol=1e-4)
    if place := os.environ.get("RECORD_ONNX"):
        keep(Path(place), name, tmp_path)


def test_images_and_frames_have_the_axes_of_transformers(tmp_path):
    for name, key, shape in (
        ("images, Transformer", "pixel_values", (3, 1, 8, 8)),
        ("frames of sound, GRU", "input_features", (3, 6, 7)),
    ):
        model = make_model(tmp_path / key, name)
        graphs, example = onnx.make_graphs(model, onnx.Vocabularies.of(model), "here")
        assert example.inputs[key].shape == shape
        # Fixed sizes need no mask; frames of different lengths do.
        assert ("attention_mask" in graphs[0].inputs) == (key == "input_features")


def test_ids_of_the_tokenizer_are_read_and_written_in_its_order():
    rows = ExportRows(
        (1, 3, 3, 0, 5, 4), 7
    )  # <pad> <s> </s> <unk> and two pieces; the start token is </s>, 2 and 6 are free
    ids = TokenIds(rows)
    assert ids.read(torch.tensor([3, 5, 0]), "source").tolist() == [2, 4, 3]
    assert ids.read(torch.tensor([3, 5, 0]), "target").tolist() == [1, 4, 3]
    ordered = ids.order(torch.tensor([[10.0, 11, 12, 13, 14, 15]]))[0].tolist()
    assert ordered[:2] + ordered[3:6] == [13, 10, 12, 15, 14]
    assert max(ordered[2], ordered[6]) < -1000
    assert ids.foreign(torch.tensor([2, 5])).tolist() == [3, 4]


@pytest.mark.slow
def test_logits_and_outputs_equal_in_onnx_runtime(tmp_path, monkeypatch):
    model = make_model(tmp_path / "run", "Transformer")
    export(tmp_path / "run", tmp_path / "model", "onnx")
    assert check_model(tmp_path / "model") < 1e-4
    compare_documented(model, tmp_path, monkeypatch)


def compare_documented(model: transduce.Model, folder: Path, monkeypatch) -> None:
    """The documented code gives the greedy output; a changed example fails the check."""
    monkeypatch.chdir(folder)
    text = "w1 w2 w3"
    made: dict = {"text": text}
    exec(compile(LINES, "docs", "exec"), made)
    assert made["tokenizer"].decode(made["outputs"]) == model.generate([text], strategy="greedy", max_length=12)[0].text
    example = load_file("model/check.safetensors")
    example["logits"] += example["logits"].abs().max() / 10
    save_file(example, "model/check.safetensors")
    with pytest.raises(InputError, match="differ"):
        check_model("model")


@pytest.mark.slow
def test_layers_of_torch_are_exported_twice_in_a_process(tmp_path):
    """PyTorch changes how it traces a GRU after the first export."""
    make_model(tmp_path / "run", "decoder-only GRU")
    for number in range(2):
        export(tmp_path / "run", tmp_path / f"model{number}", "onnx", precision=("fp32", "int8")[number])
    assert check_model(tmp_path / "model0") < 1e-4
    assert 0 < check_model(tmp_path / "model1") < onnx.TOLERANCE["int8"]


def test_unknown_precision_is_refused(tmp_path):
    make_model(tmp_path / "run", "Transformer")
    with pytest.raises(InputError, match="no precision bf16"):
        export(tmp_path / "run", tmp_path / "model", "onnx", precision="bf16")
    assert not (tmp_path / "model").exists()
