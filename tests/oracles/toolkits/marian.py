"""Recordings of Marian, through the wheel `pymarian`."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from data import BEAM, WORDS, Recording, run, targets, write_data, write_lines

MARIAN = str(Path(sys.executable).with_name("pymarian"))
TRAIN = (
    "--type transformer --transformer-heads 2 --after-batches 500 "
    "--mini-batch 32 --cpu-threads 1 --seed 7 --quiet -w 200 --overwrite "
    "--vocabs vocab.yml vocab.yml -t train.src train.tgt -m model.npz"
)
MAX_LENGTH = 21  # three times the longest source of a batch, with its </s>
SCORE = "-v vocab.yml vocab.yml --quiet --cpu-threads 1 -t test.src test.tgt"
PRE = "--transformer-preprocess n --transformer-postprocess da --transformer-postprocess-top n"
SSRU = "--transformer-decoder-autoreg rnn --dec-cell ssru"
SMALL = "--dim-emb 8 --transformer-dim-ffn 12 --learn-rate 0.01"


@dataclass(frozen=True)
class Setting:
    """One model. `gemm`: the type of the matrices of a binary, which is recorded instead of the .npz file."""

    description: str
    options: str
    decodes: bool = True  # whether its decoder computes what it trained
    gemm: str = ""


SETTINGS = {
    "post": Setting(
        "post-norm, swish, one embedding table", f"{SMALL} --enc-depth 2 --dec-depth 2 --tied-embeddings-all"
    ),
    "pre": Setting(
        "pre-norm, relu, untied",
        f"{SMALL} --enc-depth 1 --dec-depth 2 --transformer-ffn-activation relu {PRE}",
        decodes=False,
    ),
    "ssru": Setting(
        "SSRU decoder, gelu; binary of fp32",
        f"{SMALL} --enc-depth 2 --dec-depth 1 --transformer-ffn-activation gelu {SSRU}",
        gemm="float32",
    ),
    "student": Setting(
        "SSRU decoder, relu, tied decoder layers",
        f"{SMALL} --enc-depth 2 --dec-depth 2 --transformer-ffn-activation relu --transformer-tied-layers 1 1 {SSRU} "
        "--tied-embeddings-all",
    ),
    # Widths are multiples of 64 and the vocabulary one of 8, as int8 products need them.
    "int8": Setting(
        "SSRU decoder, relu; binary of int8",
        f"--dim-emb 64 --transformer-dim-ffn 64 --learn-rate 0.003 --enc-depth 1 --dec-depth 1 "
        f"--transformer-ffn-activation relu {SSRU} --tied-embeddings-all",
        decodes=False,
        gemm="intgemm8",
    ),
}
VOCABULARY = ["</s>", "<unk>", *WORDS, "unused", "never"]
INT8_TOLERANCE = 0.5  # their products of int8 round the inputs of each layer to 8 bits too


def record(work: Path, out: Path) -> None:
    version = importlib.metadata.version("pymarian")
    for name, setting in SETTINGS.items():
        folder = work / f"marian-{name}"
        write_data(folder)
        write_lines(folder / "vocab.yml", [f"{word}: {number}" for number, word in enumerate(VOCABULARY)])
        run([MARIAN, "train", *TRAIN.split(), *setting.options.split()], folder)
        model = "model.bin" if setting.gemm else "model.npz"
        files = [model, "model.npz.decoder.yml", "vocab.yml"]
        if setting.gemm:
            run([MARIAN, "convert", *f"-f model.npz -t {model} -g {setting.gemm}".split()], folder)
            (folder / "model.npz.decoder.yml").rename(folder / "decoder.yml")
            files[1] = "decoder.yml"
        recording = Recording("Marian", version, setting.description, files, max_length=MAX_LENGTH, targets=targets())
        if setting.gemm == "intgemm8":
            _record_own_scores(recording, folder)
        else:
            scored = run([MARIAN, "score", "-m", model, *SCORE.split()], folder)
            recording.scores = [float(line) for line in scored.splitlines()]
        if setting.decodes:
            recording.greedy, recording.beam = _decode(folder, files, 1), _decode(folder, files, BEAM)
        recording.save(out / f"marian-{name}", folder)


def _record_own_scores(recording: Recording, folder: Path) -> None:
    """Greedy outputs as targets, with the scores that the decoder gives them: `score` does not read int8."""
    rows = [line.split(" ||| ") for line in _decode(folder, recording.files, 1, "--n-best")]
    recording.targets, recording.scores = [row[1].strip() for row in rows], [float(row[-1]) for row in rows]
    recording.tolerance = INT8_TOLERANCE


def _decode(folder: Path, files: list[str], beam: int, more: str = "") -> list[str]:
    options = f"-c {files[1]} -m {files[0]} -i test.src --quiet --cpu-threads 1 -b {beam} --normalize 0 {more}"
    return [line.strip() for line in run([MARIAN, "decode", *options.split()], folder).split("\n")[:-1]]
