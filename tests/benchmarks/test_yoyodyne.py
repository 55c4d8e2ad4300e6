"""Comparison with Yoyodyne: word error, choice of the checkpoint, settings of its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.yoyodyne import accuracy_of, configuration, word_error


def test_a_word_is_right_if_it_has_any_of_its_pronunciations() -> None:
    rows = [["a", "x y"], ["a", "x"], ["b", "z"], ["c", "z"]]
    assert word_error(["x", "x y", "z", "y"], rows) == 25.0


def test_lines_of_both_tools_are_counted() -> None:
    with pytest.raises(ValueError, match="longer"):
        word_error(["x"], [["a", "x"], ["b", "y"]])


def test_the_accuracy_is_read_from_the_name_of_a_checkpoint() -> None:
    names = "model-epoch=007-val_accuracy=0.4100.ckpt", "model-epoch=012-val_accuracy=0.0500-v1.ckpt", "last.ckpt"
    assert [float(accuracy_of(Path(name))) for name in names] == [0.41, 0.05, 0.0]


@pytest.mark.parametrize(("minutes", "limit"), [(0.5, "00:00:00:30"), (5, "00:00:05:00"), (90, "00:01:30:00")])
def test_the_time_limit_is_written_as_lightning_reads_it(minutes: float, limit: str, tmp_path: Path) -> None:
    found = configuration(tmp_path / "train.tsv", tmp_path / "dev.tsv", tmp_path, minutes)
    assert found["trainer"]["max_time"] == limit
