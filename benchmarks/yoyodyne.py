"""Comparison with Yoyodyne: pronunciation of 800 words, the same minutes on one thread of the same machine.

Both tools train at the same time, each in a process of its own with one thread, so that the load of the machine is the
same for both. Yoyodyne trains the rotary Transformer and the trainer of its sample configurations, with its best
checkpoint by the accuracy of the development set; Transduce has no option but the task and the minutes. Both write
their outputs for the development set, and the same function counts the words that are wrong. Yoyodyne is installed in
an environment of its own:

    python -m benchmarks.yoyodyne --data DATA --yoyodyne ENVIRONMENT/bin/yoyodyne --minutes 5
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

import transduce

LANGUAGES = ("ice", "khm")  # two of those whose development sets settings are chosen on
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
ROTARY = {  # configs/rotary_transformer.yaml of its repository
    "class_path": "yoyodyne.models.RotaryTransformerModel",
    "init_args": {
        "source_encoder": {
            "class_path": "yoyodyne.models.modules.RotaryTransformerEncoder",
            "init_args": {"dropout": 0.3, "embedding_size": 256, "hidden_size": 100, "layers": 4},
        },
        "decoder_dropout": 0.3,
        "decoder_hidden_size": 100,
        "decoder_layers": 4,
        "embedding_size": 256,
        "label_smoothing": 0.1,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "scheduler": {"class_path": "yoyodyne.schedulers.WarmupInverseSquareRoot", "init_args": {"warmup_epochs": 10}},
    },
}
SAMPLE = "configs/rotary_transformer.yaml and trainer.yaml; fp32, no limit of epochs, no early stopping"


@dataclass(frozen=True)
class Result:
    """One training and its word error rate on the development set."""

    tool: str
    version: str
    settings: str
    language: str
    minutes: float  # given
    seconds: float  # of training, on the wall
    processor_seconds: float
    words: int
    wer: float


@dataclass
class Training:
    """A training that runs: a process, its output and its outputs for the development set."""

    tool: str
    version: str
    settings: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    processor_seconds: float = 0.0

    def end(self, status: int, usage: resource.struct_rusage) -> None:
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = time.monotonic() - self.began
        self.processor_seconds = usage.ru_utime + usage.ru_stime
        if self.process.returncode:
            raise SystemExit(f"{self.tool} failed:\n{self.log.read_text(encoding='utf-8')[-2000:]}")


def wait_for(trainings: Sequence[Training]) -> None:
    """Waits until all have ended, whichever is first."""
    running = {one.process.pid: one for one in trainings}
    while running:
        number, status, usage = os.wait4(-1, 0)
        if number in running:
            running.pop(number).end(status, usage)


def start(tool: str, version: str, settings: str, command: Sequence[str], log: Path) -> Training:
    with log.open("wb") as output:
        environment = {**os.environ, **ONE_THREAD}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return Training(tool, version, settings, process, log)


def configuration(train: Path, dev: Path, folder: Path, minutes: float) -> dict[str, Any]:
    """The sample configuration of Yoyodyne for these files; training ends by the clock alone."""
    limit = f"{int(minutes // 1440):02}:{int(minutes // 60 % 24):02}:{int(minutes % 60):02}:{int(minutes * 60 % 60):02}"
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_time": limit,
            "max_epochs": -1,
            "gradient_clip_val": 3,
            "enable_progress_bar": False,
            "logger": False,
        },
        "model": ROTARY,
        "data": {
            "model_dir": str(folder / "model"),
            "train": str(train),
            "val": str(dev),
            "predict": str(dev),
            "target_sep": " ",
        },
        "checkpoint": {
            "dirpath": str(folder / "checkpoints"),
            "filename": "model-{epoch:03d}-{val_accuracy:.4f}",
            "mode": "max",
            "monitor": "val_accuracy",
        },
        "prediction": {"path": str(folder / "predictions.txt")},
    }


def compare(language: str, args: argparse.Namespace, folder: Path) -> list[Result]:
    """Both trainings at the same time, then the outputs of both for the development set."""
    train, dev = (args.data / "g2p2021" / f"low_{language}_{part}.tsv" for part in ("train", "dev"))
    settings = folder / "yoyodyne.yaml"
    settings.write_text(yaml.safe_dump(configuration(train, dev, folder, args.minutes)), encoding="utf-8")
    peer = [str(args.yoyodyne), "fit", "--config", str(settings)]
    run = folder / "run"
    arguments = ["train", str(train), f"data.dev={dev}", "--task", "pronounce", "--minutes", f"{args.minutes:g}"]
    ours = [sys.executable, "-m", "transduce", *arguments, "--run", str(run)]
    started = [
        start("yoyodyne", peer_version(args.yoyodyne), SAMPLE, peer, folder / "yoyodyne.log"),
        start("transduce", transduce.__version__, "--task pronounce", ours, folder / "transduce.log"),
    ]
    wait_for(started)
    rows = [line.split("\t") for line in dev.read_text(encoding="utf-8").splitlines()]
    outputs = {"yoyodyne": peer_outputs(args.yoyodyne, settings, folder), "transduce": our_outputs(run, rows, folder)}
    return [
        Result(
            one.tool,
            one.version,
            one.settings,
            language,
            args.minutes,
            round(one.seconds, 1),
            round(one.processor_seconds, 1),
            len(rows),
            word_error(outputs[one.tool], rows),
        )
        for one in started
    ]


def peer_version(command: Path) -> str:
    script = "import importlib.metadata as m; print(m.version('yoyodyne'))"
    return subprocess.check_output([command.parent / "python", "-c", script], text=True).strip()


def peer_outputs(command: Path, settings: Path, folder: Path) -> list[str]:
    """The outputs of the checkpoint with the best accuracy."""
    found = {path: float(accuracy_of(path)) for path in (folder / "checkpoints").glob("*.ckpt")}
    best = max(found, key=lambda path: found[path])
    call = [str(command), "predict", "--config", str(settings), "--ckpt_path", str(best)]
    subprocess.run(call, check=True, env={**os.environ, **ONE_THREAD}, capture_output=True)
    return (folder / "predictions.txt").read_text(encoding="utf-8").splitlines()


def accuracy_of(checkpoint: Path) -> str:
    match = re.search(r"val_accuracy=([0-9.]+\d)", checkpoint.name)
    return match[1] if match else "0"


def our_outputs(run: Path, rows: Sequence[Sequence[str]], folder: Path) -> list[str]:
    source = folder / "words.txt"
    source.write_text("".join(f"{row[0]}\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "transduce", "generate", str(run), str(source)]
    return subprocess.check_output(command, text=True, env={**os.environ, **ONE_THREAD}).splitlines()


def word_error(outputs: Sequence[str], rows: Sequence[Sequence[str]]) -> float:
    """Words (%) whose phones are not those of the reference, or of any reference of a word with several."""
    references: dict[str, set[str]] = {}
    for row in rows:
        references.setdefault(row[0], set()).add(row[1])
    wrong = sum(out not in references[row[0]] for out, row in zip(outputs, rows, strict=True))
    return round(100 * wrong / len(rows), 1)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    table = Table("language", "tool", "processor seconds", "word error")
    for one in results:
        name = f"{one['tool']} {one['version']}"
        table.add_row(one["language"], name, f"{one['processor_seconds']:.0f}", f"{one['wer']:.1f}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yoyodyne", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with g2p2021")
    parser.add_argument(
        "--yoyodyne", type=Path, required=True, help="its command, in the environment it is installed in"
    )
    parser.add_argument("--languages", nargs="*", default=list(LANGUAGES))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/yoyodyne.json"))
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for language in args.languages:
        with tempfile.TemporaryDirectory() as folder:
            results += [asdict(one) for one in compare(language, args, Path(folder))]
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)


if __name__ == "__main__":
    main()
