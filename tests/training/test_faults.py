"""Faults of processes, disks and clocks during training. `make faults` runs more cases and records them."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fault_records import cases, record
from training_fixtures import (
    FULL_SETTINGS,
    ForkedCommand,
    RecordingReport,
    TinyBatches,
    TinyModel,
    assert_same_checkpoints,
    die_at,
    free_port,
    logged_losses,
    run_processes,
    settings,
)

from transduce.run import RunLock
from transduce.storage import WriteError
from transduce.training.checkpoint import CheckpointManager
from transduce.training.distributed import Processes
from transduce.training.trainer import train

FILE_OPERATIONS = ("fsync", "replace", "unlink", "rmdir", "mkdir")
SLOTS = {"weights": 5, "optimiser": 10}


@pytest.mark.slow
def test_killed_runs_resume_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL at random moments, in updates and in saves: every time the run resumes."""
    kills = cases(8)
    made = FULL_SETTINGS | {"steps": 16 * kills, "log_every": 1, "checkpoint_every": 5, "validate_every": 10}
    tasks = [{"settings": made, "dropout": 0.1, "folder": str(tmp_path / name)} for name in ("whole", "killed")]
    assert run_processes({"do": "train", "options": tasks[0]}) == [0]
    died = 0
    for seed in range(kills // 2):  # few at a time: an answer has a time limit
        died += run_processes({"do": "kill", "options": tasks[1], "kills": 2, "seed": seed})[0]
    assert run_processes({"do": "train", "options": tasks[1]}) == [0]
    assert died == kills
    assert_same_checkpoints(tmp_path / "whole" / "checkpoints", tmp_path / "killed" / "checkpoints")
    assert logged_losses(tmp_path / "whole") == logged_losses(tmp_path / "killed")
    assert len(logged_losses(tmp_path / "whole")) == 16 * kills
    left = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert left == {path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()}
    record("SIGKILL at random moments", "resumed, final weights and log equal bit for bit", kills, died)


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {group: {"a": torch.full((size, 3), value)} for group, size in SLOTS.items()}


def in_child(action: Callable[[], object]) -> int:
    """The exit code of the action in a forked process."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        action()
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_a_process_killed_between_any_two_write_steps_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Before and after every file operation of a save; also of one that replaces a checkpoint of the same step."""
    found, killed = {"old": 0, "new": 0}, 0
    for replaced in (False, True):
        for operation in range(1, 1000):
            folder = tmp_path / f"{replaced}{operation}"
            manager = CheckpointManager(folder)
            manager.save(1, tensors(1.0), {"value": 1})
            step = 1 if replaced else 2

            def save(number: int = operation, manager: CheckpointManager = manager, step: int = step) -> None:
                die_at(number, os, *FILE_OPERATIONS)
                manager.save(step, tensors(2.0), {"value": 2})

            code = in_child(save)
            manager.remove_incomplete()
            checkpoint = manager.latest()
            assert checkpoint is not None, "neither the old nor the new one"
            expected = tensors(float(checkpoint.state["value"]))
            assert all(torch.equal(checkpoint.tensors[group]["a"], expected[group]["a"]) for group in SLOTS)
            found["old" if checkpoint.state["value"] == 1 else "new"] += 1
            if code == 0:
                break
            assert code == -signal.SIGKILL
            killed += 1
    assert killed > 30
    assert min(found.values()) > 2
    record("SIGKILL between write steps of a checkpoint", "the old or the new checkpoint, whole", killed, killed)


def test_a_disk_that_fills_at_any_byte_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stops a write at this size. The error has the path, and no temporary file stays."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, tensors(1.0), {})
    limits = random.Random(1).sample(range(1, 300), min(cases(20), 299))

    def save(limit: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(WriteError, match="cannot be written") as caught:
            manager.save(2, tensors(2.0), {})
        assert str(manager.path(2)) in str(caught.value.where)

    survived = 0
    for limit in limits:
        assert in_child(lambda limit=limit: save(limit)) == 0, limit
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert manager.load(1).step == 1
        survived += 1
    record("disk full", "error with the path, previous checkpoint intact, no temporary file", len(limits), survived)


@pytest.mark.slow
def test_training_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fsync of the checkpoint of update 4 returns after update 6: training that waits would never end."""
    later, synced = Event(), os.fsync

    class Watching(RecordingReport):
        def advance(self, step: int) -> None:
            if step >= 6:
                later.set()

    def slow(descriptor: int) -> None:
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{descriptor}"):  # not the C kernels, which may be compiled now
            assert later.wait(60), "training waits for the disk"
        synced(descriptor)

    device = torch.device("cpu")
    made = settings(steps=9, checkpoint_every=4, validate_every=100, parallel="fsdp")
    with Processes.start(device, "fsdp") as processes, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", slow)
        outcome = train(
            TinyModel(), TinyBatches(), made, checkpoints=CheckpointManager(tmp_path), report=Watching(),
            processes=processes, device=device,
        )  # fmt: skip
    assert outcome.reason == "steps"
    assert CheckpointManager(tmp_path).steps() == [4, 8, 9]
    record("slow disk", "training goes on, the checkpoint counts when it is written", 1, 1)


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a process that died has a time in the future; updates, log and checkpoints are those of true time."""
    folders = [tmp_path / name for name in ("true", "wrong")]
    reports = [RecordingReport(), RecordingReport()]
    for folder, report in zip(folders, reports, strict=True):
        for steps in (5, 12):
            if folder == folders[1]:
                start = 2e9 - 1000.0 * steps
                monkeypatch.setattr(time, "time", lambda start=start: start - time.monotonic())
            made = settings(steps=steps, minutes=100.0, validate_every=100)
            manager = CheckpointManager(folder / "checkpoints")
            train(TinyModel(0.1), TinyBatches(), made, checkpoints=manager, report=report)
    losses = [[(entry.step, entry.loss) for entry in report.entries] for report in reports]
    assert losses[0] == losses[1]
    assert all(entry.seconds >= 0 for entry in reports[1].entries)
    assert_same_checkpoints(*(folder / "checkpoints" for folder in folders))
    lock = RunLock(folders[1])
    lock.path.write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "since": 4e9}))
    os.utime(lock.path, (4e9, 4e9))
    lock.acquire()
    assert "has died" not in lock.recovered
    lock.release()
    record("clock set back", "same updates and checkpoints; the lock of a dead process is taken", 2, 2)


