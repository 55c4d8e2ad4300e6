"""Work on many shards: local processes or Ray Data, each shard done exactly once, continued after a crash.

A task is a number. Its work is a callable that writes files with the storage module, so that they appear complete or
not at all, and last a file that marks it as done. Doing a task twice writes the same bytes again, so a task that was
cut short is repeated, and one that is marked is not. The order of tasks and the number of workers change no output.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, Literal

from transduce.errors import InputError
from transduce.parsing import read_json
from transduce.storage import json_line, make_folder, remove_incomplete, replace_file
from transduce.storage.folder_lock import FolderLock

Backend = Literal["local", "ray"]
Work = Callable[[int], None]
Failure = dict[str, str]  # the parts of an InputError; empty: the work is done
BACKENDS: tuple[Backend, ...] = ("local", "ray")
LOCK = "work.lock"
DONE = "{}.done.json"  # of a task; marks it as done
ATTEMPTS = 3  # of a group of tasks whose workers die without finishing one of them


def run_tasks(
    work: Work,
    tasks: Sequence[int],
    *,
    workers: int = 1,
    backend: Backend = "local",
    gpus: float = 0,
    done: Callable[[int], None] = lambda _: None,
) -> None:
    """Does all tasks, in any order. `done` is called with the number of those that are finished.

    `gpus`: of each worker, on Ray, for which a `cluster` is open. An InputError of a task is raised here; a worker that
    dies is replaced.
    """
    if backend == "ray":
        failures = _on_ray(work, tasks, workers, gpus)
    elif workers == 1 or len(tasks) < 2:
        failures = (_attempt(work, task) for task in tasks)
    else:
        failures = _in_processes(work, tasks, workers)
    with closing(failures):  # an error ends the other tasks now, not when the garbage is collected
        for count, failure in enumerate(failures, 1):
            if failure:
                raise InputError(failure["problem"], where=failure["where"], remedy=failure["remedy"])
            done(count)


def _attempt(work: Work, task: int) -> Failure:
    """Errors of the input travel as values: not every exception survives the way between processes."""
    try:
        work(task)
    except InputError as error:
        return {"problem": error.problem, "where": error.where, "remedy": error.remedy}
    return {}


def _in_processes(work: Work, tasks: Sequence[int], workers: int) -> Generator[Failure, None, None]:
    """Processes that start from a server without threads. When one is killed, the others end too, and all are new."""
    context, left, attempts = get_context("forkserver"), list(tasks), 0
    context.set_forkserver_preload([work.__module__])
    while left:
        before = len(left)
        try:
            with ProcessPoolExecutor(min(workers, len(left)), context, _end_with_parent) as pool:
                running = {pool.submit(_attempt, work, task): task for task in left}
                try:
                    for future in as_completed(running):
                        failure = future.result()
                        left.remove(running[future])
                        yield failure
                finally:
                    pool.shutdown(cancel_futures=True)
        except BrokenProcessPool:
            attempts = 0 if len(left) < before else attempts + 1
            if attempts == ATTEMPTS:
                raise InputError(
                    f"workers were killed {ATTEMPTS} times in a row",
                    where=f"shard {left[0]}",
                    remedy="the system may be out of memory: use fewer workers, or smaller shards",
                ) from None


def _end_with_parent() -> None:
    """Ends this worker when the process that started it dies, however it dies. One thread: workers share the cores."""
    import torch

    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    torch.set_num_threads(1)
    threading.Thread(target=watch, daemon=True).start()


def _on_ray(work: Work, tasks: Sequence[int], workers: int, gpus: float) -> Generator[Failure, None, None]:
    """Actors of Ray Data. One that dies is started again, and its task with it."""
    import ray

    if not tasks:
        return
    numbers = ray.data.from_items([{"task": task} for task in tasks], override_num_blocks=len(tasks))
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=workers)
    resources = {"num_cpus": 1, "num_gpus": gpus or None, "compute": pool}
    found = numbers.map_batches(_RayWorker, batch_size=1, fn_constructor_args=[work], **resources)
    for row in found.iter_rows():
        yield {name: str(row[name]) for name in ("problem", "where", "remedy")} if row["problem"] else {}


@contextmanager
def cluster(backend: Backend, workers: int) -> Iterator[None]:
    """Ray, on the cluster of RAY_ADDRESS or started on this machine, for the tasks of a block; else nothing."""
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}", where="--backend", remedy=", ".join(BACKENDS))
    if backend == "local":
        yield
        return
    try:
        import ray.data
    except ImportError:
        raise InputError("--backend ray needs Ray", remedy="pip install 'transduce[ray]'") from None
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="error", **local)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        yield
    finally:
        if started:
            ray.shutdown()


class _RayWorker:
    """An actor, which keeps what the work has loaded."""

    def __init__(self, work: Work) -> None:
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        self._work = work

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        failures = [_attempt(self._work, int(task)) for task in batch["task"]]
        return {name: [one.get(name, "") for one in failures] for name in ("problem", "where", "remedy")}


@contextmanager
def work_folder(folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """The folder of a piece of work, for a block, in which no other process works. An error before any task is done
    leaves no folder: the next command may have other options, such as those that the error asks for."""
    lock = FolderLock(folder / LOCK, "works", "wait until it ends, or stop it and give the same command again")
    lock.acquire()
    try:
        _begin(folder, settings)
        try:
            yield
        except InputError:
            if not any(folder.rglob(DONE.format("*"))):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        lock.release()


def _begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """Makes the folder of a piece of work, or continues in it. Work with other settings or inputs is refused."""
    path, content = folder / "settings.json", json_line(settings)
    if not path.is_file():
        make_folder(folder)
        remove_incomplete(folder)
        if any(path.name != LOCK for path in folder.iterdir()):  # an error may remove the folder
            raise InputError("this folder has other files", where=str(folder), remedy="move it, or give another output")
        replace_file(path, content)
        return
    began = read_json(path, max_bytes=1 << 28)
    if json_line(began) != content:
        given = [name for name in {**began, **settings} if began.get(name) != settings.get(name)]
        raise InputError(
            f"this work began with other values of: {', '.join(sorted(given))}",
            where=str(folder),
            remedy="give what the command began with, or remove the folder to begin again",
        )


def mark_done(folder: Path, task: int, content: Mapping[str, Any]) -> None:
    """Marks a task as done, after all of its files are written."""
    replace_file(folder / DONE.format(f"{task:06}"), json_line(content))


def records(folder: Path, tasks: Iterable[int]) -> list[dict[str, Any]]:
    """What was marked for each task."""
    return [read_json(folder / DONE.format(f"{task:06}"), max_bytes=1 << 24) for task in tasks]


def unfinished(folder: Path, tasks: Iterable[int]) -> list[int]:
    """The tasks that are not marked as done."""
    return [task for task in tasks if not (folder / DONE.format(f"{task:06}")).is_file()]
