"""Store: round trip, cache keys, interrupted and damaged builds, splits without common sources."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transduce.data.store as store_module
import transduce.data.store as writer_module
from transduce.data.filters import Filters
from transduce.data.row_selection import split
from transduce.data.store import Store, build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.recipe import Corpus

PAIRS = [(f"wort {n} ä", f"word {n} 😀" if n % 7 else "") for n in range(50)] + [("lang " * 40, "long")]
WORDS = Tokenizer.train([side for pair in PAIRS for side in pair], "words", 500)
BYTES = Tokenizer.train([], "bytes", 260)


def _corpus(path: Path, pairs: list[tuple[str, str]], note: str = "") -> Corpus:
    path.write_text("".join(f"{source}\t{target}{note}\n" for source, target in pairs), encoding="utf-8")
    return Corpus(path=str(path))


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_round_trip_of_ids_text_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(writer_module, "CHUNK", chunk)
    corpora = [_corpus(tmp_path / "a.tsv", PAIRS), _corpus(tmp_path / "b.tsv", PAIRS[:3], "\textra")]
    counts: list[int] = []
    store = build_store(corpora, WORDS, BYTES, Filters(max_length=30), "error", tmp_path / "s", progress=counts.append)
    expected = [(0, n, pair) for n, pair in enumerate(PAIRS[:50], 1) if pair[1]]
    expected += [(1, n, pair) for n, pair in enumerate(PAIRS[:3], 1) if pair[1]]
    assert len(store) == len(expected) == len(store.lengths) == len(store.corpus_of)
    for row, (corpus, line, pair) in enumerate(expected):
        example = store.example(row)
        assert (example.source, example.target) == pair
        assert (example.file, example.line) == (corpora[corpus].path, line)
        assert dict(example.extra) == ({"column3": "extra"} if corpus else {})
        ids = WORDS.encode(pair[0]).ids, BYTES.encode(pair[1]).ids
        assert store.ids(row) == ids
        assert store.lengths[row].tolist() == [len(side) for side in ids]
        assert store.corpus_of[row] == corpus
    assert store.report.dropped == {"empty": 9, "too long": 1}
    assert counts[-1] == store.report.read == 54
    assert store.describe()[1] == f"9 dropped: empty (first at {corpora[0].path}:1)"
    assert f"1 dropped: too long (first at {corpora[0].path}:51)" in store.describe()
    with pytest.raises(IndexError):
        store.example(len(store))


def test_token_ids_of_rows_in_any_order(tmp_path: Path) -> None:
    store = build_store([_corpus(tmp_path / "a.tsv", PAIRS)], WORDS, BYTES, Filters(), "error", tmp_path / "s")
    rows = np.array([5, 0, 5, len(store) - 1])
    flat, lengths = store.token_ids("target", rows)
    assert flat.tolist() == [number for row in rows for number in store.ids(int(row))[1]]
    assert lengths.tolist() == store.lengths[rows, 1].tolist()


def test_store_is_cached_by_content_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = _corpus(tmp_path / "a.tsv", PAIRS)
    folder = tmp_path / "s"
    first = build_store([corpus], WORDS, BYTES, Filters(), "error", folder)
    for corpora, source, filters in (
        ([_corpus(tmp_path / "c.tsv", PAIRS[:-1])], WORDS, Filters()),
        ([corpus], BYTES, Filters()),
        ([corpus], WORDS, Filters(max_length=20)),
        ([corpus, corpus], WORDS, Filters()),
    ):
        assert build_store(corpora, source, BYTES, filters, "error", folder).folder != first.folder
    monkeypatch.setattr(store_module, "StoreWriter", None)  # nothing may be written from here on
    moved = _corpus(tmp_path / "moved.tsv", PAIRS)
    again = build_store([moved], WORDS, BYTES, Filters(), "error", folder)
    assert again.folder == first.folder
    assert again.example(0).file == moved.path
    assert again.describe()[1].endswith("moved.tsv:1)")


def test_invalid_lines_and_duplicates_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tb\nbroken\na\tb\na\tc\n\xff\tx\nbroken\n")
    corpus = Corpus(path=str(path))
    store = build_store([corpus], BYTES, BYTES, Filters(drop_duplicates=True), "drop", tmp_path / "s")
    assert store.report.dropped == {"missing column": 2, "duplicate": 1, "invalid UTF-8": 1}
    assert store.report.first == {"missing column": (0, 2), "duplicate": (0, 3), "invalid UTF-8": (0, 5)}
    assert len(store) == 2
    with pytest.raises(InputError, match="missing column"):
        build_store([corpus], BYTES, BYTES, Filters(), "error", tmp_path / "s")
    assert len(_folders(tmp_path / "s")) == 1


def test_dropping_every_pair_is_an_error_with_reasons(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "a.tsv", [("a" * 50, "b")])
    with pytest.raises(InputError, match=r"no pairs are left\n.*1 dropped: too long"):
        build_store([corpus], BYTES, BYTES, Filters(max_length=10), "error", tmp_path / "s")
    assert _folders(tmp_path / "s") == []


def test_empty_sides_are_kept_with_min_length_zero(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "a.tsv", [("a", ""), ("b", "")])
    store = build_store([corpus], BYTES, BYTES, Filters(min_length=0), "error", tmp_path / "s")
    assert store.ids(1) == (BYTES.encode("b").ids, [])
    assert store.example(1).target == ""


def test_large_vocabulary_uses_wider_ids(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(70_000)]
    tokenizer = Tokenizer.train(words, "words", 100_000)
    corpus = _corpus(tmp_path / "a.tsv", [(" ".join(words[-200:]), words[-1])])
    store = build_store([corpus], tokenizer, BYTES, Filters(), "error", tmp_path / "s")
    assert max(store.ids(0)[0]) > 1 << 16
    assert tokenizer.decode(store.ids(0)[0]) == " ".join(words[-200:])


def test_damage_is_detected_with_a_remedy(tmp_path: Path) -> None:
    store = build_store([_corpus(tmp_path / "a.tsv", PAIRS)], WORDS, BYTES, Filters(), "error", tmp_path / "s")
    for path in sorted(store.folder.iterdir()):
        whole = path.read_bytes()
        flipped = bytes(
            [
                *whole[: len(whole) // 2],
                *(byte ^ 4 for byte in whole[len(whole) // 2 :][:1]),
                *whole[len(whole) // 2 + 1 :],
            ]
        )
        for damage in (whole[: len(whole) // 2], whole + b"\0", bytes(len(whole)), flipped, None):
            if damage == whole:
                continue  # the empty file of a corpus without extra fields, and zeros
            path.unlink() if damage is None else path.write_bytes(damage)
            with pytest.raises(InputError, match="delete the folder"):
                Store(store.folder)
            path.write_bytes(whole)
    assert len(Store(store.folder)) == len(store)


def test_a_damaged_store_is_built_again_with_a_notice(tmp_path: Path) -> None:
    def build() -> Store:
        return build_store([corpus], WORDS, BYTES, Filters(), "error", tmp_path / "s")

    corpus = _corpus(tmp_path / "a.tsv", PAIRS)
    first = build()
    files = {path: path.read_bytes() for path in first.folder.iterdir()}
    for path, whole in files.items():
        for damage in (bytes(len(whole)), None):
            if damage == whole:
                continue
            path.unlink() if damage is None else path.write_bytes(damage)
            with pytest.warns(UserWarning, match=f"{first.folder}.*{path.name}.*building it again"):
                again = build()
            assert [again.ids(row) for row in range(len(again))] == [first.ids(row) for row in range(len(first))]
            assert {one: one.read_bytes() for one in again.folder.iterdir()} == files
            assert _folders(tmp_path / "s") == [first.folder.name]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 160])
def test_checksums_cover_every_byte_of_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(store_module, "HASHED", 16)
    content = bytes(range(1, 1 + size))
    (tmp_path / "a").write_bytes(content)
    before = store_module.checksums(tmp_path, ["a"])
    for place in range(size):
        (tmp_path / "a").write_bytes(bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]]))
        assert store_module.checksums(tmp_path, ["a"]) != before


@pytest.mark.parametrize("fault", ["fsync", "rename"])
def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    corpus = _corpus(tmp_path / "a.tsv", PAIRS)
    with monkeypatch.context() as patched:
        patched.setattr(os, fault, fail)
        with pytest.raises(InputError, match="No space left"):
            build_store([corpus], WORDS, BYTES, Filters(), "error", tmp_path / "s")
    assert _folders(tmp_path / "s") == []
    assert len(build_store([corpus], WORDS, BYTES, Filters(), "error", tmp_path / "s")) == 43


def _build(corpus: Corpus, folder: Path, result: Path, killed_after: int | None = None) -> None:
    def progress(read: int) -> None:
        if killed_after is not None and read >= killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    store_module.CHUNK = 50
    store = build_store([corpus], BYTES, BYTES, Filters(), "error", folder, progress=progress)
    result.write_text(f"{len(store)} {store.folder.name}")


@pytest.mark.slow
def test_killed_build_is_rebuilt(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "a.tsv", [(f"source {n}", f"target {n}") for n in range(6000)])
    fork = multiprocessing.get_context("fork")  # a process that imports everything again takes longer than the build
    results = [tmp_path / f"result{number}" for number in range(3)]
    kills = (3000, None, None)
    builders = [
        fork.Process(target=_build, args=(corpus, tmp_path / "s", result, killed))
        for result, killed in zip(results, kills, strict=True)
    ]
    builders[0].start()
    builders[0].join()
    assert builders[0].exitcode == -signal.SIGKILL
    assert not results[0].exists()
    assert not list((tmp_path / "s").glob("[!.]*"))
    unfinished = list((tmp_path / "s").glob(".unfinished-*"))
    assert unfinished
    for path in [unfinished[0], *unfinished[0].iterdir()]:
        os.utime(path, (0, 0))
    for builder in builders[1:]:
        builder.start()
    for builder in builders[1:]:
        builder.join()
        assert builder.exitcode == 0
    first, second = (result.read_text() for result in results[1:])
    assert first == second
    assert first.startswith("6000 ")
    assert len(list((tmp_path / "s").glob("[!.]*"))) == 1
    assert not unfinished[0].exists()  # old enough to have no builder


@given(
    groups=st.lists(st.integers(0, 12), min_size=2, max_size=80),
    seed=st.integers(-5, 2**70),
    share=st.floats(0.01, 0.9),
)
def test_split_parts_share_no_source(groups: list[int], seed: int, share: float) -> None:
    n = len(groups)
    size = min(max(int(n * share), 1), n - 1)
    numbers = np.array(groups, np.uint64)
    if min(groups.count(group) for group in groups) > size:
        with pytest.raises(InputError):
            split(n, size, seed, numbers)
        return
    train, development = split(n, size, seed, numbers)
    assert sorted([*train, *development]) == list(range(n))
    assert 0 < len(development) <= size
    assert not set(numbers[train]) & set(numbers[development])
    again = split(n, size, seed, numbers)
    assert np.array_equal(train, again[0])
    assert np.array_equal(development, again[1])


def test_split_is_exact_for_distinct_sources_and_depends_on_the_seed(tmp_path: Path) -> None:
    pairs = [(f"s{n % 90}", f"t{n}") for n in range(100)]
    store = build_store([_corpus(tmp_path / "a.tsv", pairs)], BYTES, BYTES, Filters(), "error", tmp_path / "s")
    groups = store.groups()
    assert len(set(groups.tolist())) == 90
    splits = [split(100, 20, seed, groups)[1] for seed in range(5)]
    assert all(len(development) == 20 for development in splits)
    assert len({tuple(development) for development in splits}) == 5
    with pytest.raises(InputError, match="dev_size"):
        split(100, 100, 1, groups)
