"""Records, pages and figures of claims, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from transduce.evaluation.claims import CLAIMS
from transduce.evaluation.claims.claim import Budget, Check, Claim, ClaimTable, Measurement, Panel, Series
from transduce.evaluation.claims.report import ClaimRecord, cell, html_page, markdown, measure, read_record

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "claims"


def two_panels(budget: Budget) -> Measurement:
    line = Panel("a <b>", "x", "y", [Series("one", [1, 2], [3.0, 4.0], [2.0, 3.0], [4.0, 5.0])], log_x=True, log_y=True)
    panels = [
        line,
        Panel("bars", "", "y", [Series("", ["p", "q"], [1.0, 2.0])], "bar"),
        Panel("points", "x", "y", [Series("s", [1, 2], [1.0, 2.0], names=["p", "q"])], "points"),
        Panel("heat", "x", "y", [Series("r", ["1", "2"], [0.0, 1.0])], "heat"),
    ]
    table = ClaimTable("t", ["name", "value"], [("<script>", 1234.5), ("b|c", True)])
    return Measurement([table], panels, [Check("it is so", budget.seed == 1, {"seed": budget.seed})])


CLAIM = Claim("trial", "A statement with <tags>.", "Nobody 2020", "How.", two_panels)


def record_with(seed: int, folder: Path) -> ClaimRecord:
    settings = {"quick": True, "seed": seed, "device": "cpu"}
    return ClaimRecord("trial", settings, 1.0, 1.0, {"torch": "2"}, two_panels(Budget(folder, seed=seed)))


def test_a_record_is_read_back_and_kept(tmp_path: Path) -> None:
    reported: list[str] = []
    first = measure(CLAIM, Budget(tmp_path, report=reported.append))
    assert first.measurement.holds
    assert read_record(tmp_path / "trial.json") == first
    assert (tmp_path / "trial.png").stat().st_size > 5000
    assert measure(CLAIM, Budget(tmp_path, report=reported.append)) == first
    assert reported == ["kept from an earlier run"]
    assert not record_with(2, tmp_path).to_json()["holds"]


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = html_page([(CLAIM, record_with(1, tmp_path))])
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 1
    addresses = set(re.findall(r'(?:src|href)="([^"]*)"', page))
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert set(re.findall(r"https?://[^\s\"<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "default-src 'none'" in page


def test_a_page_of_the_documentation_states_what_was_measured(tmp_path: Path) -> None:
    page = markdown(CLAIM, record_with(2, tmp_path))
    assert "transduce claims trial --quick" in page
    assert "✗ it is so: seed 2" in page
    assert "1 of 1 checks do not hold" in page
    assert "b\\|c" in page
    measured = replace(record_with(1, tmp_path), settings={"quick": True, "model": "all-MiniLM-L6-v2"})
    assert "transduce claims trial --quick --model all-MiniLM-L6-v2\n" in markdown(CLAIM, measured)


def test_a_page_shows_what_differs_on_another_machine(tmp_path: Path) -> None:
    first = record_with(1, tmp_path)
    new = ClaimTable("times", ["name", "seconds"], [("a", 0.5)])
    measurement = replace(first.measurement, tables=[*first.measurement.tables, new])
    other = replace(first, environment={"machine": "GPU 7"}, measurement=measurement)
    page, _, added = markdown(CLAIM, first, [other]).partition("## On one GPU 7: holds")
    assert page == markdown(CLAIM, first) + "\n"
    assert "### times" in added
    assert "### t\n" not in added


def test_values_have_three_digits() -> None:
    assert [cell(value) for value in (1234, 1234.5, 0.012345, True, None, "x")] == [
        "1,234", "1,234", "0.0123", "yes", "", "x",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_a_record_of_its_direction(name: str) -> None:
    claim, content = CLAIMS[name], json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    record = read_record(RECORDS / f"{name}.json")
    assert claim.statement.endswith(".")
    assert record.claim == name
    assert content["holds"] is record.measurement.holds is True
    assert all(check.numbers for check in record.measurement.checks)
    assert record.measurement.tables
    assert record.measurement.panels
    for table in record.measurement.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.slow
def test_the_command_measures_a_claim_and_writes_a_page(command, tmp_path: Path) -> None:
    listed = command("claims")
    assert all(name in listed.out for name in CLAIMS)
    folder = tmp_path / "claims"
    done = command("claims", "asymmetry", "--quick", "--out", folder)
    assert "1 of 1: asymmetry: holds" in done.out
    assert (folder / "index.html").read_text(encoding="utf-8").count("<svg") == 1
    assert "kept" in command("claims", "asymmetry", "--quick", "--out", folder).out


def test_an_unknown_claim_is_refused(command) -> None:
    wrong = command("claims", "ordr")
    assert wrong.code == 2
    assert "did you mean 'order'?" in wrong.err
