"""Recordings of OpenNMT-py 3."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
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
    "src_vocab": "vocab.src", "tgt_vocab": "vocab.tgt", "save_data": "samples", "overwrite": True,
    "save_model": "model", "save_checkpoint_steps": 400, "train_steps": 400, "enc_layers": 1, "dec_layers": 2,
    "hidden_size": 8, "word_vec_size": 8, "batch_size": 32, "batch_type": "sents", "bucket_size": 200, "optim": "adam",
    "learning_rate": 0.01, "decay_method": "none", "dropout": [0.0], "attention_dropout": [0.0], "seed": 7,
    "num_workers": 0,
}  # fmt: skip
TRANSFORMER = {"encoder_type": "transformer", "decoder_type": "transformer", "heads": 2, "transformer_ff": 12}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("Transformer as by default: relu, no biases", {**TRANSFORMER, "position_encoding": True}),
    "rotary": (
        "Transformer: rotary positions, RMS norm, gated silu, one key-value head, biases",
        {
            **TRANSFORMER, "max_relative_positions": -1, "rotary_interleave": True, "layer_norm": "rms",
            "pos_ffn_activation_fn": "silu", "num_kv": 1, "add_qkvbias": True, "add_ffnbias": True,
        },
    ),
    "lstm": (
        "bidirectional LSTM, attention general",
        {"encoder_type": "brnn", "decoder_type": "rnn", "rnn_type": "LSTM", "enc_layers": 2},
    ),
    "gru": (
        "GRU, attention dot, narrow embeddings",
        {
            "encoder_type": "rnn", "decoder_type": "rnn", "rnn_type": "GRU", "global_attention": "dot",
            "dec_layers": 1, "word_vec_size": 6,
        },
    ),
}  # fmt: skip


def record(work: Path, out: Path) -> None:
    version = importlib.metadata.version("OpenNMT-py")
    for name, (description, options) in SETTINGS.items():
        folder = work / f"opennmt-{name}"
        write_data(folder)
        (folder / "config.yml").write_text(json.dumps({**COMMON, **options}))
        _command("build_vocab", "-config config.yml -n_sample -1", folder)
        _command("train", "-config config.yml", folder)
        recording = Recording("OpenNMT-py", version, description, ["model.pt"], MAX_LENGTH, targets=targets())
        translate = f"-model model_step_400.pt -src test.src -max_length {MAX_LENGTH} -length_penalty none"
        _command("translate", f"{translate} -beam_size 1 -output greedy.txt", folder)
        told = "-output beam.txt -tgt test.tgt -verbose -log_file told.txt"
        _command("translate", f"{translate} -beam_size {BEAM} {told}", folder)
        recording.greedy, recording.beam = (
            (folder / f"{n}.txt").read_text().split("\n")[:-1] for n in ("greedy", "beam")
        )
        recording.scores = [
            float(score) for score in re.findall(r"^GOLD SCORE: (\S+)$", (folder / "told.txt").read_text(), re.M)
        ]
        recording.search = {"length_penalty": 0.0}
        _strip(folder)
        recording.save(out / f"opennmt-{name}", folder)


def _command(name: str, options: str, folder: Path) -> str:
    return run([sys.executable, "-c", COMMAND.format(name), *options.split()], folder)


def _strip(folder: Path) -> None:
    """Without the optimiser, and with 64 instead of 5,000 sinusoidal positions: small enough for a repository."""
    import torch

    content = torch.load(folder / "model_step_400.pt", weights_only=False)
    del content["optim"]
    for name, tensor in content["model"].items():
        if name.endswith("pe.pe"):
            content["model"][name] = tensor[:64].clone()
    torch.save(content, folder / "model.pt")
