"""Records that need a GPU: order of the jobs, the end of their time, and what is not run again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import JOBS, Job, Runner, chosen_jobs, environment
from transduce.evaluation.scoreboard import ROWS

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
name, seconds = sys.argv[1:3]
folder = Path(__file__).parent
signal.signal(signal.SIGTERM, lambda *_: (folder / f"{name}.saved").touch() or sys.exit(3))
with (folder / "order").open("a") as file:
    file.write(f"{name} begins with {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}\\n")
time.sleep(float(seconds))
with (folder / "order").open("a") as file:
    file.write(f"{name} ends\\n")
print("last line of", name)
sys.exit(int(name == "broken"))
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that takes a name and the seconds that it runs."""
    (tmp_path / "trial.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def job(name: str, place: str, seconds: float = 0.0) -> Job:
    return Job(name, ("trial", name, str(seconds)), place)


def test_what_runs_alone_is_first_and_the_cpu_jobs_see_no_gpu(jobs: Path) -> None:
    runner = Runner(jobs, jobs, time.monotonic() + 600)
    outcomes = runner.run_all([job("row", "gpu"), job("forms", "cpu"), job("engine", "alone"), job("broken", "alone")])
    assert [(one.job.name, one.status) for one in outcomes] == [("engine", 0), ("broken", 1), ("row", 0), ("forms", 0)]
    assert outcomes[0].last_line == "last line of engine"
    order = (jobs / "order").read_text().splitlines()
    assert order[:4] == ["engine begins with all", "engine ends", "broken begins with all", "broken ends"]
    assert {"row begins with all", "forms begins with "} <= set(order[4:])
    again = runner.run_all([job("row", "gpu"), job("broken", "alone")])
    assert [one.job.name for one in again] == ["broken"]  # what has not succeeded


def test_a_job_is_asked_to_save_at_the_end_of_the_time_and_none_begins(jobs: Path) -> None:
    runner = Runner(jobs, jobs, time.monotonic() + 3)
    (found,) = runner.run_all([job("long", "gpu", 600), job("next", "gpu")])
    assert (found.job.name, found.status) == ("long", None)
    assert (jobs / "long.saved").exists()
    assert not (jobs / "long.done").exists()
    assert "next" not in (jobs / "order").read_text()


def test_a_job_that_does_not_end_is_killed(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SAVING_SECONDS", 0.2)
    (jobs / "trial.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
    )
    (found,) = Runner(jobs, jobs, time.monotonic() + 3).run_all([job("deaf", "gpu")])
    assert found.status is None


def test_jobs_are_rows_of_the_scoreboard_and_modules() -> None:
    for one in JOBS:
        assert "reproduce" not in one.arguments or one.arguments[2] in ROWS
        assert one.arguments[0] == "transduce" or (Path(gpu.__file__).parent / f"{one.arguments[0][11:]}.py").is_file()
        assert environment(one).get("CUDA_VISIBLE_DEVICES", "all") == ("" if one.place == "cpu" else "all")
    assert [one.name for one in chosen_jobs(["sharding", "engine"])] == ["sharding", "engine"]
    with pytest.raises(SystemExit, match="no such job: x"):
        chosen_jobs(["x"])


def test_the_list_names_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [one.name for one in JOBS]
