"""Cached files: what is listed, eviction of the least recently used, privacy, and the command."""

from __future__ import annotations

import math
import os
import stat
import time
import warnings
from pathlib import Path

import pytest
from export_fixtures import TEXTS, make_run, pair
from run_fixtures import Command, colour_pairs

import transduce
from transduce.data.filters import Filters
from transduce.data.store import Store, build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.inference.retrieval import cached_embeddings
from transduce.interop import as_run, bundle
from transduce.recipe import Corpus
from transduce.storage import cache, cache_directory

BYTES = Tokenizer.train([], "bytes", 260)
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "transduce"


def add(kind: str, name: str, size: int, days: float = 0) -> Path:
    """An entry of this many bytes, used this many days ago."""
    path = cache_directory(kind) / name
    path.mkdir(parents=True)
    (path / "data").write_bytes(bytes(size))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def build(tmp_path: Path, name: str, count: int = 5) -> Store:
    path = tmp_path / f"{name}.tsv"
    path.write_text("".join(f"{name} {source}\t{target}\n" for source, target in colour_pairs(count)), encoding="utf-8")
    return build_store([Corpus(path=str(path))], BYTES, BYTES, Filters(), "error", cache_directory("stores"))


def test_entries_have_kind_size_origin_and_time_of_last_use(tmp_path: Path) -> None:
    assert cache.cache_entries() == []
    store = build(tmp_path, "a")
    os.utime(store.folder, (100, 100))
    add("hub", "owner--name", 1000, days=2)
    first, second = cache.cache_entries()
    assert (first.kind, first.path, first.origin) == ("stores", store.folder, str(tmp_path / "a.tsv"))
    assert first.size == sum(path.stat().st_size for path in store.folder.iterdir())
    assert first.used == 100
    assert (second.kind, second.size, second.origin) == ("hub", 1000, "owner/name")
    build(tmp_path, "a")  # found in the cache, so used now
    assert cache.cache_entries()[-1].path == store.folder


def test_eviction_removes_the_least_recently_used_until_under_the_limit() -> None:
    for days in (5, 3, 9, 1):
        add("stores", f"{days}-days", 1000, days)
    kernels = add("native", "kernels", 1000, days=100)
    killed, building = add("stores", ".unfinished-old", 10, days=2), add("stores", ".unfinished-new", 10)
    cache.set_cache_limit(3500)
    assert [entry.path.name for entry in cache.evict()] == [".unfinished-old", "9-days", "5-days"]
    assert sorted(entry.path.name for entry in cache.cache_entries()) == [
        ".unfinished-new",
        "1-days",
        "3-days",
        "kernels",
    ]
    assert kernels.exists()
    assert building.exists()
    assert not killed.exists()
    assert cache.evict() == []


