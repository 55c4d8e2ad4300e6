"""Lock of a run directory."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from fault_records import record
from run_fixtures import RECURRENT, colour_pairs, settings
from training_fixtures import fork, run_processes, wait

import transduce
from transduce.errors import InputError
from transduce.run import LOCK_FILE, RunLock, lock_run
from transduce.storage.folder_lock import HEARTBEAT, SILENCE
from transduce.training.distributed import Processes

ALONE = Processes()


def left_by(folder: Path, host: str, age: float, pid: int = 2**22 + 1) -> Path:
    """The lock file of a holder that was killed."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps({"pid": pid, "host": host, "since": time.time() - age}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_second_holder_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with lock_run(tmp_path, ALONE):
        told = rf"process {os.getpid()} on {re.escape(socket.gethostname())} \(since 20.*\) is training in this folder"
        with pytest.raises(InputError, match=told), lock_run(tmp_path, ALONE):
            pass
        assert (tmp_path / LOCK_FILE).exists()  # the refused one did not remove it
    with lock_run(tmp_path, ALONE) as lock:
        assert lock.recovered == ""
    assert not list(tmp_path.iterdir())


def test_folders_that_were_created_for_nothing_are_removed(tmp_path: Path) -> None:
    with lock_run(tmp_path / "runs" / "new", ALONE):
        pass
    assert not list(tmp_path.iterdir())
    with lock_run(tmp_path / "runs" / "new", ALONE):
        (tmp_path / "runs" / "new" / "recipe.yaml").touch()
    assert (tmp_path / "runs" / "new" / "recipe.yaml").exists()


def test_a_dead_holder_on_this_host_is_recovered_at_once(tmp_path: Path) -> None:
    left_by(tmp_path, socket.gethostname(), age=0)
    with lock_run(tmp_path, ALONE) as lock:
        assert f"process {2**22 + 1}" in lock.recovered


def test_a_holder_on_another_host_is_dead_after_a_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    left_by(tmp_path, "elsewhere", age=SILENCE / 2)
    with pytest.raises(InputError, match=r"on elsewhere .*last sign of life was 60 seconds ago"):
        RunLock(tmp_path).acquire()
    left_by(tmp_path, "elsewhere", age=2 * SILENCE)
    with lock_run(tmp_path, ALONE) as lock:
        assert "on elsewhere" in lock.recovered
    assert HEARTBEAT < SILENCE / 3


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cluster file systems: the process of the holder is looked up instead."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", unsupported)
    left_by(tmp_path, socket.gethostname(), age=0, pid=os.getppid())
    with pytest.raises(InputError, match=f"process {os.getppid()} on .* is training in this folder"):
        RunLock(tmp_path).acquire()
    left_by(tmp_path, socket.gethostname(), age=0)
    with lock_run(tmp_path, ALONE) as lock:
        assert lock.recovered


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="cannot be written"):
            RunLock(folder).acquire()


def recipe(folder: Path, steps: int) -> dict:
    pairs = folder / "pairs.tsv"
    if not pairs.exists():
        pairs.write_text("".join(f"{one}\t{two}\n" for one, two in colour_pairs(40)), encoding="utf-8")
    model = {"encoder": {**RECURRENT, "width": 8}, "decoder": {**RECURRENT, "width": 8, "context": "luong"}}
    made = settings(pairs, model, "words", steps=steps, log_every=1, patience=None, device="cpu")
    made["data"]["cache"] = str(folder / "cache")
    return made


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    """The second is refused whatever it asks for; readers are not; a killed holder leaves the run free."""
    options = {"recipe": recipe(tmp_path, 10**6), "folder": str(tmp_path / "run")}
    child = fork(options)
    try:
        end = time.monotonic() + 300
        while not (log := tmp_path / "run" / "log.jsonl").exists() or not log.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        for resume in (False, True):
            with pytest.raises(InputError, match=rf"process {child} on .* is training in this folder"):
                transduce.train(options["recipe"], tmp_path / "run", resume=resume)
        assert transduce.run.Run(tmp_path / "run").recipe().training.steps == 10**6
    finally:
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
    (tmp_path / "run" / f".part-{socket.gethostname()}.{child}.0-metrics.json").write_text("half")
    alive = tmp_path / "run" / f".part-{socket.gethostname()}.{os.getppid()}.0-metrics.json"
    alive.write_text("being written")
    assert transduce.train(recipe(tmp_path, 1), tmp_path / "run", resume=True).outcome.step >= 1
    assert [path.name for path in (tmp_path / "run").glob(".part-*")] == [alive.name]
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    record("two trainings in one folder", "the second is refused, with the process and host of the first", 2, 2)


@pytest.mark.slow
def test_processes_of_one_training_share_the_lock_and_its_refusal(tmp_path: Path) -> None:
    request = {"do": "together", "options": {"recipe": recipe(tmp_path, 2), "folder": str(tmp_path / "run")}, "size": 2}
    with lock_run(tmp_path / "run", ALONE):
        assert run_processes(request) == [[70, 70]]
    assert run_processes(request) == [[0, 0]]
