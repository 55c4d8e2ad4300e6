"""The page on reliability: it states the counts of the records, and every fuzzer has a record without a failure."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from parser_targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
RECORDS = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results/reliability").glob("*.json"))]


def fuzzers() -> list[re.Pattern[str]]:
    """The names that tests give to `fuzz`; what an f-string computes may be anything. And those by parser."""
    found = [re.compile(re.escape(f"{name}, {kind}")) for name in TARGETS for kind in ("guided", "generated")]
    for path in sorted((ROOT / "tests" / "fuzz").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "fuzz" and path.name != "test_harness.py":
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                literal = [re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in parts]
                found.append(re.compile("".join(literal)))
    return found


def test_every_fuzzer_has_a_record_and_every_record_a_fuzzer() -> None:
    names = [record["name"] for record in RECORDS]
    assert [one.pattern for one in fuzzers() if not any(map(one.fullmatch, names))] == []
    assert [name for name in names if not any(one.fullmatch(name) for one in fuzzers())] == []


def test_records_are_of_thousands_of_cases_without_a_failure() -> None:
    for record in RECORDS:
        assert record["failures"] == []
        assert sum(record["outcomes"].values()) == record["cases"]
    assert sum(record["cases"] for record in RECORDS) > 3000


def test_the_page_states_the_counts() -> None:
    for record in RECORDS:
        assert f"| {record['name']} | {record['subject']} | {record['cases']:,} |" in PAGE
    assert f"| all |  | {sum(record['cases'] for record in RECORDS):,} |" in PAGE


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGE)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
