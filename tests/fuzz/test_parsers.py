"""Damaged files of every parser: an error in words, or a value."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from fuzzing import Outcome, fuzz, mutate_bytes
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
