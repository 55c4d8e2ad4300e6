"""Numbers in the documentation: each has a record, and each record a command on a page."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import records  # noqa: E402

from transduce.evaluation.scoreboard import ROWS  # noqa: E402

FILES = {path.stem: json.loads(path.read_text()) for path in sorted(records.RECORDS.glob("*.json"))}


def test_every_stated_number_is_that_of_a_record_and_every_record_is_stated():
    assert FILES.keys() - records.marks().keys() == set()
    assert records.marks().keys() - records.named().keys() - {f"scoreboard/{name}" for name in ROWS} == set()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        assert path.read_text() == records.with_numbers(path.read_text()), path


def test_every_record_is_of_a_command_that_a_page_shows():
    shown = records.named()
    for name, record in FILES.items():
        assert (record["page"], record["command"]) == (shown[name].page, shown[name].line)


def test_no_two_commands_write_the_same_run():
    names = Counter(command.name for command in records.commands() if command.page.startswith("ladder/"))
    del names[None]
    assert [name for name, count in names.items() if count > 1] == []


def test_a_stated_number_is_of_one_command():
    names = Counter(command.name for command in records.commands())
    assert [name for name in records.marks() if names[name] > 1] == []


def test_no_test_pair_of_a_record_is_in_the_training_data_unless_the_page_says_so():
    for name, record in FILES.items():
        if record.get("leakage") and "leaked_pairs" not in records.marks()[name]:
            assert record["leakage"]["pairs"] == 0, name


# Percentages on the pages that are settings, not results.
SETTINGS = {"captioning.md": {"30 %"}, "language-models.md": {"2 %"}, "masked-language-models.md": {"80 %", "10 %"}}


def unmarked(text: str) -> list[str]:
    """Percentages and decimals in cells without a record, unless the paragraph says what a test requires."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = records.MARK.sub("", text).replace("95 % interval", "")
    paragraphs = [part for part in text.split("\n\n") if "require" not in part]
    return [found for part in paragraphs for found in re.findall(r"\d[\d.]* %|(?<=\| )\d+\.\d+(?= \|)", part)]


def test_results_on_the_pages_of_ladder_and_tasks_have_a_mark():
    assert unmarked("It is 84.2<!-- a.exact --> % and 3 %.\n\n| x | 1.5 |\n\nA test requires 90 %.") == ["3 %", "1.5"]
    for path in records.pages():
        stated = set(unmarked(path.read_text())) - SETTINGS.get(path.name, set())
        assert {one for one in stated if one != "95 %"} == set(), path


def test_commands_of_the_examples_are_recorded_like_those_of_transduce(tmp_path, monkeypatch):
    page = tmp_path / "tasks" / "page.md"
    page.parent.mkdir()
    page.write_text("```sh\npython examples/boxes.py runs/shapes seen --json boxes.json\n```\n")
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    (command,) = records.page_commands(page)
    assert (command.name, command.needs) == ("boxes", ["shapes"])
    (tmp_path / "boxes.json").write_text('{"count": 7, "colour": 61.5, "method": "mean"}')
    record = records.make_record(command, tmp_path, 1.0)
    assert (record["lines"], record["scores"]) == (7, {"colour": {"value": 61.5}})


def test_pages_show_the_numbers_of_their_records(monkeypatch, tmp_path):
    (tmp_path / "gru.json").write_text(json.dumps({"parameters": 1234, "scores": {"exact": {"value": 9.96, "low": 8}}}))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    page = "96<!-- gru.exact --> of –<!-- gru.parameters -->, 1.00<!-- gru.exact.low -->, 7<!-- lstm.exact -->"
    wanted = "10.0<!-- gru.exact --> of 1,234<!-- gru.parameters -->, 8.0<!-- gru.exact.low -->, –<!-- lstm.exact -->"
    assert records.with_numbers(page) == wanted


def test_a_negative_number_keeps_one_sign(monkeypatch, tmp_path):
    (tmp_path / "gru.json").write_text(json.dumps({"scores": {"occlusion": {"value": -0.1}, "border": {"value": 2}}}))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    shown = "| -0.10<!-- gru.occlusion --> | 1-2.0<!-- gru.border -->"
    assert records.with_numbers(shown) == shown
    assert records.with_numbers(shown.replace("-0.10", "–").replace("2.0", "3")) == shown


def test_pages_show_means_of_the_scoreboard(monkeypatch, tmp_path):
    def seed(value: float) -> dict:
        scores = {"accuracy": {"value": value, "low": value - 1, "high": value + 1}}
        return {"": {"scores": scores, "parameters": 1234, "updates": [5]}}

    record = {"seeds": {"1": seed(97.0)}, "scores": {"accuracy": {"mean": 97.0}}}
    (tmp_path / "fsdd.json").write_text(json.dumps(record))
    monkeypatch.setattr(records, "SCOREBOARD", tmp_path)
    page = "–<!-- scoreboard/fsdd.accuracy --> (–<!-- scoreboard/fsdd.accuracy.low -->), 7<!-- fsdd.accuracy -->"
    wanted = (
        "97.0<!-- scoreboard/fsdd.accuracy --> (96.0<!-- scoreboard/fsdd.accuracy.low -->), –<!-- fsdd.accuracy -->"
    )
    assert records.with_numbers(page) == wanted
    record = {"seeds": {"1": seed(97.0), "2": seed(98.0)}, "scores": {"accuracy": {"mean": 97.5}}}
    (tmp_path / "fsdd.json").write_text(json.dumps(record))
    shown = "97.5<!-- scoreboard/fsdd.accuracy --> of 2<!-- scoreboard/fsdd.seeds -->"
    assert records.with_numbers(shown.replace("97.5", "1").replace("of 2", "of 1")) == shown


def test_drift_is_a_score_outside_of_its_interval():
    old = {"command": "c", "parameters": 5, "lines": 9, "scores": {"exact": {"value": 50, "low": 47, "high": 53}}}
    for value, drifts in ((52.9, False), (46, True), (54, True)):
        new = {**old, "scores": {"exact": {"value": value}}}
        assert bool(list(records.drift(old, new))) == drifts
    assert list(records.drift(old, {**old, "parameters": 6})) == ["parameters: 5 -> 6"]


def test_commands_on_data_that_cannot_be_published_need_their_folder(tmp_path, monkeypatch):
    page = tmp_path / "tasks" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "```sh\ntransduce train recipes/flickr8k/a.yaml --run runs/a data.train=flickr8k/train.tsv\n"
        "python examples/b.py runs/a x --json b.json\ntransduce train recipes/flickr8k/a.yaml --run runs/c\n```\n"
    )
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    known = records.named()
    (tmp_path / "data" / "flickr8k").mkdir(parents=True)
    bare, given = records.Workplace(tmp_path), records.Workplace(tmp_path / "w", tmp_path / "data")
    assert [bare.lacks(known[name]) for name in "abc"] == [{"flickr8k"}, {"flickr8k"}, set()]
    assert [given.lacks(known[name]) for name in "abc"] == [set(), set(), set()]
    assert (given.place("tasks/page.md") / "flickr8k").is_dir()
