"""Chosen recipes beside hand-written ones: the commands, and what is read from their runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import defaults
from transduce.autoconfig.tasks import TASK_RECIPES
from transduce.synthetic import SYNTHETIC


@pytest.mark.parametrize("name", defaults.CASES)
def test_cases_name_the_task_of_their_data_set_and_a_recipe(name: str) -> None:
    case = defaults.CASES[name]
    assert case.task == SYNTHETIC[name].task
    assert case.task in TASK_RECIPES
    assert (defaults.ROOT / "recipes" / case.recipe).is_file()
    assert case.files == SYNTHETIC[name].writes_files


def test_both_trainings_have_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def transduce(*arguments: str) -> None:
        commands.append(arguments)
        run = Path(arguments[-1])
        run.mkdir()
        score = {"value": 90.0 + len(commands), "low": 88.0, "high": 95.0}
        scores = {"scores": {"exact": score}}
        (run / "metrics.json").write_text(json.dumps({"dev": scores, "test": scores}))
        (run / "recipe.yaml").write_text("model: {encoder: {kind: character_aware, width: 64}}")
        (run / "log.jsonl").write_text('{"step": 7}\n{"kind": "event", "step": 9}\n')

    monkeypatch.setattr(defaults, "_transduce", transduce)
    files = {part: f"{tmp_path}/{part}.tsv" for part in ("train", "dev", "test")}
    case = defaults.CASES["questions"]
    written, chosen = (defaults.train("questions", case, which, files, tmp_path, ()) for which in (False, True))
    assert commands[0][1:3] == ("recipes/questions/copy.yaml", f"data.train.path={tmp_path}/train.tsv")
    assert commands[1][1:4] == (f"{tmp_path}/train.tsv", "--task", "answer")
    held_out = {f"data.dev={tmp_path}/dev.tsv", f"data.test={tmp_path}/test.tsv"}
    assert all(held_out < set(command) for command in commands)
    assert (written.test, chosen.test, chosen.updates) == (91.0, 92.0, 9)
    assert chosen.command == "transduce train train.tsv --task answer data.dev=dev.tsv data.test=test.tsv"
    assert written.network == "character aware 64"
    assert not written.chosen
    assert chosen.chosen