def pids_of(rank: int, run: Path) -> list[int]:
    """The processes of this rank that train in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = b"\0" + (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"\0RANK={rank}\0".encode() in environment and f"{run}\0".encode() in command:
            found.append(int(entry.name))
    return found


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def updates(run: Path) -> dict[int, float]:
    try:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):  # read while a line is written
        return {}
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "update"}


def resumptions(run: Path) -> int:
    return (run / "log.jsonl").read_text().count('"event": "resumed"')


class ElasticRun:
    """A small recipe, whose runs are compared by the losses of their updates."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.pairs, self.recipe = folder, folder / "pairs.tsv", folder / "recipe.yaml"
        draw = random.Random(1)
        lines = [" ".join(draw.choice("abcdef") for _ in range(draw.randint(2, 5))) for _ in range(100)]
        self.pairs.write_text("".join(f"{line}\t{line}\n" for line in lines))
        self.recipe.write_text("")
        self.training: dict[str, Any] = {
            "steps": steps, "checkpoint_every": 3, "validate_every": 10**6, "log_every": 1, "patience": "null",
            "validate_examples": 2, "batch_tokens": 128,
        }  # fmt: skip

    def arguments(self, run: Path, **more: Any) -> list[str]:
        part = "{kind: recurrent, width: 8, dropout: 0.1}"
        values = [f"training.{key}={value}" for key, value in {**self.training, **more}.items()]
        values += [f"data.train={self.pairs}", f"data.cache={self.folder / 'cache'}", "evaluation.metrics=[exact]"]
        values += [f"model.encoder={part}", f"model.decoder={part}", "generation.strategy=greedy"]
        values += ["tokens.source.kind=words", "tokens.target.kind=words", "evaluation.resamples=2"]
        return ["train", str(self.recipe), *values, "--resume", "-q", "--run-dir", str(run)]

    def alone(self) -> dict[int, float]:
        """The losses of one undisturbed process, which has as many micro-batches as there are ranks."""
        run = self.folder / "whole"
        assert ForkedCommand(self.arguments(run, accumulate=2)).wait() == 0
        return updates(run)

    @contextmanager
    def torchrun(self, run: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Waits for the end of the agent at the end of the block; an error in the block ends it."""
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "transduce", *self.arguments(run)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                yield process
            except BaseException:
                process.terminate()  # and its ranks
                raise


def wait_until(condition: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < end, "the ranks hang"
        time.sleep(0.01)


def assert_same_losses(found: dict[int, float], expected: dict[int, float], steps: int) -> None:
    assert list(found) == list(expected) == list(range(1, steps + 1))
    assert [*found.values()] == pytest.approx([*expected.values()], abs=1e-5)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun_with_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    kills = min(cases(1), 5)
    elastic, run = ElasticRun(tmp_path, 16 * kills), tmp_path / "killed"
    whole = elastic.alone()
    seconds, processor = [], []
    with elastic.torchrun(run, "--standalone", "--nproc-per-node=2", f"--max-restarts={kills}") as process:
        for number in range(kills):
            wait_until(lambda number=number: len(updates(run)) >= 16 * number + 5, process)
            os.kill(pids_of(1, run)[0], signal.SIGKILL)
            began = time.monotonic()
            wait_until(lambda number=number: resumptions(run) > number, process)
            seconds.append(round(time.monotonic() - began, 1))
            processor.append(round(processor_seconds(pids_of(1, run)[0]), 1))
    assert process.returncode == 0
    assert_same_losses(updates(run), whole, 16 * kills)
    outcome = "restarted by torchrun, losses of an undisturbed run"
    figures = {"seconds_until_training": seconds, "processor_seconds_of_a_rank": processor}
    ranges = {name: [min(found), max(found)] for name, found in figures.items()}
    record("rank killed with SIGKILL", outcome, kills, kills, **ranges)


def awaits_termination(pid: int) -> bool:
    """Whether a stopped process was sent SIGTERM, which it gets when it continues."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = int(next(line for line in lines if line.startswith("ShdPnd")).split()[1], 16)
    return bool(pending >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_rank_killed_on_one_of_two_machines_restarts_all_where_their_restart_counts_differ(tmp_path: Path) -> None:
    """Two agents of torchrun. The rank of the other does not notice the death, so its agent counts no failure."""
    elastic, run, port = ElasticRun(tmp_path, 40), tmp_path / "killed", free_port()
    whole = elastic.alone()
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=test"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    with elastic.torchrun(run, *options) as one, elastic.torchrun(run, *options) as two:
        wait_until(lambda: len(updates(run)) >= 5, one, two)
        (alive,), (killed,) = pids_of(0, run), pids_of(1, run)
        os.kill(alive, signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: awaits_termination(alive), one, two)
        os.kill(alive, signal.SIGCONT)
        wait_until(lambda: resumptions(run) > 0, one, two)
        counts = [restart_count(pid) for rank in (0, 1) for pid in pids_of(rank, run)]
    assert (one.returncode, two.returncode) == (0, 0)
    assert sorted(counts) == [0, 1]
    assert_same_losses(updates(run), whole, 40)
    record("rank killed on one of two machines", "all restarted, losses of an undisturbed run", 1, 1)


def restart_count(pid: int) -> int:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(entry for entry in environment if entry.startswith(b"TORCHELASTIC_RESTART_COUNT=")).split(b"=")[1])
