"""Commands whose output cannot be written: exit code 2, the path is named, nothing half-written stays.

Limits on the size of files (RLIMIT_FSIZE, error EFBIG) fail where a file grows, in every library that writes. A failing
fsync (ENOSPC) fails where a file seems complete, and a failing open (EROFS) where it begins.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from export_fixtures import TEXTS, make_run, pair
from rich.console import Console
from run_fixtures import Called, Command

import transduce
from transduce.cli import GROUPS, main
from transduce.cli.train import TASKS
from transduce.flow import Example
from transduce.training.report import LogEntry, RunReport, read_log

RUN = {"resamples": 5, "metrics": ["exact"]}
PAIRS = "".join(f"{text}\t{' '.join(reversed(text.split()))}\n" for text in TEXTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    """A folder with a run of random weights, an adapted run, and files for every command."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "lines.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    (folder / "pairs.tsv").write_text(PAIRS, encoding="utf-8")
    data = {"train": str(folder / "pairs.tsv"), "dev_size": 1, "max_length": 20}
    make_run(folder / "run", pair(), data=data, evaluation=RUN)
    base = {
        "init": {"model": str(folder / "run")},
        "data": data,
        "model": pair(),
        "evaluation": RUN,
        "tokens": {"shared": True},
    }
    transduce.train({**base, "training": {"adapters": {"rank": 2}, "steps": 1}}, folder / "adapted")
    for line in (
        ("export", folder / "run", folder / "run.zip", "--to", "bundle"),
        ("data", "icons", "--count", "6", "--output", folder / "icons"),
        ("encode-images", folder / "icons" / "pairs.tsv", "--output", folder / "encoded"),
    ):
        called = command(*line)
        assert called.code == 0, called.err
    tokens = [line.split("\t")[1] for line in (folder / "encoded" / "pairs.tsv").read_text().splitlines()]
    (folder / "tokens.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


# The words of each command: RUN is the run, OUT the output; other words name files of the folder where they exist.
REPLACES = {
    "generate": "generate RUN lines.txt --output OUT",
    "generate json": "generate RUN lines.txt --json --output OUT",
    "evaluate": "evaluate RUN pairs.tsv --json OUT",
    "probe": "probe RUN pairs.tsv --perturbations upper --json OUT",
    "score": "score RUN pairs.tsv --output OUT",
    "align": "align RUN pairs.tsv --output OUT",
    "similarity": "similarity RUN pairs.tsv --output OUT",
    "embed": "embed RUN lines.txt --output OUT",
    "embed tsv": "embed RUN lines.txt --tsv --output OUT",
    "cluster": "cluster RUN lines.txt --clusters 2 --output OUT",
    "cluster png": "cluster RUN lines.txt --clusters 2 --png OUT.png",
    "explain html": "explain RUN w1 --html OUT",
    "explain png": "explain RUN w1 --png OUT.png",
    "explain-shapes": "explain-shapes RUN --json OUT",
    "shortlist": "shortlist RUN OUT",
    "data": "data questions --count 20 --output OUT",
    "data files": "data shapes --count 3 --output OUT",
    "encode-images": "encode-images icons/pairs.tsv --output OUT",
    "decode-images": "decode-images tokens.txt --tokenizer encoded/palette.json --output OUT",
}
CREATES = {  # commands that refuse an output that exists
    "bundle": "export RUN OUT --to bundle",
    "huggingface": "export RUN OUT --to huggingface",
    "ctranslate2": "export RUN OUT --to ctranslate2",
    "onnx": "export RUN OUT --to onnx",
    "convert": "convert run.zip OUT",
    "quantise": "quantise RUN OUT",
    "merge": "merge adapted OUT",
    "push": "push RUN name --dry-run OUT",
}


def words(line: str, place: Path, out: Path) -> list[str]:
    named = {"RUN": str(place / "run")}
    return [
        named.get(word) or (str(place / word) if (place / word).exists() else word.replace("OUT", str(out)))
        for word in line.split()
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def too_large(limit: int) -> Iterator[None]:
    """No file may grow beyond this number of bytes, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing(name: str, number: int, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """A function of `os` raises this error; as in the kernel, only an open names its file."""
    real = getattr(os, name)

    def fail(*arguments: object, **options: object) -> object:
        if when(*arguments):
            raise OSError(number, os.strerror(number), *arguments[:1] if name == "open" else ())
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, name, fail)
        yield


def creates(path: object, flags: int, *_: object) -> bool:
    return bool(flags & os.O_CREAT)


FAULTS: dict[str, tuple[Callable[[int], AbstractContextManager[None]], str]] = {
    "grows too large": (too_large, "File too large"),
    "no space": (lambda _: failing("fsync", errno.ENOSPC), "No space left on device"),
    "read-only": (lambda _: failing("open", errno.EROFS, creates), "Read-only file system"),
}


def faults_of(name: str) -> list[tuple[Callable[[int], AbstractContextManager[None]], str]]:
    """Where a file grows, each library fails in its own way; the others are of one function: commands take turns."""
    growing, *others = FAULTS.values()
    return [growing, others[(*REPLACES, *CREATES).index(name) % len(others)]]


def check_failure(called: Called, reason: str, out: Path) -> None:
    assert called.code == 2, (called.out, called.err)
    assert "Traceback" not in called.err
    message = called.err[called.err.index("error: ") :]
    assert message.startswith(f"error: {out}"), called.err
    assert reason in message
    assert len(message.splitlines()) == 2  # the remedy
    assert ".part-" not in message
    if "Read-only" not in reason:
        assert re.search(r"\([\d.,]+ \w+ free\)", message)


@pytest.mark.parametrize("name", REPLACES)
def test_an_output_that_cannot_be_replaced_keeps_its_earlier_content(
    name: str, place: Path, command: Command, tmp_path: Path
) -> None:
    line = words(REPLACES[name], place, tmp_path / "out")
    first = command(*line)
    assert first.code == 0, first.err
    before = contents(tmp_path)
    assert before
    for make, reason in faults_of(name):
        with make(max(map(len, before.values())) // 2):
            called = command(*line)
        check_failure(called, reason, tmp_path / "out")
        assert contents(tmp_path) == before


@pytest.mark.parametrize("name", CREATES)
def test_an_output_that_cannot_be_created_leaves_nothing(
    name: str, place: Path, command: Command, tmp_path: Path
) -> None:
    for make, reason in faults_of(name)[: 1 if name == "onnx" else None]:  # an export to ONNX takes seconds
        with make(2000):
            called = command(*words(CREATES[name], place, tmp_path / "out"))
        check_failure(called, reason, tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_every_command_that_writes_a_file_is_in_the_tables() -> None:
    named = {line.split()[0] for line in (*REPLACES.values(), *CREATES.values())}
    training = {"train", "distil", "compare", "claims", "reproduce", "demo"}  # they write run directories: below
    others = {"edit-recipe", "search", "models", "schema", "cache", "list"}  # below, or they print
    others |= {"calibrate"}  # below
    others |= {"backtranslate", "prepare", "inspect"}  # two keep their parts, with which they continue; inspect: below
    others |= {"serve", "studio"}  # servers: what they write belongs to a request
    assert named | training | others == {name for group in GROUPS.values() for name in group}


def test_a_calibration_that_cannot_be_written_leaves_the_old_one(place: Path, command: Command, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "many.tsv").write_text(PAIRS * 20, encoding="utf-8")
    assert command("calibrate", run, tmp_path / "many.tsv").code == 0
    before = contents(tmp_path)
    with too_large(20):
        called = command("calibrate", run, tmp_path / "many.tsv")
    assert called.code == 2
    assert str(run / "calibration.json") in called.err
    assert contents(tmp_path) == before


def test_a_full_disk_of_temporary_files_is_named(place: Path, command: Command, tmp_path: Path) -> None:
    """The table of duplicates is a temporary file, which comes before the output."""
    with too_large(2000):
        called = command("inspect", place / "pairs.tsv", "--json", tmp_path / "out")
    assert called.code == 2
    assert f"error: {tempfile.gettempdir()}: cannot be written: File too large" in called.err
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_cannot_be_edited_stays_as_it_was(place: Path, command: Command) -> None:
    before = contents(place / "adapted")
    with too_large(100):
        called = command("edit-recipe", place / "adapted", "generation.beam=3")
    assert called.code == 2, (called.out, called.err)
    assert f"error: {place / 'adapted'}" in called.err
    assert "cannot be written: File too large" in called.err
    assert contents(place / "adapted") == before


def test_pairs_of_a_demo_are_written_together_or_not_at_all(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = tuple([Example("a" * size, "b")] for size in (10, 10, 5000))
    monkeypatch.setitem(TASKS, "dates", replace(TASKS["dates"], splits=lambda: splits))
    with too_large(1000):
        called = command("demo", "--write", tmp_path / "data")
    check_failure(called, "File too large", tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_output_of_an_open_pipe_grows_and_ends_with_a_whole_line(place: Path, command: Command, tmp_path: Path) -> None:
    """Whoever reads it meanwhile sees every answer; what is left after the error is complete."""
    lines = "".join(f"{text}\n" for text in TEXTS * 4).encode()
    assert command("generate", place / "run", "--output", tmp_path / "all", stdin=lines).code == 0
    whole = (tmp_path / "all").read_bytes()
    out = tmp_path / "out"
    with too_large(len(whole) // 2):
        called = command("generate", place / "run", "--output", out, stdin=lines)
    check_failure(called, "File too large", out)
    written = out.read_bytes()
    assert whole.startswith(written)
    assert written == b"" or written.endswith(b"\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "out"]


@pytest.mark.parametrize("line", ["generate RUN lines.txt", "score RUN pairs.tsv", "models", "schema", "data"])
def test_full_standard_output_is_named(line: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        patched.setattr(sys, "argv", ["transduce", *words(line, place, place / "none")])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    assert "error: standard output: cannot be written: No space left on device" in capfd.readouterr().err


def test_python_does_not_complain_about_full_standard_output_at_its_exit() -> None:
    with open("/dev/full", "wb") as full:
        line = [sys.executable, "-m", "transduce", "schema"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: cannot be written: No space left")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_outputs_that_are_devices_links_and_pipes_stay_what_they_are(
    place: Path, command: Command, tmp_path: Path
) -> None:
    line = ("data", "questions", "--count", "3", "--output")
    assert command(*line, "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()
    called = command(*line, "/dev/full")
    assert (called.code, Path("/dev/full").is_char_device()) == (2, True)
    assert "error: /dev/full: cannot be written: No space left on device" in called.err
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert command(*line, tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert len((tmp_path / "real").read_text(encoding="utf-8").splitlines()) == 3


class TestTraining:
    QUICK = ("training.steps=4", "training.log_every=1", "training.validate_every=2", "training.checkpoint_every=4")

    def test_a_run_folder_that_cannot_be_written_is_named(self, place: Path, command: Command, tmp_path: Path) -> None:
        line = ("train", place / "run" / "recipe.yaml", *self.QUICK, "--run")
        assert command(*line, tmp_path / "first").code == 0  # the tokenised data are cached now
        for limit in (100, 2000):
            with too_large(limit):
                called = command(*line, tmp_path / "run")
            check_failure(called, "File too large", tmp_path / "run")
            assert not list(tmp_path.rglob(".part-*"))
        assert command(*line, tmp_path / "run").code == 0

    @pytest.mark.parametrize("name", ["log.jsonl", "metrics.json", "curves.png"])
    def test_a_file_of_the_report_does_not_stop_training(
        self, name: str, place: Path, command: Command, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        (run / name).mkdir(parents=True)  # where a folder is, no file can be written
        called = command("train", place / "run" / "recipe.yaml", "--run", run, *self.QUICK)
        assert called.code == 0, called.err
        assert called.err.count(f"warning: {run / name} cannot be written") == 1
        assert (run / "checkpoints" / "final").is_dir()

    def test_a_log_that_becomes_full_does_not_stop_training(self, tmp_path: Path) -> None:
        entry = LogEntry(1, 0, 1.0, {"nll": 1.0}, 0.1, 1.0, 10.0, 0.0, 1.0, 1)
        with (
            open(os.open("/dev/full", os.O_WRONLY), "w", buffering=1) as full,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            report = RunReport(tmp_path, console=Console(file=full))
            report.start(0, 100, 0)
            report.event("note", 0, "before")
            with too_large(100):
                for step in range(1, 20):
                    report.log(replace(entry, step=step))
                report.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
        first, second = (str(one.message) for one in caught)  # the console and the log, each once
        assert first.startswith("the printed training report cannot be written: No space left on device:")
        assert second.startswith(f"{tmp_path / 'log.jsonl'} cannot be written: File too large (")
        assert [one["step"] for one in read_log(tmp_path / "log.jsonl")] == [0]
