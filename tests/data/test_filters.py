"""Filters: each reason at its boundary, duplicates, and the report."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.filters import FilterReport, Filters, PairHashSet


def test_each_reason_at_its_boundary() -> None:
    filters = Filters(min_length=2, max_length=10, max_ratio=2.0, drop_duplicates=True)
    assert filters.reason(2, 4) is None
    assert filters.reason(10, 10) is None
    assert filters.reason(0, 5) == filters.reason(5, 0) == filters.reason(5, 5, blank=True) == "empty"
    assert filters.reason(1, 2) == filters.reason(2, 1) == "too short"
    assert filters.reason(11, 10) == filters.reason(10, 11) == filters.reason(100_000, 10) == "too long"
    assert filters.reason(2, 5) == filters.reason(5, 2) == "ratio"
    assert filters.reason(5, 5, duplicate=True) == "duplicate"


def test_disabled_filters_drop_nothing() -> None:
    assert Filters().reason(1, 512) is None
    assert Filters().reason(5, 5, duplicate=True) is None
    assert Filters(min_length=0).reason(0, 0, blank=True) is None


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3))))
def test_only_identical_pairs_are_duplicates(pairs: list[tuple[str, str]]) -> None:
    seen = PairHashSet()
    assert [not seen.add(*pair) for pair in pairs] == [pair in pairs[:place] for place, pair in enumerate(pairs)]


def test_boundary_between_source_and_target_matters_for_duplicates() -> None:
    seen = PairHashSet()
    assert seen.add("a b", "c")
    assert seen.add("a", "b c")


@given(st.lists(st.sampled_from(["", "empty", "ratio", "too long"])))
def test_report_counts_sum_to_the_pairs_read(reasons: list[str]) -> None:
    report = FilterReport()
    for line, reason in enumerate(reasons, 1):
        if reason:
            report.drop(reason, (0, line))
        else:
            report.kept += 1
    assert report.read == len(reasons)
    assert all(reasons[line - 1] == reason for reason, (_, line) in report.first.items())
    assert all(reasons.index(reason) + 1 == line for reason, (_, line) in report.first.items())
    assert FilterReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    text = "\n".join(report.lines(["a.tsv"]))
    for reason, count in report.dropped.items():
        assert f"{count:,} dropped: {reason} (first at a.tsv:{reasons.index(reason) + 1})" in text


def test_hash_set_keeps_its_pairs_when_it_grows():
    seen, rounds = PairHashSet(), 20_000  # several times as many as it has room for at first
    assert all(seen.add(f"source {number}", "target") for number in range(rounds))
    assert not any(seen.add(f"source {number}", "target") for number in range(rounds))
    assert seen.add("source 1", "another target")


def test_hash_set_is_stored_on_disk(tmp_path: Path):
    """Of the memory of the process it takes a moment's part, however much was seen; and no file is left."""
    seen = PairHashSet(tmp_path)
    tracemalloc.start()
    try:
        for number in range(40_000):
            seen.add(str(number), "")
        assert tracemalloc.get_traced_memory()[1] < 40_000 * 30  # while the table grows, 16 thousand of its numbers
    finally:
        tracemalloc.stop()
    assert 24 * 40_000 <= seen._table.nbytes <= 48 * 40_000
    assert not list(tmp_path.iterdir())


def test_hash_set_compares_all_128_bits(monkeypatch: pytest.MonkeyPatch):
    """Pairs that agree in the first half of the hash are told apart by the second."""

    class Digest:
        def __init__(self, content: bytes, digest_size: int) -> None:
            self.content = content

        def digest(self) -> bytes:
            return bytes(8) + sum(self.content).to_bytes(8, "little")

    monkeypatch.setattr("transduce.data.filters.hashlib.blake2b", Digest)
    seen = PairHashSet()
    assert [not seen.add("a", letter) for letter in "bcdbcd"] == [False] * 3 + [True] * 3
