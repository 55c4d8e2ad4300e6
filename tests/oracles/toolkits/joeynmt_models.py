"""Recordings of JoeyNMT."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from data import BEAM, Recording, run, targets, write_data

MAX_LENGTH = 21
# Its checkpoints hold more than tensors, which PyTorch refuses by default since 2.6; the optimiser's state is not kept,
# and the second setting is written as PyTorch did before 1.6.
COMMAND = (
    "import functools, sys, torch; torch.load = functools.partial(torch.load, weights_only=False); save = torch.save; "
    "torch.save = lambda content, path: save({{**content, 'optimizer_state': {{}}, 'scheduler_state': None, "
    "'train_iter_state': None}}, path, _use_new_zipfile_serialization={0}); "
    "torch.set_num_threads(1); from joeynmt.__main__ import main; main()"
)
EMBEDDINGS = {"embedding_dim": 8, "scale": True, "dropout": 0.0}
TRANSFORMER = {"type": "transformer", "num_layers": 1, "num_heads": 2, "hidden_size": 8, "ff_size": 12, "dropout": 0.0}
NARROW = {"embedding_dim": 6, "scale": False, "dropout": 0.0}


def transformer(norm: str, **options: Any) -> dict[str, Any]:
    part = {**TRANSFORMER, "embeddings": EMBEDDINGS, "layer_norm": norm}
    return {"encoder": part, "decoder": {**part, "num_layers": 2}, **options}


def recurrent(cell: str, attention: str, initial: str, layers: int, width: int) -> dict[str, Any]:
    part = {"type": "recurrent", "rnn_type": cell, "num_layers": layers, "embeddings": NARROW, "dropout": 0.0}
    encoder = {**part, "hidden_size": 4, "bidirectional": True}
    decoder = {**part, "hidden_size": width, "attention": attention, "init_hidden": initial, "hidden_dropout": 0.0}
    return {"encoder": encoder, "decoder": {**decoder, "input_feeding": True}}


SETTINGS = {  # name: description, model, whether the file is a zip
    "pre": ("Transformer: pre-norm, tied output", transformer("pre", tied_softmax=True), True),
    "post": ("Transformer: post-norm; file of PyTorch before 1.6", transformer("post"), False),
    "bridge": ("GRU, attention bahdanau, init_hidden: bridge", recurrent("gru", "bahdanau", "bridge", 1, 8), True),
    "last": ("LSTM, attention luong, init_hidden: last", recurrent("lstm", "luong", "last", 2, 8), True),
    "zero": ("GRU, attention bahdanau, init_hidden: zero", recurrent("gru", "bahdanau", "zero", 2, 6), True),
}
TRAINING = {
    "optimizer": "adam", "adam_betas": [0.9, 0.999], "learning_rate": 0.01, "batch_size": 32, "batch_type": "sentence",
    "epochs": 70, "updates": 500, "validation_freq": 490, "logging_freq": 98, "overwrite": True, "keep_best_ckpts": 1,
    "shuffle": True, "normalization": "batch", "loss": "crossentropy", "label_smoothing": 0.0,
    "early_stopping_metric": "ppl", "scheduling": "exponential", "decrease_factor": 0.99,
}  # fmt: skip


def configuration(model: dict[str, Any], **testing: Any) -> dict[str, Any]:
    side = {"level": "word", "lowercase": False, "max_length": 50, "voc_min_freq": 1}
    return {
        "name": "reversal", "joeynmt_version": "2.3.0", "model_dir": "model", "use_cuda": False, "random_seed": 7,
        "data": {
            "train": "train", "dev": "test", "test": "test", "dataset_type": "plain",
            "src": {**side, "lang": "src"}, "trg": {**side, "lang": "tgt"},
            "special_symbols": {
                "unk_token": "<unk>", "unk_id": 0, "pad_token": "<pad>", "pad_id": 1, "bos_token": "<s>", "bos_id": 2,
                "eos_token": "</s>", "eos_id": 3,
            },
        },
        "testing": {"batch_size": 10, "batch_type": "sentence", "max_output_length": MAX_LENGTH, "beam_size": 1,
                    "eval_metrics": ["bleu"], "load_model": "model/best.ckpt", **testing},
        "training": TRAINING,
        "model": model,
    }  # fmt: skip


def record(work: Path, out: Path) -> None:
    version = importlib.metadata.version("joeynmt")
    for name, (description, model, zipped) in SETTINGS.items():
        folder = work / f"joeynmt-{name}"
        write_data(folder)
        _command("train", configuration({**model, "initializer": "xavier_uniform"}), folder, zipped, "--skip-test")
        recording = Recording("JoeyNMT", version, description, FILES, MAX_LENGTH, targets=targets())
        recording.search = {"length_penalty": 0.0}
        for kind, options in (
            ("greedy", {"beam_size": 1}),
            ("beam", {"beam_size": BEAM, "beam_alpha": -1}),
            ("scores", {"beam_size": 1, "return_prob": "ref", "return_attention": True}),
        ):
            _command("test", configuration(model, **options), folder, zipped, "--save-scores", "-o", kind)
        recording.greedy, recording.beam = (
            (folder / f"{kind}.test").read_text().split("\n")[: len(recording.targets)] for kind in ("greedy", "beam")
        )
        rows = (folder / "scores.test.scores").read_text().splitlines()
        recording.scores = [sum(ast.literal_eval(row)) for row in rows]
        made = folder / "model"
        (made / "best.ckpt").resolve().rename(made / "kept.ckpt")
        (made / "best.ckpt").unlink()
        (made / "kept.ckpt").rename(made / "best.ckpt")
        _strip(made / "best.ckpt", zipped)
        recording.save(out / f"joeynmt-{name}", made)


FILES = ["best.ckpt", "config.yaml", "src_vocab.txt", "trg_vocab.txt"]


def _strip(file: Path, zipped: bool) -> None:
    """64 instead of 5,000 sinusoidal positions: small enough for a repository."""
    import torch

    content = torch.load(file, weights_only=False)
    for name, tensor in content["model_state"].items():
        if name.endswith("pe.pe"):
            content["model_state"][name] = tensor[:, :64].clone()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)


def _command(mode: str, content: dict[str, Any], folder: Path, zipped: bool, *options: str) -> None:
    (folder / f"{mode}.yaml").write_text(json.dumps(content))
    run([sys.executable, "-c", COMMAND.format(zipped), mode, f"{mode}.yaml", *options], folder)
