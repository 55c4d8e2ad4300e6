"""The scoreboard: the page shows every row, with the numbers of the records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import scoreboard  # noqa: E402
from transduce.evaluation.reproduction import margins  # noqa: E402
from transduce.evaluation.scoreboard import ROWS  # noqa: E402
from transduce.recipe import load  # noqa: E402


def test_scoreboard_records_are_complete_and_of_a_row():
    for path in sorted(scoreboard.RECORDS.glob("*.json")):
        record, row = json.loads(path.read_text()), ROWS[path.stem]
        assert not record["quick"]
        assert (record["recipe"], record["settings"]) == (row.recipe, list(row.settings))
        assert (record.get("networks", []), record.get("teacher", "")) == (list(row.networks), row.teacher)
        assert record["scores"].keys() == set(row.metrics)
        for parts in record["seeds"].values():
            assert parts.keys() == set(row.parts)
            wanted = {"scores", "signatures", "parameters", "minutes", "leakage"}
            assert all(wanted <= result.keys() for result in parts.values())
            assert {len(result["updates"]) for result in parts.values()} == {row.ensemble}


def test_rows_that_fall_short_say_what_was_tried():
    for name, record in scoreboard.records().items():
        short = any(points < 0 for _, _, points in margins(ROWS[name], record))
        assert bool(scoreboard.TRIED.get(name)) >= short, name
    assert scoreboard.TRIED.keys() <= ROWS.keys()


def test_records_state_the_recipe_of_their_row():
    """What a record was made with is what its recipe says today, unless the recipe depends on the data."""
    for name, record in scoreboard.records().items():
        row = ROWS[name]
        if row.recipe.startswith("task ") or "content" not in record:
            continue
        loaded = load(ROOT / "recipes" / row.recipe, list(row.settings))
        recipe = loaded.model_dump(mode="json", exclude_defaults=True)
        others = [metric for metric in loaded.evaluation.metrics if metric not in row.metrics]
        recipe.setdefault("evaluation", {})["metrics"] = [*row.metrics, *others]
        for content in record["content"].values():
            for section in (content.keys() | recipe.keys()) - {"data"}:
                assert content.get(section) == recipe.get(section), (name, section)
        assert record["margins"] == [
            {"system": system, "metric": metric, "points": points} for system, metric, points in margins(row, record)
        ]


def test_the_page_lists_rows_that_fall_short(monkeypatch):
    def record(value: float) -> dict:
        result = {"lines": 9, "parameters": 7, "updates": [3], "minutes": 1.5, "leakage": None}
        scores = {"accuracy": {"mean": value, "spread": None, "seeds": [value]}}
        return {"scores": scores, "hardware": "CPU", "seeds": {"1": {"": result}}}

    monkeypatch.setattr(scoreboard, "records", lambda: {"fsdd": record(98.0), "sst2": record(85.0)})
    section = scoreboard.page().partition("## Rows that fall short")[2].partition("## Records")[0]
    assert "| `fsdd` | 1.00 (accuracy, convolutional networks, best) | " in section
    assert "sst2" not in section


def test_the_scoreboard_shows_every_row():
    page = scoreboard.page()
    known = scoreboard.records()
    for name in ROWS:
        lines = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert lines
        assert any("not run yet" in line for line in lines) == (name not in known)


def test_the_scoreboard_states_means_and_signed_differences(monkeypatch):
    scores = {
        "ser": {"mean": 21.0, "spread": 0.25, "seeds": [21.2, 20.8]},
        "per": {"mean": 5.0, "spread": None, "seeds": [5.0]},
    }
    result = {
        "lines": 9,
        "scores": {},
        "parameters": 7,
        "updates": [3],
        "minutes": 1.5,
        "leakage": {"pairs": 1, "sources": 2},
    }
    record = {"scores": scores, "hardware": "CPU", "seeds": {"1": {"": result}, "2": {"": result}}}
    monkeypatch.setattr(scoreboard, "records", lambda: {"cmudict": record})
    page = scoreboard.page()
    assert (
        "| `cmudict` | word error | 21.00 ± 0.25 (2) | 20.6: Transformer (g2p-seq2seq), g2p-seq2seq | -0.40 |" in page
    )
    assert "| `cmudict` | 2 | 7 | 3 | 1.5 | CPU | 9 | 1, 2 |" in page
    assert "+0.70" in scoreboard.picture()