def test_entries_that_another_process_finishes_are_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process renames its unfinished entry between the listing of the folder and the look at the entry."""
    finished = add("stores", "finished", 1000)
    renamed = finished.with_name(".unfinished-1")
    listed = cache._list
    monkeypatch.setattr(cache, "_list", lambda folder: [*listed(folder), *([renamed] * (folder == finished.parent))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [entry.path for entry in cache.cache_entries()] == [finished]
        assert cache.evict() == []
        gone = cache.CacheEntry("stores", renamed, 10, 0.0, "")
        assert cache.remove_entries([gone]) == 0


def test_the_limit_is_applied_with_a_notice_when_something_is_added(tmp_path: Path) -> None:
    old = add("stores", "old", 100_000, days=3)
    recent = add("stores", "recent", 100_000)
    cache.set_cache_limit(50_000)
    with pytest.warns(UserWarning, match=r"limit of 50 kB: removed 1 entries \(100 kB\).*within a day.*cache limit"):
        store = build(tmp_path, "a")
    assert not old.exists()
    assert recent.exists()  # it may be in use, as the training data of a run whose development data are added now
    assert len(store) == 5
    cache.set_cache_limit(math.inf)
    add("stores", "old", 100_000, days=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tmp_path, "b")
    assert (cache_directory("stores") / "old").exists()


def test_an_evicted_store_can_be_read_by_those_who_have_opened_it(tmp_path: Path) -> None:
    store = build(tmp_path, "a")
    expected = [store.ids(row) for row in range(len(store))]
    cache.remove_entries(cache.cache_entries())
    assert not store.folder.exists()
    assert [store.ids(row) for row in range(len(store))] == expected
    assert [build(tmp_path, "a").ids(row) for row in range(5)] == expected


@pytest.mark.parametrize("content", ["", "nan", "-1", "many", "\0"])
def test_a_damaged_limit_is_the_default(home: Path, content: str) -> None:
    home.mkdir(parents=True)
    (home / "limit").write_text(content)
    assert cache.cache_limit() == cache.DEFAULT_LIMIT


@pytest.mark.parametrize(
    ("text", "size"), [("20GB", 20e9), ("500 mb", 5e8), ("1.5T", 1.5e12), ("7", 7), ("0", 0), ("none", math.inf)]
)
def test_sizes_are_parsed(text: str, size: float) -> None:
    assert cache.parse_size(text) == size
    cache.set_cache_limit(size)
    assert cache.cache_limit() == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "20 parsecs", "nan", "inf", "1" * 5000])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a size"):
        cache.parse_size(text)


def test_everything_in_the_cache_is_private(tmp_path: Path, home: Path) -> None:
    before = os.umask(0o000)
    try:
        run = make_run(tmp_path / "run", pair())
        build(tmp_path, "a")
        cached_embeddings(transduce.load(run.folder, device="cpu"), TEXTS)
        as_run(bundle.pack(run, tmp_path / "run.zip"))
        cache.set_cache_limit(1e9)
    finally:
        os.umask(before)
    kinds = {entry.kind for entry in cache.cache_entries()} - {"native"}
    assert kinds == {"stores", "vectors", "imported"}
    for path in (home, *(one for kind in kinds for one in (home / kind).rglob("*"))):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_cache_folder_of_the_recipe_follows_the_umask(tmp_path: Path) -> None:
    """Several users may share it."""
    (tmp_path / "a.tsv").write_text("a\tb\n")
    before = os.umask(0o002)
    try:
        corpora = [Corpus(path=str(tmp_path / "a.tsv"))]
        store = build_store(corpora, BYTES, BYTES, Filters(), "error", tmp_path / "shared")
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o775
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()} == {0o664}


def test_damaged_embeddings_are_computed_again_with_a_notice(tmp_path: Path) -> None:
    model = transduce.load(make_run(tmp_path / "run", pair()).folder, device="cpu")
    expected = cached_embeddings(model, TEXTS).copy()
    (folder,) = cache_directory("vectors").iterdir()
    for path in sorted(folder.iterdir()):
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.warns(UserWarning, match="damaged embeddings.*computing them again"):
            again = cached_embeddings(model, TEXTS)
        assert (again == expected).all()


class TestCommand:
    def test_show(self, command: Command, tmp_path: Path, home: Path) -> None:
        build(tmp_path, "a")
        add("hub", "owner--name", 12_345, days=3)
        called = command("cache")
        assert called.code == 0
        assert f"{tmp_path / 'a.tsv'}" in called.out.replace("\n", "")
        (line,) = (line for line in called.out.splitlines() if line.startswith("hub"))
        for part in ("12.3 kB", "3 days ago", "owner/name"):
            assert part in line
        assert f"{home}: 2 entries" in called.out
        assert called.out.rstrip().endswith("limit 50 GB")

    def test_clear(self, command: Command) -> None:
        for kind in ("hub", "stores"):
            add(kind, "x", 1000)
        assert command("cache", "clear", "hub").out == "1 entries removed, 1,000 bytes\n"
        assert [entry.kind for entry in cache.cache_entries()] == ["stores"]
        assert command("cache", "clear").code == 0
        assert cache.cache_entries() == []

    def test_limit(self, command: Command) -> None:
        for days in (1, 2, 3):
            add("stores", str(days), 1000, days)
        assert command("cache", "limit", "2kb").out == "1 entries removed, 1,000 bytes\n"
        assert [entry.path.name for entry in cache.cache_entries()] == ["2", "1"]
        assert "limit 2,000 bytes" in command("cache").out
        assert command("cache", "limit", "none").code == 0
        assert "limit none" in command("cache").out

    @pytest.mark.parametrize("line", [("limit",), ("limit", "x"), ("clear", "x"), ("show", "x"), ("remove",)])
    def test_wrong_use(self, command: Command, line: tuple[str, ...]) -> None:
        add("stores", "x", 1)
        called = command("cache", *line)
        assert called.code == 2
        assert "Traceback" not in called.err
        assert len(cache.cache_entries()) == 1
