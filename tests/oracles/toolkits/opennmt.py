"""Recordings of OpenNMT-py: version 3, and versions 1 and 2, whose vocabularies are objects of torchtext."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import BEAM, Recording, run, targets, write_data

MAX_LENGTH = 21
# Its checkpoints hold options as objects, which PyTorch refuses by default since 2.6.
COMMAND = (
    "import functools, sys, torch; torch.load = functools.partial(torch.load, weights_only=False); "
    "torch.set_num_threads(1); from onmt.bin.{0} import main; sys.argv = ['{0}', *sys.argv[1:]]; main()"
)
COMMON = {
    "data": {"pairs": {"path_src": "train.src", "path_tgt": "train.tgt"}},
    "src_vocab": "./vocab.src", "tgt_vocab": "./vocab.tgt", "save_data": "./samples", "overwrite": True,
    "save_model": "./model", "save_checkpoint_steps": 400, "train_steps": 400, "enc_layers": 1, "dec_layers": 2,
    "hidden_size": 8, "word_vec_size": 8, "batch_size": 32, "batch_type": "sents", "bucket_size": 200, "optim": "adam",
    "learning_rate": 0.01, "decay_method": "none", "dropout": [0.0], "attention_dropout": [0.0], "seed": 7,
    "num_workers": 0,
}  # fmt: skip
TRANSFORMER = {"encoder_type": "transformer", "decoder_type": "transformer", "heads": 2, "transformer_ff": 12}


@dataclass(frozen=True)
class Setting:
    """One model: its version of the toolkit, and options that differ from `COMMON`."""

    description: str
    options: dict[str, Any]
    version: str = "3.5.1"


GRU = {"encoder_type": "rnn", "decoder_type": "rnn", "rnn_type": "GRU", "dec_layers": 1}
SETTINGS = {
    "transformer": Setting("Transformer as by default: relu, no biases", {**TRANSFORMER, "position_encoding": True}),
    "rotary": Setting(
        "Transformer: rotary positions, RMS norm, gated silu, one key-value head, biases",
        {
            **TRANSFORMER, "max_relative_positions": -1, "rotary_interleave": True, "layer_norm": "rms",
            "pos_ffn_activation_fn": "silu", "num_kv": 1, "add_qkvbias": True, "add_ffnbias": True,
        },
    ),
    "lstm": Setting(
        "bidirectional LSTM, attention general",
        {"encoder_type": "brnn", "decoder_type": "rnn", "rnn_type": "LSTM", "enc_layers": 2},
    ),
    "gru": Setting("GRU, attention dot, narrow embeddings", {**GRU, "global_attention": "dot", "word_vec_size": 6}),
    "version-1": Setting(
        "bidirectional LSTM, attention mlp, bridge",
        {"encoder_type": "brnn", "global_attention": "mlp", "bridge": True, "enc_layers": 2},
        "1.2.0",
    ),
    "version-2": Setting("Transformer, tied output", {**TRANSFORMER, "position_encoding": True,
                                                      "share_decoder_embeddings": True}, "2.3.0"),
}  # fmt: skip


def record(work: Path, out: Path) -> None:
    for name, setting in SETTINGS.items():
        folder = work / f"opennmt-{name}"
        write_data(folder)
        _train(setting, folder)
        recording = Recording(
            "OpenNMT-py", setting.version, setting.description, ["model.pt"], MAX_LENGTH, targets=targets()
        )
        # One sentence at a time: before version 3 a bridge over several layers mixes the sentences of a batch.
        alone = f"-batch_size 1 -max_length {MAX_LENGTH} -length_penalty none"
        translate = f"-model model_step_400.pt -src test.src {alone}"
        _command(setting, "translate", f"{translate} -beam_size 1 -output greedy.txt", folder)
        told = "-output beam.txt -tgt test.tgt -verbose -log_file told.txt"
        _command(setting, "translate", f"{translate} -beam_size {BEAM} {told}", folder)
        recording.greedy, recording.beam = (
            (folder / f"{n}.txt").read_text().split("\n")[:-1] for n in ("greedy", "beam")
        )
        recording.scores = [
            float(score) for score in re.findall(r"^GOLD SCORE: (\S+)$", (folder / "told.txt").read_text(), re.M)
        ][: len(recording.targets)]  # version 2 prints a sum too
        recording.search = {"length_penalty": 0.0}
        run([sys.executable, "-c", STRIP], folder, **_paths(setting))
        recording.save(out / f"opennmt-{name}", folder)


def _train(setting: Setting, folder: Path) -> None:
    """Version 1 has another way to prepare data, and no `data` in its configuration."""
    content = {**COMMON, **setting.options}
    if setting.version[0] in "12":
        content["rnn_size"] = content.pop("hidden_size")
    if setting.version[0] == "1":
        files = "-train_src train.src -train_tgt train.tgt -valid_src train.src -valid_tgt train.tgt -save_data data"
        _command(setting, "preprocess", files, folder)
        kept = set(content) - {"data", "src_vocab", "tgt_vocab", "save_data", "overwrite", "bucket_size", "num_workers"}
        content = {"data": "data", **{name: content[name] for name in kept}}
    (folder / "config.yml").write_text(json.dumps(content))
    if setting.version[0] != "1":
        _command(setting, "build_vocab", "-config config.yml -n_sample -1", folder)
    _command(setting, "train", "-config config.yml", folder)


def _paths(setting: Setting) -> dict[str, str]:
    """Where install.py puts older versions, with their torchtext."""
    folder = Path(sys.prefix) / f"OpenNMT-py-{setting.version}"
    return {"PYTHONPATH": str(folder)} if folder.exists() else {}


def _command(setting: Setting, name: str, options: str, folder: Path) -> str:
    return run([sys.executable, "-c", COMMAND.format(name), *options.split()], folder, **_paths(setting))


# Without the optimiser, and with 64 instead of 5,000 sinusoidal positions: small enough for a repository.
STRIP = """
import torch
content = torch.load("model_step_400.pt", weights_only=False)
del content["optim"]
for name, tensor in content["model"].items():
    if name.endswith("pe.pe"):
        content["model"][name] = tensor[:64].clone()
torch.save(content, "model.pt")
"""
