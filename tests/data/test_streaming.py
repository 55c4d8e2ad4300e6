"""Streaming: parts are the corpus, an epoch has every pair once, a position is sought, little is read ahead."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import RECURRENT, colour_pairs, settings

import transduce
from transduce.data.batching import Batches, DataPosition
from transduce.data.filters import Filters
from transduce.data.readers.corpus import read_corpus
from transduce.data.row_selection import RowSubset
from transduce.data.store import Store
from transduce.data.streaming import CorpusStream, StreamedBatches, StreamPart, WindowStores
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.recipe import Corpus, parse

PAIRS = [(f"a{number}", f"b{number}") for number in range(60)]


@pytest.mark.parametrize("header", ["", "source\ttarget\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("part_bytes", [1, 7, 40, 10**6])
def test_parts_of_a_file_are_the_file(header: str, end: str, part_bytes: int, tmp_path: Path) -> None:
    lines = [header.rstrip(), *("\t".join(pair) for pair in PAIRS)]
    (tmp_path / "pairs.tsv").write_text(end.join(line for line in lines if line), newline="")
    corpus = Corpus(path=str(tmp_path / "pairs.tsv"))
    stream = CorpusStream([corpus], "error", 1, part_bytes=part_bytes)
    found = [(one.source, one.target) for part in stream.parts for one in part.examples]
    assert found == [(one.source, one.target) for one in read_corpus(corpus)] == PAIRS


def streamed(folder: Path, corpora: list[Corpus], **options: Any) -> tuple[StreamedBatches, WindowStores]:
    words = Tokenizer.train([word for pair in PAIRS for word in pair], "words", 1000)
    stream = CorpusStream(corpora, "error", 1, part_bytes=25, window_parts=3, **options)
    stores = WindowStores(stream, (words, words), Filters(), "error", folder / "cache")

    def make(store: Store) -> Batches:
        return Batches(store, RowSubset(len(store)), batch_tokens=30, bucket_batches=2, seed=1)

    return StreamedBatches(stores, make), stores


def epoch_of(batches: StreamedBatches, position: DataPosition) -> tuple[list[list[int]], DataPosition]:
    """The target ids of the batches up to the next epoch."""
    epoch, found = position.epoch, []
    while position.epoch == epoch:
        batch = batches.at(position)
        assert batch.target is not None
        found += batch.target.values.tolist()
        position = batches.after(position)
    return [[one for one in row if one] for row in found], position


def test_an_epoch_has_every_pair_once_in_another_order_and_is_sought(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in PAIRS))
    batches, stores = streamed(tmp_path, [Corpus(path=str(tmp_path / "pairs.tsv"))])
    first, position = epoch_of(batches, DataPosition())
    assert position == DataPosition(1, 0)
    second, _ = epoch_of(batches, position)
    assert len(first) == len(PAIRS) == len({tuple(row) for row in first})
    assert sorted(first) == sorted(second)
    assert first != second
    position = DataPosition()
    for _ in range(20):
        position = batches.after(position)
    fresh, _ = streamed(tmp_path, [Corpus(path=str(tmp_path / "pairs.tsv"))])
    again = DataPosition.from_json(position.to_json())
    assert torch.equal(fresh.at(again).target.values, batches.at(position).target.values)  # type: ignore[union-attr]
    assert len([*(tmp_path / "cache").iterdir()]) <= 8  # windows that are behind are removed
    assert len(stores.stream.windows(0)) > 4


def test_weights_repeat_or_sample_the_parts_of_a_corpus(tmp_path: Path) -> None:
    for name, pairs in (("twice", PAIRS[:30]), ("half", PAIRS[30:])):
        (tmp_path / name).write_text("".join(f"{one}\t{two}\n" for one, two in pairs))
    corpora = [
        Corpus(path=str(tmp_path / name), columns=("1", "2"), weight=weight)
        for name, weight in (("twice", 2.0), ("half", 0.5))
    ]
    stream = CorpusStream(corpora, "error", 1, part_bytes=50)
    counts = Counter(number for window in stream.windows(0) for number in window)
    own = {"twice": list[int](), "half": list[int]()}
    for number, part in enumerate(stream.parts):
        own[Path(str(part.corpus.path)).name].append(counts[number])
    assert {*own["twice"]} == {2}
    assert {*own["half"]} == {0, 1}
    assert sum(own["half"]) == round(len(own["half"]) / 2)


def test_only_the_window_in_use_and_the_next_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in PAIRS))
    read, whole = [], StreamPart._of_span

    def counted(part: StreamPart, span: Any) -> Any:
        if part.corpus.path == str(tmp_path / "pairs.tsv"):  # not a thread of another test
            read.append(span.begin)
        return whole(part, span)

    monkeypatch.setattr(StreamPart, "_of_span", counted)
    batches, stores = streamed(tmp_path, [Corpus(path=str(tmp_path / "pairs.tsv"))])
    batches.at(DataPosition())
    stores.store((0, 1))
    assert 3 <= len(read) <= 9 < len(stores.stream.parts)


def test_errors_say_where_the_part_begins(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n" * 20 + "no tab\n")
    stream = CorpusStream([Corpus(path=str(tmp_path / "pairs.tsv"))], "error", 1, part_bytes=40)
    with pytest.raises(InputError, match="missing column") as caught:
        list(stream.parts[2].examples)
    assert caught.value.where == f"{tmp_path / 'pairs.tsv'}:1, counted from byte 80"
    for change in ({}, {"dev": "dev.tsv", "duplicates": "drop"}):
        with pytest.raises(InputError, match=r"data\.dev|before training"):
            parse({"data": {"train": str(tmp_path / "pairs.tsv"), "streaming": True, **change}})


@pytest.mark.slow
def test_a_streamed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    for name, count, seed in (("train", 300, 1), ("dev", 20, 2)):
        lines = (f"{one}\t{two}\n" for one, two in colour_pairs(count, seed=seed))
        (tmp_path / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    part = {**RECURRENT, "width": 8, "dropout": 0.1}
    finals = []
    for folder, steps in (("whole", (12,)), ("resumed", (5, 12))):
        for count in steps:
            made = settings(tmp_path / "train.tsv", {"encoder": part, "decoder": part}, "words", steps=count)
            made["data"] |= {"dev": str(tmp_path / "dev.tsv"), "streaming": True, "cache": str(tmp_path / "cache")}
            made["training"] |= {"batch_tokens": 128, "patience": None, "device": "cpu"}
            trained = transduce.train(made, tmp_path / folder, resume=True)
        finals.append(trained.model.network.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("red\tRED\n")
    with pytest.raises(InputError, match=r"data\.train was"):
        transduce.train({**made, "training": {**made["training"], "steps": 14}}, tmp_path / "whole", resume=True)
