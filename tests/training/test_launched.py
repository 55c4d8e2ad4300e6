"""Updates that are told one later than they are begun: the same weights, the same lines, the same counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_fixtures import TinyBatches, TinyModel

from transduce.recipe import parse
from transduce.training.checkpoint import CheckpointManager
from transduce.training.report import LogEntry, SilentReport
from transduce.training.trainer import train
from transduce.training.update import Update


class Heard(SilentReport):
    def __init__(self) -> None:
        self.lines: list[LogEntry] = []
        self.said: list[tuple[str, int]] = []

    def log(self, line: LogEntry) -> None:
        self.lines.append(line)

    def event(self, kind: str, step: int, text: str) -> None:
        self.said.append((kind, step))


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_told_later_and_nothing_else(average: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(Update, "asynchronous", property(lambda self, ahead=ahead: ahead))
        options = {
            "steps": 11,
            "log_every": 2,
            "validate_every": 4,
            "checkpoint_every": 3,
            "monitor": "loss",
            "ema": average,
            "clip": None,  # which is rounded otherwise ahead
        }
        settings = parse({"training": options}).training
        model, heard = TinyModel(), Heard()
        place = CheckpointManager(tmp_path / str(ahead))
        validations: list[float] = []

        def validate(seen: torch.nn.Module, validations: list[float] = validations) -> dict[str, float]:
            validations.append(float(next(seen.parameters()).sum()))
            return {"loss": -validations[-1]}

        outcome = train(model, TinyBatches(), settings, checkpoints=place, report=heard, validate=validate)
        lines = [(one.step, one.epoch, one.loss, one.learning_rate, one.gradient_norm) for one in heard.lines]
        found.append((outcome, lines, heard.said, validations, model.state_dict()))
    plain, later = found
    assert plain[:4] == later[:4]
    assert [step for step, *_ in plain[1]] == [2, 4, 6, 8, 10]
    assert all(torch.equal(plain[4][name], later[4][name]) for name in plain[4])
