"""Training report: log entries, progress bar, learning curves."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.training.experiment import _describe_vocabulary
from transduce.training.report import LogEntry, Report, RunReport, SilentReport, draw_curves, duration, read_log


def line(step: int, loss: float | None = 2.0) -> LogEntry:
    return LogEntry(step, 0, loss, {"nll": 1.0}, 1e-3, 0.5, 1234.0, 0.05, 9.0, 1000, 60.0)


def report(folder: Path, **options: Any) -> RunReport:
    console = Console(file=io.StringIO(), force_terminal=options.pop("terminal", False), width=200)
    return RunReport(folder, console=console, **options)


def shown(made: RunReport) -> str:
    assert isinstance(made.console.file, io.StringIO)
    return made.console.file.getvalue()


def test_log_entries_have_the_documented_fields(tmp_path: Path) -> None:
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        told.log(line(1))
        told.validation(1, {"loss": 1.5, "bleu": math.nan})
        told.event("skipped", 2, "update skipped")
    update, validation, event = (json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines())
    assert set(update) == {
        *("kind", "step", "epoch", "loss", "nll", "perplexity", "learning_rate", "gradient_norm"),
        *("tokens_per_second", "padding", "seconds", "peak_memory"),
    }
    assert update["perplexity"] == pytest.approx(math.e)
    assert validation == {"kind": "validation", "step": 1, "loss": 1.5, "bleu": None}
    assert event == {"kind": "event", "event": "skipped", "step": 2, "text": "update skipped"}


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        told.log(line(3))
        told.validation(3, {"loss": 1.5})
    text = shown(told)
    assert "\x1b" not in text
    assert "step 3/10  loss 2.000  ppl 2.718  1,234 tok/s  grad norm 0.50  lr 0.001  padding 5%  1:00 left\n" in text
    assert "step 3  development  loss 1.5\n" in text


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    with report(tmp_path, terminal=True) as told:
        told.start(2, 10, 0)
        told.advance(3)
        told.log(line(3))
    text = shown(told)
    assert "3/10" in text
    assert "loss 2.000" in text


def test_each_step_is_logged_once_after_a_resume(tmp_path: Path) -> None:
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        for step in range(1, 8):
            told.log(line(step))
            if step % 2 == 0:
                told.validation(step, {"loss": 1.0})
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"kind": "update", "step": 8, "lo')  # killed in mid-line
    with report(tmp_path) as told:
        told.start(4, 10, 2)  # the checkpoint of step 4 was written before its validation was made
        told.event("resumed", 4, "resumed")
        told.validation(4, {"loss": 1.0})
        for step in range(5, 11):
            told.log(line(step))
    log_lines = read_log(tmp_path / "log.jsonl")
    assert [item["step"] for item in log_lines if item["kind"] == "update"] == list(range(1, 11))
    assert [item["step"] for item in log_lines if item["kind"] == "validation"] == [2, 4]


def test_a_skipped_update_is_logged_without_a_loss(tmp_path: Path) -> None:
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        told.log(LogEntry(1, 0, None, {}, 1e-3, math.nan, 0.0, 0.0, 1.0, 1))
    (content,) = read_log(tmp_path / "log.jsonl")
    assert content["loss"] is content["gradient_norm"] is content["perplexity"] is None


@pytest.mark.parametrize("validated", [True, False])
def test_learning_curves_are_drawn(validated: bool, tmp_path: Path) -> None:
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        for step in range(1, 6):
            told.log(line(step, None if step == 3 else 2.0))
        if validated:
            told.validation(4, {"loss": 1.0, "bleu": 20.0})
            told.validation(5, {"loss": math.nan, "bleu": 21.0})
    draw_curves(tmp_path / "log.jsonl", tmp_path / "pictures" / "curves.png")
    assert (tmp_path / "pictures" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_both_loss_curves_are_without_label_smoothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    with report(tmp_path) as told:
        told.start(0, 10, 0)
        told.log(dataclasses.replace(line(1), loss=3.0, parts={"nll": 2.5}))
        told.validation(1, {"loss": 2.4})
    draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    axes = drawn[0].axes[0]
    assert [list(curve.get_ydata()) for curve in axes.lines] == [[2.5], [2.4]]
    assert axes.get_ylabel() == "negative log-likelihood per token"


def test_silent_report_warns_of_damaged_checkpoints_only() -> None:
    silent: Report = SilentReport()
    silent.start(0, 1, 0)
    silent.log(line(1))
    silent.event("skipped", 1, "x")
    with pytest.warns(UserWarning, match="step 5 is damaged"):
        silent.event("damaged", 1, "step 5 is damaged")


def test_durations_are_formatted() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 61, 3600, 86399)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "23:59:59",
    ]


def test_classes_are_counted_without_special_tokens() -> None:
    labels = Tokenizer.train(["positive", "negative", "positive"], "labels", 100)
    assert _describe_vocabulary(labels) == "2 labels"
