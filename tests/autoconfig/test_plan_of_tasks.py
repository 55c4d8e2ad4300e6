"""Plans of texts with labels: reasons for what was chosen, and the expected time."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixtures import Command

LINES = [f"a line number {number} of some length" for number in range(200)]


@pytest.mark.parametrize(("task", "target"), [("classify", "good bad"), ("tag", "A B C D E F G")])
def test_the_plan_of_labels_has_reasons_and_a_time(task: str, target: str, tmp_path: Path, command: Command) -> None:
    labels = target.split() if task == "classify" else [target]
    lines = [f"{line}\t{labels[number % len(labels)]}\n" for number, line in enumerate(LINES)]
    (tmp_path / "a.tsv").write_text("".join(lines), encoding="utf-8")
    called = command("train", tmp_path / "a.tsv", "--task", task, "--plan")
    assert called.code == 0, called.err
    shown = " ".join(called.out.split())
    assert "15 passes over the pairs, at least 300 updates" in shown
    assert "an update takes about" in shown
    assert "no limit of time (--minutes gives one)" in shown
