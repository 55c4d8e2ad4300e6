"""Fixtures of all tests: one thread a process, seeds, shared runs, one drawing of learning curves."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_support  # noqa: F401 - first: Triton reads its settings when it is imported
from hypothesis import settings as hypothesis_settings
from run_fixtures import RECURRENT, TRANSFORMER, Command, call, colour_pairs, settings

import transduce
from transduce.storage import replace_file
from transduce.training.report import draw_curves

# A search for counter-examples belongs to development; what lands must not depend on its luck.
hypothesis_settings.register_profile("landing", derandomize=True, deadline=None, max_examples=50)
hypothesis_settings.register_profile("search", deadline=None, max_examples=50)
hypothesis_settings.load_profile("landing" if os.environ.get("CI") else "search")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    # Not torch.manual_seed: without a GPU it formats a stack trace each time, a millisecond a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session", autouse=True)
def _processor_without_bf16() -> Iterator[None]:
    """What `auto` chooses must not depend on the processor that runs the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cpu, "get_capabilities", dict, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _curves_are_drawn_once() -> Iterator[None]:
    """Every training writes curves.png. Drawing takes longer than most trainings here: later runs write the first one.

    tests/training/test_report.py draws.
    """
    drawn: list[bytes] = []

    def write_curves(log: Path, png: Path) -> None:
        if drawn:
            replace_file(png, drawn[0])
        else:
            draw_curves(log, png)
            drawn.append(png.read_bytes())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transduce.training.experiment.draw_curves", write_curves)
        yield


@pytest.fixture(scope="session")
def command() -> Command:
    return call


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def bench(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[Path]:
    """A folder for the shared runs. The user's own cache is never touched: the workers of a test run share one."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
        patched.setenv("COLUMNS", "200")
        yield folder


@pytest.fixture(scope="session")
def pairs(bench: Path, shared_folder: Path) -> Path:
    """One file for all workers: a shared run names it in its recipe."""
    written, path = bench / "pairs.tsv", shared_folder / "pairs.tsv"
    written.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(400)), encoding="utf-8")
    return written.replace(path)


@pytest.fixture(scope="session")
def trained(bench: Path, pairs: Path, shared_folder: Path) -> Callable[..., Path]:
    """Trains a run in the first worker that needs it. Every worker has a copy: tests may write into it."""

    def run(name: str, model: dict[str, Any], kind: str, steps: int) -> Path:
        common = shared_folder / "trained" / name
        common.parent.mkdir(exist_ok=True)
        with common.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not common.exists():
                transduce.train(settings(pairs, model, kind, steps=steps), bench / name)
                shutil.copytree(bench / name, common)
        if not (bench / name).exists():
            shutil.copytree(common, bench / name)
        return bench / name

    return run


@pytest.fixture(scope="session")
def attention_run(trained: Callable[..., Path]) -> Path:
    """Two recurrent networks with attention over words, trained until they know the task."""
    return trained("attention", {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}, "words", 200)


@pytest.fixture(scope="session")
def transformer_run(trained: Callable[..., Path]) -> Path:
    """A Transformer over characters whose positions end at 48."""
    return trained("transformer", {"encoder": TRANSFORMER, "decoder": TRANSFORMER}, "chars", 40)


@pytest.fixture(scope="session")
def bottleneck_run(trained: Callable[..., Path]) -> Path:
    """No attention: all the decoder knows came through one vector."""
    return trained("bottleneck", {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "initial"}}, "words", 20)


@pytest.fixture(scope="session")
def model(attention_run: Path) -> transduce.Model:
    return transduce.load(attention_run)
