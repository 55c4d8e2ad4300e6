"""Figure of the benchmark results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("matplotlib")

from benchmarks.figure import bars, draw


def test_the_figure_shows_each_peer_once_in_each_setting(tmp_path: Path) -> None:
    rows = [
        {"setting": "base batch 1", "name": "transduce", "ratio": None},
        {"setting": "base batch 1", "name": "transduce eager", "ratio": 2.0},
        {"setting": "base batch 1", "name": "peer", "ratio": 0.5},
        {"setting": "base batch 1", "name": "broken", "ratio": None, "failed": "no room"},
    ]
    (tmp_path / "generate-base-cpu-int8.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    (tmp_path / "train-base-cuda-bfloat16-compiled.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    (tmp_path / "scale-cpu.json").write_text(json.dumps({"rows": [{"what": "search"}]}), encoding="utf-8")
    found = bars(tmp_path)
    assert [(bar.peer, bar.ratio, bar.label) for bar in found] == [
        ("peer", 0.5, "base batch 1 int8"),
        ("peer", 0.5, "base batch 1 bf16 compiled"),
    ]
    assert len({bar.panel for bar in found}) == 2
    draw(found, tmp_path / "figure.png")
    assert 0 < (tmp_path / "figure.png").stat().st_size < 150_000
