"""The picture of the benchmarks: every peer in every setting once, our own other ways left out, and small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("matplotlib")

from benchmarks.picture import bars, draw


def test_peers_are_drawn(tmp_path: Path) -> None:
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
    assert len({bar.field for bar in found}) == 2
    draw(found, tmp_path / "picture.png")
    assert 0 < (tmp_path / "picture.png").stat().st_size < 150_000
