"""Recordings of Marian, through the wheel `pymarian`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from data import BEAM, Recording, run, targets, write_data

MARIAN = str(Path(sys.executable).with_name("pymarian"))
TRAIN = (
    "--type transformer --dim-emb 8 --transformer-heads 2 --transformer-dim-ffn 12 --after-batches 500 "
    "--mini-batch 32 --learn-rate 0.01 --cpu-threads 1 --seed 7 --quiet -w 200 --overwrite "
    "--vocabs vocab.yml vocab.yml -t train.src train.tgt -m model.npz"
)
MAX_LENGTH = 21  # three times the longest source of a batch, with its </s>
SCORE = "-m model.npz -v vocab.yml vocab.yml --quiet --cpu-threads 1 -t test.src test.tgt"
PRE = "--transformer-preprocess n --transformer-postprocess da --transformer-postprocess-top n"
SSRU = "--transformer-decoder-autoreg rnn --dec-cell ssru"
SETTINGS = {  # name: description, options, whether its decoder computes what it trained
    "post": ("post-norm, swish, one embedding table", "--enc-depth 2 --dec-depth 2 --tied-embeddings-all", True),
    "pre": ("pre-norm, relu, untied", f"--enc-depth 1 --dec-depth 2 --transformer-ffn-activation relu {PRE}", False),
    "ssru": ("SSRU decoder, gelu", f"--enc-depth 2 --dec-depth 1 --transformer-ffn-activation gelu {SSRU}", True),
    "student": (
        "SSRU decoder, relu, tied decoder layers",
        f"--enc-depth 2 --dec-depth 2 --transformer-ffn-activation relu --transformer-tied-layers 1 1 {SSRU} "
        "--tied-embeddings-all",
        True,
    ),
}


def record(work: Path, out: Path) -> None:
    version = importlib.metadata.version("pymarian")
    for name, (description, options, decodes) in SETTINGS.items():
        folder = work / f"marian-{name}"
        write_data(folder)
        run([MARIAN, "train", *TRAIN.split(), *options.split()], folder)
        files = ["model.npz", "model.npz.decoder.yml", "vocab.yml"]
        recording = Recording("Marian", version, description, files, max_length=MAX_LENGTH)
        if decodes:
            recording.greedy, recording.beam = _decode(folder, 1), _decode(folder, BEAM)
        recording.targets = targets()
        scored = run([MARIAN, "score", *SCORE.split()], folder)
        recording.scores = [float(line) for line in scored.splitlines()]
        recording.save(out / f"marian-{name}", folder)


def _decode(folder: Path, beam: int) -> list[str]:
    options = f"-c model.npz.decoder.yml -i test.src --quiet --cpu-threads 1 -b {beam} --normalize 0"
    return [line.strip() for line in run([MARIAN, "decode", *options.split()], folder).split("\n")[:-1]]
