"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from transduce.contracts import Tracker
from transduce.errors import InputError
from transduce.storage import make_folder, replace_file


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"training.trackers names {extra}, which is not installed",
            remedy=f"pip install 'transduce[{extra}]', or leave it out",
        ) from None


def run_id(file: Path, new: str = "") -> str:
    """The name of a run at a tracking service, kept in a file of the run directory: a resumed run goes on there."""
    if not file.is_file():
        make_folder(file.parent)
        replace_file(file, new or secrets.token_hex(8))
    return file.read_text(encoding="utf-8").strip()


class TensorBoard(Tracker):
    """event files in `tensorboard/` of the run directory"""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def track(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Weights & Biases; `mode: offline` stores the numbers for `wandb sync`"""

    def __init__(
        self, folder: Path, recipe: Mapping[str, Any], *, project: str = "transduce", mode: str = "online"
    ) -> None:
        wandb = _library("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            mode=mode,
            name=folder.name,
            dir=str(make_folder(folder)),
            id=run_id(folder / "wandb-id.txt"),
            resume="allow",
            config=dict(recipe),
        )

    def track(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in scalars.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow; the environment variable MLFLOW_TRACKING_URI names the server, or a folder"""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], *, experiment: str = "transduce") -> None:
        self._client = _library("mlflow", "mlflow").MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        file = folder / "mlflow-id.txt"
        if not file.is_file():
            run = self._client.create_run(number, run_name=folder.name)
            run_id(file, run.info.run_id)
            for name, value in _flat(recipe).items():
                self._client.log_param(run.info.run_id, name, str(value)[:500])
        self._id = run_id(file)

    def track(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._id, f"{group}/{name}", value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key paths and values of the recipe."""
    result: dict[str, Any] = {}
    for name, value in content.items():
        result.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return result


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
