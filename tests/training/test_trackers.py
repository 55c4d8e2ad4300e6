"""Experiment trackers: what each service receives, told by fakes that record their calls; nothing uses the network."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from transduce.contracts import Tracker
from transduce.errors import InputError
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe
from transduce.recipe.registry import REGISTRIES, complete, factory
from transduce.training.report import TRACKERS, LogEntry, RunReport

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
RECIPE = {"training": {"steps": 3}, "tokens": {"shared": True}}


class Service:
    """All three libraries at once: every number that is logged, by its name and step."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], float] = {}
        self.started: list[Any] = []
        self.closed = 0

    # tensorboard
    def SummaryWriter(self, folder: str) -> Service:  # noqa: N802
        self.started.append(folder)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.numbers[name, step] = value

    def close(self) -> None:
        self.closed += 1

    # wandb
    def init(self, **options: Any) -> Service:
        self.started.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.numbers.update({(name, step): value for name, value in numbers.items()})

    finish = close

    # mlflow
    def MlflowClient(self) -> Service:  # noqa: N802
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.started.append((experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"id-{len(self.started)}"))

    def log_param(self, run: str, name: str, value: str) -> None:
        self.numbers[name, -1] = value  # type: ignore[assignment]

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        assert run == "id-1"
        self.numbers[name, step] = value

    def set_terminated(self, run: str) -> None:
        self.closed += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    for name in MODULES.values():
        monkeypatch.setitem(sys.modules, name, made)
    return made


def tracker(kind: str, folder: Path) -> Tracker:
    made: Tracker = factory(Tracker, complete(Tracker, kind, "training.trackers"))(folder, RECIPE)
    return made


def train(*trackers: Tracker, folder: Path) -> None:
    """The calls that a short training makes."""
    with RunReport(folder, console=Console(file=io.StringIO()), trackers=trackers) as report:
        report.start(0, 10, 0)
        report.log(LogEntry(3, 0, 2.0, {"nll": 1.5}, 1e-3, 0.5, 1234.0, 0.05, 9.0, 1000))
        report.validation(3, {"bleu": 30.0})


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_receives_training_and_development_numbers(kind: str, service: Service, tmp_path: Path) -> None:
    train(tracker(kind, tmp_path), folder=tmp_path)
    assert service.numbers["training/loss", 3] == 2.0
    assert service.numbers["training/nll", 3] == 1.5
    assert service.numbers["development/bleu", 3] == 30.0
    assert ("training/kind", 3) not in service.numbers
    assert service.closed == 1
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_resumed_run_goes_on_in_the_same_run_of_the_service(kind: str, service: Service, tmp_path: Path) -> None:
    for _ in range(2):
        train(tracker(kind, tmp_path), folder=tmp_path)
    if kind == "wandb":
        assert service.started[0]["id"] == service.started[1]["id"]
        assert service.started[0]["config"] == RECIPE
    else:
        assert service.started == [("transduce", tmp_path.name)]
        assert service.numbers["training.steps", -1] == "3"


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_missing_library_is_named_with_its_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES[kind], None)
    with pytest.raises(InputError, match=rf"transduce\[{kind}\]"):
        tracker(kind, tmp_path)


def test_a_service_that_fails_does_not_stop_training(service: Service, tmp_path: Path) -> None:
    class Failing(Tracker):
        def track(self, group: str, step: int, scalars: Any) -> None:
            raise ConnectionError("no route to host")

    with pytest.warns(UserWarning, match="Failing: no route to host: training goes on without it") as told:
        train(Failing(), tracker("wandb", tmp_path), folder=tmp_path)
    assert len(told) == 1
    assert service.numbers["development/bleu", 3] == 30.0


def test_trackers_are_parts_of_a_recipe() -> None:
    assert REGISTRIES[Tracker] is TRACKERS
    part = {"kind": "recurrent"}
    recipe = {"model": {"encoder": part, "decoder": part}}
    complete_recipe(parse({**recipe, "training": {"trackers": ["mlflow", {"kind": "wandb", "project": "x"}]}}))
    with pytest.raises(InputError, match="did you mean 'wandb'"):
        complete_recipe(parse({**recipe, "training": {"trackers": ["wandbb"]}}))
    with pytest.raises(InputError, match="did you mean 'project'"):
        complete_recipe(parse({**recipe, "training": {"trackers": [{"kind": "wandb", "projekt": "x"}]}}))
