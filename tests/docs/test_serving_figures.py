"""The table of the server's figures: goals that are missed are said to be missed; records may be absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import serving_figures

COUNTS = {"name": "transduce", "requests": 20_000, "wrong": 0, "lost": 0, "refused": 500, "without_retry_after": 0}
TIMES = {"p50_ms": 50.0, "p99_ms": 100.0, "refusal_p99_ms": 9.0, "metrics_equal_tally": True}
LOAD = {**COUNTS, **TIMES}


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Rows of a record that meets all goals, but for changes of the row `steady`."""
    peers = [
        {
            "setting": f"{count} clients",
            "name": name,
            "requests_per_second": speed,
            "p99_ms": late,
            "processor_ms": work,
        }
        for count in (1, 16, 64)
        for name, speed, late, work in (
            ("transduce", 1600.0, 80.0, 0.5),
            *((peer, 1000.0, 90.0, 0.9) for peer in serving_figures.PEERS),
        )
    ]
    return [
        {"setting": "steady", **LOAD, **changes},
        {"setting": "overload", **LOAD, "queue_most": 32.0, "queue_limit": 32},
        {"setting": "SIGTERM under load", **LOAD, "exit_after": 1.5},
        {"setting": "batching gain", "name": "transduce", "ratio": 4.5},
        {"setting": "client left", "name": "transduce", "seconds": 0.1},
        {"setting": "deadline of 0.1 s", "name": "transduce", "status": 504, "seconds": 0.1, "active_after": 0.0},
        {"setting": "unfinished header", "name": "transduce", "closed": True, "seconds": 10.0},
        {"setting": "cold start", "name": "transduce", "seconds": 3.0},
        {"setting": "limits", "name": "transduce", "status_and_named": {"items": [400, True]}},
        *peers,
    ]


def table(folder: Path, content: dict[str, list[dict[str, Any]]]) -> str:
    for name, found in content.items():
        (folder / f"{name}.json").write_text(json.dumps({"machine": "2 cores", "rows": found}), encoding="utf-8")
    return "\n".join(serving_figures.table(folder))


def test_records_may_be_absent(tmp_path: Path) -> None:
    text = table(tmp_path, {})
    assert "Not recorded yet: `python -m benchmarks.serve`" in text
    assert "make fuzz-api" in text
    assert "|" not in text


def test_goals_are_compared_with_the_record(tmp_path: Path) -> None:
    soak = {"setting": "soak", **LOAD, "minutes": 30.0, "rss_growth": 0.01, "open_files": [20, 20]}
    text = table(tmp_path, {"serve": rows(), "serve-soak": [soak]})
    assert "All of these goals are met." in text
    assert "CTranslate2 as it comes: throughput | at least 1.5 times | 1.60 times: 1,600 and 1,000 requests" in text
    assert "0.50 and 0.90 ms of processor time each" in text
    assert "missed" not in text
    changed = {"serve": rows(wrong=1, p50_ms=151.0), "serve-soak": [{**soak, "rss_growth": 0.06}]}
    text = table(tmp_path, changed)
    assert text.count("| missed |") == 3
    assert "3 of 31 goals are missed." in text


def test_answers_5xx_of_drawn_requests_are_counted(tmp_path: Path) -> None:
    statuses = {"POST /a": {"200": 4, "504": 1}, "POST /b": {"400": 2, "500": 3}}
    (tmp_path / "api-fuzz.json").write_text(json.dumps({"cases": 10, "statuses": statuses}), encoding="utf-8")
    assert "answers 5xx | 0 | 3 | missed |" in "\n".join(serving_figures.table(tmp_path))
