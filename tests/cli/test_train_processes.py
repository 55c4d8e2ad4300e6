"""`transduce train` in processes of its own: killed, interrupted, resumed, distributed."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close
from training_fixtures import ForkedCommand

from transduce.cli.options import imports_without_collection
from transduce.synthetic.algorithmic import generate

pytestmark = pytest.mark.slow

SMALL = [
    "tokens.source.kind=words",
    "tokens.target.kind=words",
    "model.encoder={kind: recurrent, width: 24, dropout: 0.2}",
    "model.decoder={kind: recurrent, width: 24, dropout: 0.2}",
    "training.batch_tokens=512",
    "training.validate_examples=20",
    "training.log_every=1",
    "generation.strategy=greedy",
    "evaluation.metrics=[exact]",
    "evaluation.resamples=10",
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{one.source}\t{one.target}\n" for one in generate("copy", 400, 5)))
    return path


def arguments(pairs: Path, run: Path, *settings: str) -> list[str]:
    recipe = pairs.with_name("recipe.yaml")
    recipe.write_text("")
    data = [f"data.train={pairs}", f"data.cache={pairs.parent / 'cache'}"]
    return ["train", str(recipe), *data, *SMALL, *settings, "--run-dir", str(run), "--resume", "-q"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "update"}


def final(run: Path) -> dict:
    return load_file(run / "checkpoints" / "final" / "weights.safetensors")


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(pairs, tmp_path):
    """The same bits as a run that was never stopped."""
    settings = ["training.steps=40", "training.checkpoint_every=3", "training.validate_every=10", "training.ema=0.9"]
    assert ForkedCommand(arguments(pairs, tmp_path / "whole", *settings)).wait() == 0
    broken = tmp_path / "broken"
    for operation in (30, 75):  # inside the first save, and inside a later one
        assert ForkedCommand(arguments(pairs, broken, *settings), die_at=operation).wait() == -signal.SIGKILL
    before, process = _bytes(broken), ForkedCommand(arguments(pairs, broken, *settings))
    while process.running() and _bytes(broken) == before:  # it has begun to write: somewhere in the next updates
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ForkedCommand(arguments(pairs, broken, *settings)).wait() == 0
    expected, got = final(tmp_path / "whole"), final(broken)
    assert expected.keys() == got.keys()
    for name in expected:
        assert (expected[name] == got[name]).all(), name
    assert losses(broken) == losses(tmp_path / "whole")


def _bytes(run: Path) -> int:
    return sum(1 for _ in (run / "checkpoints").glob("step-*")) + (run / "log.jsonl").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_a_checkpoint_and_resumes(pairs, tmp_path, number, code):
    run, settings = tmp_path / "run", ["training.patience=null", "training.checkpoint_every=100000"]
    process = ForkedCommand(arguments(pairs, run, "training.steps=100000", *settings))
    while not (run / "log.jsonl").exists() or len(losses(run)) < 5:
        assert process.running()
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait() == code
    (saved,) = (run / "checkpoints").glob("step-*")
    reached = int(saved.name.removeprefix("step-"))
    assert ForkedCommand(arguments(pairs, run, f"training.steps={reached + 3}", *settings)).wait() == 0
    assert list(losses(run)) == list(range(1, reached + 4))


def test_two_processes_train_like_one(pairs, tmp_path):
    """The same loss curve at the same global batch; logged once, saved once; resumed by another number of them."""
    exact = ["model.encoder.dropout=0", "model.decoder.dropout=0", "training.checkpoint_every=6"]
    assert ForkedCommand(arguments(pairs, tmp_path / "one", *exact, "training.steps=12")).wait() == 0
    two = tmp_path / "two"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "transduce"]
    subprocess.run([*torchrun, *arguments(pairs, two, *exact, "training.steps=6")], check=True, env=environment())
    assert ForkedCommand(arguments(pairs, two, *exact, "training.steps=12")).wait() == 0
    expected, got = losses(tmp_path / "one"), losses(two)
    assert list(got) == list(expected) == list(range(1, 13))
    assert [*got.values()] == pytest.approx([*expected.values()], abs=1e-5)
    for name, tensor in final(tmp_path / "one").items():
        assert_close(final(two)[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_sharded_run_is_read_like_an_ordinary_one(pairs, tmp_path):
    """Also one that did not end, whose only checkpoints are parts of two processes: it generates, and is exported."""
    run, unfinished, text = tmp_path / "run", tmp_path / "unfinished", tmp_path / "in.txt"
    settings = [
        "training.parallel=fsdp",
        "training.steps=6",
        "training.checkpoint_every=6",
        "training.validate_every=6",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "transduce"]
    subprocess.run([*torchrun, *arguments(pairs, run, *settings)], check=True, env=environment())
    shutil.copytree(run, unfinished)
    shutil.rmtree(unfinished / "checkpoints" / "final")
    assert len(list((unfinished / "checkpoints" / "step-00000006").glob("shard-*"))) == 2
    text.write_text("".join(f"{one.source}\n" for one in generate("copy", 10, 6)))
    bundle, outputs = tmp_path / "bundle.zip", [tmp_path / f"{number}.txt" for number in range(3)]
    assert ForkedCommand(["export", str(unfinished), str(bundle), "--to", "bundle"]).wait() == 0
    for model, output in zip((run, unfinished, bundle), outputs, strict=True):
        assert ForkedCommand(["generate", str(model), str(text), "--output", str(output)]).wait() == 0
    assert outputs[0].read_text() == outputs[1].read_text() == outputs[2].read_text()


def test_torch_is_imported_without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards garbage is collected again; where torch is there already, nothing changes."""
    with imports_without_collection():
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    with suppress(ImportError), imports_without_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
