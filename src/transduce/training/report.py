"""Numbers of a running training enter; a live bar or plain lines, log.jsonl and TensorBoard curves leave."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from transduce.errors import InputError


@dataclass(frozen=True)
class Line:
    """What is said every `log_every` updates; losses are means over the tokens since the line before."""

    step: int
    epoch: int
    loss: float | None  # None: every update since the line before was skipped
    parts: dict[str, float]
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    padding: float
    seconds: float  # since training began, pauses not counted
    memory: int  # most bytes in use so far
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
            "memory": self.memory,
        }

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        parts += [f"ppl {self.perplexity:.4g}"] if self.perplexity is not None else []
        parts += [f"{self.tokens_per_second:,.0f} tok/s", f"|g| {self.gradient_norm:.2f}"]
        parts += [f"lr {self.learning_rate:.2g}", f"padding {self.padding:.0%}"]
        parts += [f"{duration(self.seconds_left)} left"] if self.seconds_left is not None else []
        return "  ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Report(Protocol):
    """Where a training run tells what it does."""

    def start(self, step: int, steps: int, validated: int) -> None:
        """Training goes on after `step`; what was told about later updates, in a life that was lost, is void."""

    def advance(self, step: int) -> None: ...

    def line(self, line: Line) -> None: ...

    def validation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Something to know: an update skipped, a batch split, a damaged checkpoint, a resume, the end."""

    def close(self) -> None: ...


class Silent:
    """For tests, for use as a library, and for all processes but the first. Damage alone is not kept quiet."""

    def start(self, step: int, steps: int, validated: int) -> None: ...

    def advance(self, step: int) -> None: ...

    def line(self, line: Line) -> None: ...

    def validation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        if kind == "damaged":
            warnings.warn(text, stacklevel=2)

    def close(self) -> None: ...


class RunReport:
    """Shows a bar on a terminal, plain lines elsewhere, and writes `folder/log.jsonl`."""

    def __init__(self, folder: str | Path, *, console: Console | None = None, tensorboard: bool = False) -> None:
        self.path = Path(folder) / "log.jsonl"
        self.console = console or Console(file=sys.stderr)
        self._writer = _open_tensorboard(Path(folder) / "tensorboard") if tensorboard else None
        self._bar: Progress | None = None
        self._steps = 0

    def start(self, step: int, steps: int, validated: int) -> None:
        cut(self.path, step, validated)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._steps = steps
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=step, text="")
            self._bar.start()

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def line(self, line: Line) -> None:
        content = line.to_json()
        self._write(content)
        if self._bar:
            self._bar.update(self._task, completed=line.step, text=str(line))
        else:
            self._print(f"step {line.step}/{self._steps}  {line}")
        self._curves("training", line.step, content)

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        self._write({"kind": "validation", "step": step, **scores})
        told = "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
        self._print(f"step {step}  development  {told}")
        self._curves("development", step, scores)

    def event(self, kind: str, step: int, text: str) -> None:
        self._write({"kind": "event", "event": kind, "step": step, "text": text})
        self._print(f"step {step}  {text}")

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self._writer:
            self._writer.close()
        if hasattr(self, "_log"):
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self, content: Mapping[str, Any]) -> None:
        # JSON has no NaN: other programs read this file too.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
        self._log.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")

    def _curves(self, group: str, step: int, content: Mapping[str, Any]) -> None:
        if self._writer:
            for name, value in content.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"{group}/{name}", value, step)


def cut(path: Path, step: int, validated: int) -> None:
    """Drops the lines about updates after `step`, and a last line that a killed process left half-written."""
    if not path.exists():
        return
    kept = [
        line
        for line, content in _lines(path)
        if content["step"] <= (validated if content.get("kind") == "validation" else step)
    ]
    part = path.with_name(f".part-{path.name}")
    part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(part, path)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    return [content for _, content in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    result = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            result.append((line, content))
    return result


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "training.tensorboard is on, but TensorBoard is not installed",
            remedy="pip install 'transduce[tensorboard]', or set training.tensorboard=false",
        ) from None
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call]


LOSSES = ("loss", "nll", "perplexity")


def draw_curves(log_path: str | Path, png_path: str | Path) -> None:
    """Losses above, the metrics of the development set in the middle where there are any, the rate below."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    log = read_log(log_path)
    updates = [line for line in log if line.get("kind") == "update" and line["loss"] is not None]
    checks = [line for line in log if line.get("kind") == "validation"]
    metrics = sorted({name for line in checks for name in line} - {"kind", "step", *LOSSES})
    rows = 3 if metrics else 2
    figure = Figure(figsize=(8, 2.6 * rows), layout="constrained")
    loss, *middle, rate = figure.subplots(rows, 1, sharex=True)
    steps = [line["step"] for line in updates]
    loss.plot(steps, [line["loss"] for line in updates], color="0.6", linewidth=1, label="training")
    told = [line for line in checks if line.get("loss") is not None]
    loss.plot([line["step"] for line in told], [line["loss"] for line in told], "o-", label="development")
    loss.set_ylabel("loss a token")
    loss.legend()
    for name in metrics:
        seen = [line for line in checks if line.get(name) is not None]
        middle[0].plot([line["step"] for line in seen], [line[name] for line in seen], "o-", label=name)
    if middle:
        middle[0].set_ylabel("development")
        middle[0].legend()
    rate.plot(steps, [line["learning_rate"] for line in updates], color="tab:green")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("update")
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=120, format="png")
