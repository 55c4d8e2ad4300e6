"""Records that need a GPU, made by one command within a limit of time.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --data DATA --minutes 9
    python -m benchmarks.gpu --data DATA --only engine sharding

Measurements of time run first, one after another and alone on the machine. Then rows of the scoreboard are trained:
those of the GPU one after another, each with several trainings at once, and beside them those whose small networks are
as fast on a core of the CPU. At the end of the time, trainings are saved; the same command continues them and leaves
out what is done. The output of each job is in its log below `runs/gpu`, its records where every command writes them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path("runs/gpu")
SAVING_SECONDS = 40.0  # for trainings to write their checkpoints after SIGTERM
CLAIM = ("transduce", "claims", "complexity", "--device", "cuda", "--out", "runs/gpu/claims")

# Schedules that were chosen on development data for the least time: see docs/autoconfig.md.
SHAKESPEARE = ("training.steps=3000", "training.validate_every=750", "training.checkpoint_every=250")
MULTI30K = (
    "training.steps=5200",
    "training.schedule={kind: cosine, warmup: 433}",
    "training.patience=null",
    "training.average_checkpoints=3",
    "training.checkpoint_every=1040",
    "training.validate_every=5200",
)


@dataclass(frozen=True)
class Job:
    """A command that makes a record. `{data}` stands for the folder of the data sets."""

    name: str
    arguments: tuple[str, ...]  # after `python -m`
    place: Literal["alone", "gpu", "cpu"]


def _row(name: str, data: str, jobs: int, place: Literal["gpu", "cpu"] = "gpu", seeds: int = 1) -> Job:
    arguments = ("transduce", "reproduce", name, "--data", f"{{data}}/{data}", "--seeds", str(seeds))
    return Job(name, (*arguments, "--jobs", str(jobs)), place)


JOBS = (
    Job("engine", ("benchmarks.serve", "--engine"), "alone"),
    Job("sharding", ("benchmarks.sharding",), "alone"),
    Job("complexity", CLAIM, "alone"),
    Job("speedrun-shakespeare", ("benchmarks.speedrun", "shakespeare", *SHAKESPEARE, "--data", "{data}"), "alone"),
    Job("speedrun-multi30k", ("benchmarks.speedrun", "multi30k", *MULTI30K, "--data", "{data}"), "alone"),
    Job("speedrun-cmudict", ("benchmarks.speedrun", "cmudict", "training.minutes=0.7", "--data", "{data}"), "alone"),
    _row("g2p2021-medium-ensemble", "g2p2021", 10),
    _row("cmudict-mixed", "cmudict", 5),
    _row("cmudict-distilled", "cmudict", 1),
    _row("g2p2021-low-ensemble", "g2p2021", 10, seeds=3),
    _row("multi30k-en-de-r-drop", "multi30k", 3, seeds=3),
    _row("inflection2017-high-ensemble", "inflection2017", 6),
    _row("cogs-published-settings", "cogs", 1),
    _row("inflection2017-low-ensemble", "inflection2017", 12, "cpu"),
    _row("inflection2017-medium-ensemble", "inflection2017", 12, "cpu"),
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit status, None where its time was over."""

    job: Job
    status: int | None
    seconds: float
    last_line: str


@dataclass(frozen=True)
class Runner:
    """Runs jobs until a moment of the monotonic clock; finished ones leave a mark, and are not run again."""

    data: Path
    folder: Path
    end: float

    def run(self, job: Job) -> Outcome | None:
        """None: the job is done already, or there is no time for it."""
        left = self.end - time.monotonic()
        if (self.folder / f"{job.name}.done").exists() or left <= 0:
            return None
        log, began = self.folder / f"{job.name}.log", time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *(one.replace("{data}", str(self.data)) for one in job.arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(job),
                start_new_session=True,  # the signals reach the processes of its trainings too
            )
            status = wait(process, left)
        if status == 0:
            (self.folder / f"{job.name}.done").touch()
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return Outcome(job, status, time.monotonic() - began, lines[-1] if lines else "")

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        """First what runs alone, then the jobs of the GPU beside those of the CPU."""
        found = [self.run(job) for job in jobs if job.place == "alone"]
        queues = [[job for job in jobs if job.place == place] for place in ("gpu", "cpu")]
        with ThreadPoolExecutor(len(queues)) as pool:
            for outcomes in pool.map(lambda queue: [self.run(job) for job in queue], queues):
                found += outcomes
        return [one for one in found if one is not None]


def environment(job: Job) -> dict[str, str]:
    """One thread for each process, and no GPU for jobs of the CPU."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"}
    if job.place != "alone":
        found["OMP_NUM_THREADS"] = "1"
    if job.place == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None where the time was over, and all processes of the job were asked to save, then killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for sign, patience in ((signal.SIGTERM, SAVING_SECONDS), (signal.SIGKILL, None)):
            os.killpg(process.pid, sign)
            try:
                process.wait(patience)
                return None
            except subprocess.TimeoutExpired:
                continue
        return None


def chosen_jobs(names: Sequence[str]) -> list[Job]:
    known = {job.name: job for job in JOBS}
    if unknown := set(names) - set(known):
        raise SystemExit(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(JOBS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with a folder for each data set")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="of all jobs together; what is not done then is continued by the next call",
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of jobs, in this order")
    parser.add_argument("--list", action="store_true", help="list the jobs")
    given = parser.parse_args(arguments)
    jobs = chosen_jobs(given.only)
    if given.list:
        for job in jobs:
            print(f"{job.name:32}{job.place:8}python -m {' '.join(job.arguments)}")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes - SAVING_SECONDS
    for one in Runner(given.data.absolute(), FOLDER, end).run_all(jobs):
        state = {None: "time is over", 0: "done"}.get(one.status, f"exit status {one.status}")
        print(f"{one.job.name:32}{state:16}{one.seconds:6.0f} s  {one.last_line[:100]}")


if __name__ == "__main__":
    main()
