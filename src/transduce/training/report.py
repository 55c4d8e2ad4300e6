"""Training report: progress bar, log.jsonl, learning curves, trackers (TensorBoard, Weights & Biases, MLflow)."""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from transduce.contracts import Tracker
from transduce.errors import InputError
from transduce.storage import WriteError, atomic_path, make_folder, open_new, optional_write, replace_file

CONSOLE = "the printed training report"


@dataclass(frozen=True)
class LogEntry:
    """The log entry of every `log_every` updates; losses are means over the tokens since the previous entry."""

    step: int
    epoch: int
    loss: float | None  # None: every update since the previous entry was skipped
    parts: dict[str, float]
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    padding: float  # fraction of slots without a token
    seconds: float  # training time, without interruptions
    peak_memory: int  # bytes
    seconds_left: float | None = None

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(self.parts["nll"], 700)) if "nll" in self.parts else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "update",
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            **self.parts,
            "perplexity": self.perplexity,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
            "tokens_per_second": self.tokens_per_second,
            "padding": self.padding,
            "seconds": self.seconds,
            "peak_memory": self.peak_memory,
        }

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        parts += [f"ppl {self.perplexity:.4g}"] if self.perplexity is not None else []
        parts += [f"{self.tokens_per_second:,.0f} tok/s", f"grad norm {self.gradient_norm:.2f}"]
        parts += [f"lr {self.learning_rate:.2g}", f"padding {self.padding:.0%}"]
        parts += [f"{duration(self.seconds_left)} left"] if self.seconds_left is not None else []
        return "  ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Report(Protocol):
    """Receiver of the progress of a training run."""

    def start(self, step: int, steps: int, validated: int) -> None:
        """Training continues after `step`; entries about later updates, of a process that died, are discarded."""

    def advance(self, step: int) -> None: ...

    def log(self, entry: LogEntry) -> None: ...

    def validation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """A notable event: a skipped update, a split batch, what a resumed run found changed, the end."""

    def close(self) -> None: ...


