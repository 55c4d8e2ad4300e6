"""Leakage: the counts equal those of a comparison of every pair of lines."""

from __future__ import annotations

import random

from transduce.data.filters import count_leakage, recipe_leakage
from transduce.flow import Example
from transduce.recipe import parse


def _examples(rng: random.Random, count: int) -> list[Example]:
    return [Example(rng.choice("abcdef"), rng.choice("xyz")) for _ in range(count)]


def test_counts_equal_a_comparison_of_all_lines():
    rng = random.Random(1)
    for _ in range(20):
        train, test = _examples(rng, 5), _examples(rng, 7)
        found = count_leakage(iter(train), iter(test))
        assert found.examples == len(test)
        assert found.pairs == sum(any(a.source == b.source and a.target == b.target for b in train) for a in test)
        assert found.sources == sum(any(a.source == b.source for b in train) for a in test)
        assert found.targets == sum(any(a.target == b.target for b in train) for a in test)


def test_corpora_of_a_recipe_and_files_by_content(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / f"{name}.png").write_bytes(b"x" if name != "other" else b"y")
    (tmp_path / "train.tsv").write_text("one.png\ta cat\n")
    (tmp_path / "test.tsv").write_text("same.png\ta cat\nother.png\ta cat\n")
    data = {"train": str(tmp_path / "train.tsv"), "test": str(tmp_path / "test.tsv")}
    by_name = recipe_leakage(parse({"data": data}).data)
    by_content = recipe_leakage(parse({"data": {**data, "sources": {"picture": "image"}}}).data)
    assert by_name is not None
    assert by_content is not None
    assert (by_name.pairs, by_name.sources, by_name.targets) == (0, 0, 2)
    assert (by_content.pairs, by_content.sources, by_content.targets) == (1, 1, 2)
    assert recipe_leakage(parse({"data": {"train": data["train"]}}).data) is None


def test_texts_without_a_source_have_no_source_in_common():
    found = count_leakage([Example("", "to be")], [Example("", "to be"), Example("", "or not")])
    assert (found.pairs, found.sources, found.targets) == (1, 0, 1)
