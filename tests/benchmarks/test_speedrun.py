"""The speedrun: parts that add up, a record."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import speedrun
from transduce.recipe import parse


def test_a_part_is_timed_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: clock[0] / 2)
    watch = speedrun.Stopwatch(_last=(0.0, 0.0))

    class Work:
        def inner(self) -> None:
            clock[0] += 5

        def outer(self) -> None:
            clock[0] += 1
            self.inner()
            clock[0] += 2

    with watch.timing(Work, "inner", "training updates"), watch.timing(Work, "outer", "whole"):
        clock[0] += 10
        Work().outer()
        Work().outer()
    assert watch.parts == {"import": [10.0, 5.0], "whole": [6.0, 3.0], "training updates": [10.0, 5.0]}
    assert watch.updates == [5.0, 5.0]
    assert watch.first_updates == 0
    assert Work.inner.__name__ == "inner"  # as before


@pytest.mark.slow
def test_a_tiny_run_has_all_parts_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(data: Path, folder: Path, settings: list[str]) -> speedrun.Prepared:
        (folder / "pairs.tsv").write_text("".join(f"ab{number}\t{number}ba\n" for number in range(60)))
        part = {"kind": "recurrent", "width": 8}
        tokens = {"kind": "chars"}
        recipe = {
            "data": {"train": str(folder / "pairs.tsv"), "dev_size": 10},
            "tokens": {"source": tokens, "target": tokens},
            "model": {"encoder": part, "decoder": part},
            "training": {"steps": 6, "validate_every": 3, "checkpoint_every": 3, "device": "cpu"},
            "evaluation": {"metrics": ["exact"], "resamples": 5},
        }
        return parse(recipe), "transduce train pairs.tsv"

    monkeypatch.setitem(speedrun.RUNS, "dates", (tiny, speedrun.Goal("exact", 99.8, 75)))
    record = speedrun.run("dates", tmp_path, [], tiny=True)
    names = {"import", "choosing the recipe", "other", *(name for _, _, name in speedrun.PARTS)}
    assert set(record.parts) == names
    assert record.updates == 6
    assert record.seconds == pytest.approx(sum(wall for wall, _ in record.parts.values()))
    assert 0 < record.training_seconds < record.seconds
    assert json.loads(json.dumps(asdict(record)))["goal"]["metric"] == "exact"
    console = Console(record=True, width=120)
    speedrun.show(record, console)
    assert "training updates" in console.export_text()