class Callback:
    """Base of callbacks: methods that training calls, and that do nothing here."""

    def start(self, step: int, steps: int, validated: int) -> None:
        """Training begins, or continues after `step`, and has at most `steps` updates."""

    def advance(self, step: int) -> None:
        """An update is done."""

    def log(self, entry: LogEntry) -> None:
        """Losses and speed since the last entry, every `training.log_every` updates."""

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Loss and metrics on the development set."""

    def event(self, kind: str, step: int, text: str) -> None:
        """A notable event: a skipped update, the end."""

    def close(self) -> None:
        """Training has ended."""


class SilentReport(Callback):
    """No report but warnings of what a resumed run found changed: for library use, all processes but the first."""

    def event(self, kind: str, step: int, text: str) -> None:
        if kind in ("damaged", "changed", "environment"):
            warnings.warn(text, stacklevel=2)


class RunReport:
    """A progress bar on a terminal, plain lines elsewhere, and `folder/log.jsonl`."""

    def __init__(self, folder: str | Path, *, console: Console | None = None, trackers: Sequence[Tracker] = ()) -> None:
        self.path = Path(folder) / "log.jsonl"
        self.console = console or Console(file=sys.stderr)
        self._trackers = list(trackers)
        self._bar: Progress | None = None
        self._log: TextIO | None = None
        self._unwritable: set[str | Path] = set()  # outputs that failed, each with a warning
        self._steps = 0

    def start(self, step: int, steps: int, validated: int) -> None:
        self._end()
        with optional_write(self.path, "training goes on without a log"):
            make_folder(self.path.parent)
            truncate_log(self.path, step, validated)
            self._log = open(open_new(self.path, os.O_APPEND), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._steps = steps
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=step, text="")
            self._bar.start()

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def log(self, entry: LogEntry) -> None:
        content = entry.to_json()
        self._write(content)
        if self._bar:
            self._bar.update(self._task, completed=entry.step, text=str(entry))
        else:
            self._print(f"step {entry.step}/{self._steps}  {entry}")
        self._track("training", entry.step, content)

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        self._write({"kind": "validation", "step": step, **scores})
        text = "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
        self._print(f"step {step}  development  {text}")
        self._track("development", step, scores)

    def event(self, kind: str, step: int, text: str) -> None:
        self._write({"kind": "event", "event": kind, "step": step, "text": text})
        self._print(f"step {step}  {text}")

    def close(self) -> None:
        for tracker in self._trackers:
            self._ask(tracker, tracker.close)
        self._end()

    def _end(self) -> None:
        """Ends the progress bar and closes the log."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self._log:
            with self._once(self.path):
                self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        if CONSOLE not in self._unwritable:  # the console keeps what it could not print, and would print it again
            with self._once(CONSOLE):
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _once(self, name: str | Path) -> Iterator[None]:
        """A full disk does not stop training: the first error of an output is a warning, later ones are silent."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritable:
                self._unwritable.add(name)
                warnings.warn(f"{WriteError(name, error).problem_at}: training goes on", stacklevel=4)

    def _write(self, content: Mapping[str, Any]) -> None:
        # JSON has no NaN: other programs read this file too.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
        if self._log:
            with self._once(self.path):
                self._log.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")

    def _track(self, group: str, step: int, content: Mapping[str, Any]) -> None:
        scalars = {name: value for name, value in content.items() if isinstance(value, (int, float)) and name != "step"}
        for tracker in self._trackers:
            self._ask(tracker, partial(tracker.track, group, step, scalars))

    def _ask(self, tracker: Tracker, action: Callable[[], None]) -> None:
        """A service that cannot be reached does not stop training: its tracker is left out from now on."""
        try:
            action()
        except Exception as error:
            self._trackers = [one for one in self._trackers if one is not tracker]
            warnings.warn(f"{type(tracker).__name__}: {error}: training goes on without it", stacklevel=4)


class Reports:
    """Several receivers of one report."""

    def __init__(self, *receivers: Report) -> None:
        self.receivers = receivers

    def start(self, step: int, steps: int, validated: int) -> None:
        for one in self.receivers:
            one.start(step, steps, validated)

    def advance(self, step: int) -> None:
        for one in self.receivers:
            one.advance(step)

    def log(self, entry: LogEntry) -> None:
        for one in self.receivers:
            one.log(entry)

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        for one in self.receivers:
            one.validation(step, scores)

    def event(self, kind: str, step: int, text: str) -> None:
        for one in self.receivers:
            one.event(kind, step, text)

    def close(self) -> None:
        for one in self.receivers:
            one.close()


class TableRow(SilentReport):
    """One training in a `TrainingTable`."""

    def __init__(self, table: TrainingTable, name: str, note: str) -> None:
        self.table, self.name, self.note = table, name, note
        self.step, self.steps, self.state = 0, 0, "waiting"
        self.scores: Mapping[str, float] = {}

    def start(self, step: int, steps: int, validated: int) -> None:
        self.step, self.steps, self.state = step, steps, "training"
        self.table.refresh()

    def advance(self, step: int) -> None:
        self.step = step

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        self.step, self.scores = step, scores
        self.table.refresh()

    def finish(self, scores: Mapping[str, float], state: str = "done") -> None:
        """The final scores; without a terminal, a line is printed."""
        self.scores, self.state = scores, state
        self.table.refresh()
        self.table.print_row(self)

    def cells(self) -> list[str]:
        done = f"{self.step:,}/{self.steps:,}" if self.steps and self.state == "training" else ""
        scores = "  ".join(f"{name} {value:.4g}" for name, value in self.scores.items())
        return [self.name, self.note, self.state, done, scores]


class TrainingTable:
    """A table of several trainings, live on a terminal: updates and development scores of each."""

    def __init__(self, console: Console) -> None:
        self.console, self.rows = console, list[TableRow]()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def row(self, name: str, note: str = "") -> TableRow:
        """A new last row."""
        self.rows.append(TableRow(self, name, note))
        self.refresh()
        return self.rows[-1]

    def draw(self) -> Table:
        table = Table("training", "", "", "updates", "development", box=None, header_style="bold", pad_edge=False)
        for row in self.rows:
            table.add_row(*map(escape, row.cells()))
        return table

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def print_row(self, row: TableRow) -> None:
        """A finished row as a line, where the table is not live."""
        if self._live is None:
            text = "  ".join(cell for cell in row.cells() if cell)
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def truncate_log(path: Path, step: int, validated: int) -> None:
    """Removes the entries of updates after `step`, and a last line that a killed process left incomplete."""
    lines = [
        line
        for line, content in _entries(path)
        if content["step"] <= (validated if content.get("kind") == "validation" else step)
    ]
    if path.exists():
        replace_file(path, "".join(line + "\n" for line in lines))


def read_log(path: str | Path) -> list[dict[str, Any]]:
    return [content for _, content in _entries(Path(path))]


def _entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The complete lines of a log, as text and as content."""
    result = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n"):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            result.append((line, content))
    return result


LOSSES = ("loss", "nll", "perplexity")


def draw_curves(log_path: str | Path, png_path: str | Path) -> None:
    """Learning curves: losses, metrics on the development set (if any), learning rate."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    log = read_log(log_path)
    updates = [entry for entry in log if entry.get("kind") == "update" and entry["loss"] is not None]
    validations = [entry for entry in log if entry.get("kind") == "validation"]
    metrics = sorted({name for entry in validations for name in entry} - {"kind", "step", *LOSSES})
    rows = 3 if metrics else 2
    figure = Figure(figsize=(8, 2.6 * rows), layout="constrained")
    loss, *middle, learning_rate = figure.subplots(rows, 1, sharex=True)
    steps = [entry["step"] for entry in updates]
    # The development loss is that without label smoothing: the training loss beside it must be the same quantity.
    plain = bool(updates) and all(entry.get("nll") is not None for entry in updates)
    loss.plot(*_series(updates, "nll" if plain else "loss"), color="0.6", linewidth=1, label="training")
    loss.plot(*_series(validations, "loss"), "o-", label="development")
    loss.set_ylabel("negative log-likelihood per token" if plain else "loss per token")
    loss.legend()
    for name in metrics:
        middle[0].plot(*_series(validations, name), "o-", label=name)
    if middle:
        middle[0].set_ylabel("development")
        middle[0].legend()
    learning_rate.plot(steps, [entry["learning_rate"] for entry in updates], color="tab:green")
    learning_rate.set_ylabel("learning rate")
    learning_rate.set_xlabel("update")
    make_folder(Path(png_path).parent)
    with atomic_path(png_path) as part:
        figure.savefig(part, dpi=120, format="png")


def _series(entries: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the entries that have this number."""
    present = [entry for entry in entries if entry.get(name) is not None]
    return [entry["step"] for entry in present], [entry[name] for entry in present]


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
