"""Recordings of fairseq 0.12.2, and of 0.10.2, whose options are a namespace."""

from __future__ import annotations

import math
import re
import shutil
import sys
from pathlib import Path

from data import BEAM, Recording, run, targets, write_data

MAX_LENGTH = 22
# Its checkpoints hold more than tensors, which PyTorch refuses by default since 2.6; the fast path of its encoder calls
# a function whose arguments PyTorch has changed.
LOAD = (
    "import functools, sys, torch; torch.load = functools.partial(torch.load, weights_only=False); "
    "torch.set_num_threads(1); from fairseq_cli.{0} import cli_main; sys.argv = ['{0}', *sys.argv[1:]]; "
)
SLOW_PATH = (
    "from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer; "
    "Layer.load_to_BT = property(lambda layer: False, lambda layer, value: None); "
)
COMMANDS = {"0.12.2": f"{LOAD}{SLOW_PATH}cli_main()", "0.10.2": f"{LOAD}cli_main()"}
TRAIN = (
    "bin --optimizer adam --lr 0.01 --criterion cross_entropy --batch-size 32 --max-update 500 --dropout 0 --cpu "
    "--no-save-optimizer-state --no-epoch-checkpoints --seed 7 --save-dir checkpoints --disable-validation"
)
TRANSFORMER = (
    "--arch transformer --encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 8 --decoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 12 --decoder-ffn-embed-dim 12 --encoder-attention-heads 2 --decoder-attention-heads 2"
)
SETTINGS = {
    "transformer": ("Transformer: post-norm, relu", TRANSFORMER),
    "learned": (
        "Transformer: pre-norm, gelu, learned positions, tied embeddings",
        f"{TRANSFORMER} --encoder-normalize-before --decoder-normalize-before --encoder-learned-pos "
        "--decoder-learned-pos --activation-fn gelu --share-decoder-input-output-embed --layernorm-embedding "
        "--max-source-positions 30 --max-target-positions 30",
    ),
    "lstm": (
        "bidirectional LSTM with attention, output narrower than its states",
        "--arch lstm --encoder-embed-dim 6 --encoder-hidden-size 4 --encoder-bidirectional --decoder-embed-dim 6 "
        "--decoder-hidden-size 8 --decoder-out-embed-dim 6 --encoder-layers 1 --decoder-layers 1",
    ),
    "fconv": (
        "convolutional (fconv), convolutions of several sizes",
        "--arch fconv --encoder-embed-dim 6 --decoder-embed-dim 6 --decoder-out-embed-dim 5 "
        "--encoder-layers [(8,3)]*2+[(10,1)] --decoder-layers [(8,3)]*2+[(10,2)] --max-source-positions 30 "
        "--max-target-positions 30",
    ),
    "fconv-tied": (
        "convolutional (fconv), tied output",
        "--arch fconv --encoder-embed-dim 8 --decoder-embed-dim 8 --decoder-out-embed-dim 8 --encoder-layers [(8,3)] "
        "--decoder-layers [(8,2)]*2 --share-input-output-embed --max-source-positions 30 --max-target-positions 30",
    ),
    "0.10": ("Transformer: post-norm, one table for both sides", f"{TRANSFORMER} --share-all-embeddings"),
}
OLDER = {"0.10": "0.10.2"}  # versions of settings; the others are recorded with 0.12.2


def record(work: Path, out: Path) -> None:
    for name, (description, options) in SETTINGS.items():
        folder, version = work / f"fairseq-{name}", OLDER.get(name, "0.12.2")
        write_data(folder)
        files = "--trainpref train --validpref train --testpref test --destdir bin --workers 1"
        _command(version, "preprocess", f"-s src -t tgt {files}{' --joined-dictionary' * (name in OLDER)}", folder)
        _command(version, "train", f"{TRAIN} {options}", folder)
        recording = Recording("fairseq", version, description, FILES, MAX_LENGTH, targets=targets())
        generate = f"bin --path checkpoints/checkpoint_last.pt --cpu --max-len-a 0 --max-len-b {MAX_LENGTH - 1}"
        recording.greedy = _lines(_command(version, "generate", f"{generate} --beam 1", folder), "D")
        recording.beam = _lines(_command(version, "generate", f"{generate} --beam {BEAM}", folder), "D")
        scored = _command(version, "generate", f"{generate} --score-reference", folder)
        averages = [float(score) for score in _lines(scored, "H", 1)]  # rounded averages over the tokens
        words = [[float(one) for one in row.split()] for row in _lines(scored, "P", 1)]
        assert all(abs(sum(row) / len(row) - average) < 1e-3 for row, average in zip(words, averages, strict=True))
        recording.scores = [sum(row) * math.log(2) for row in words]  # it prints logarithms to base 2
        recording.tolerance = 5e-4  # with four digits for each token
        for file in FILES:
            shutil.copy(
                folder / ("checkpoints/checkpoint_last.pt" if file == FILES[0] else f"bin/{file}"), folder / file
            )
        recording.save(out / f"fairseq-{name}", folder)


FILES = ["checkpoint_best.pt", "dict.src.txt", "dict.tgt.txt"]


def _command(version: str, name: str, options: str, folder: Path) -> str:
    own = Path(sys.prefix) / f"fairseq-{version}"  # where install.py puts it
    return run([sys.executable, "-c", COMMANDS[version].format(name), *options.split()], folder, PYTHONPATH=str(own))


def _lines(printed: str, letter: str, column: int = 2) -> list[str]:
    """One column of the lines of a kind, in the order of the sources: `D-7<tab>score<tab>text`."""
    rows = [line.split("\t") for line in printed.splitlines() if re.match(rf"{letter}-\d+\t", line)]
    rows.sort(key=lambda row: int(row[0].split("-")[1]))
    return [row[column] if len(row) > column else "" for row in rows]
