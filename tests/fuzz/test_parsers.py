"""Damaged files of every parser: an error in words, or a value."""

from __future__ import annotations

import random
import re
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from fuzzing import Outcome, fuzz, mutate_bytes, number_of, write_record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser_targets import REFUSALS, TARGETS

from transduce.errors import InputError


@pytest.mark.parametrize("name", TARGETS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    """Otherwise the fuzzers would begin with files that are refused at once."""
    target = TARGETS[name]
    read = 0
    for content in target.seeds():
        path = tmp_path / f"file{target.suffix}"
        path.write_bytes(content)
        try:
            target.parse(path)
            read += 1
        except REFUSALS:
            pass
    assert read or name == "bundle"  # a whole run is in the seeds of tests/fuzz/test_bundles.py


@pytest.mark.parametrize("name", TARGETS)
def test_odd_numbers_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Also those of more digits than Python converts, and those that are no integers."""
    target = TARGETS[name]
    path = tmp_path / f"file{target.suffix}"
    for content in target.seeds():
        for found in islice(re.finditer(rb"[0-9]+", content), 6):
            for number in (b"9" * 5000, b"1e9999", b"-1"):
                path.write_bytes(content[: found.start()] + number + content[found.end() :])
                with suppress(*REFUSALS):
                    target.parse(path)


def pieces(contents: list[bytes]) -> st.SearchStrategy[bytes]:
    """Parts of valid files, bytes and texts, in any order."""
    cuts = (1, 4, 16)
    parts = sorted(
        {one[at : at + size] for one in contents for size in cuts for at in range(0, min(len(one), 400), size)}
    )
    tokens = sorted({token for one in contents for token in re.findall(rb"\w+|\W", one[:2000])})
    drawn = st.one_of(
        st.sampled_from(contents), st.sampled_from(parts or [b""]), st.sampled_from(tokens or [b""]),
        st.binary(max_size=8), st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")),
    )  # fmt: skip
    return st.lists(drawn, max_size=12).map(b"".join)


@pytest.mark.parametrize("name", TARGETS)
def test_files_that_hypothesis_makes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    target, outcomes = TARGETS[name], Counter[str]()
    path = tmp_path / f"file{target.suffix}"

    @settings(max_examples=number_of(50), deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(pieces(target.seeds()))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            target.parse(path)
            outcomes["accepted"] += 1
        except REFUSALS:
            outcomes["refused"] += 1

    check()
    content = {"name": f"{name}, generated", "subject": f"{target.subject}, by hypothesis", "failures": []}
    write_record({**content, "cases": outcomes.total(), "outcomes": outcomes})


def test_parsers(tmp_path: Path) -> None:
    seeds = {name: target.seeds() for name, target in TARGETS.items()}

    def attempt(draw: random.Random) -> Outcome:
        name = draw.choice(sorted(TARGETS))
        target, content = TARGETS[name], draw.choice(seeds[name])
        for _ in range(draw.choice((1, 1, 2, 4))):
            content = mutate_bytes(draw, content)
        path = tmp_path / f"file{target.suffix}"
        path.write_bytes(content)
        try:
            target.parse(path)
        except REFUSALS as error:
            raise InputError(str(error)) from None
        return "accepted"

    fuzz("parsers", f"files of {len(TARGETS)} parsers", attempt, cases=300)
