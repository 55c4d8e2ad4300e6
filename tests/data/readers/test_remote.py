"""Remote files: every address of fsspec is read as a local file is, and reads that fail are tried again."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from fault_records import record
from fsspec.implementations.memory import MemoryFileSystem

from transduce.autoconfig import recipe_for
from transduce.data.readers import remote
from transduce.data.readers.corpus import fingerprint, read_corpus
from transduce.errors import InputError
from transduce.recipe import Corpus, parse

PAIRS = [(f"Haus {number}", f"house {number}") for number in range(5000)]


class _FailingFile:
    """A file of which some reads fail."""

    def __init__(self, stream: Any, files: Failing) -> None:
        self._stream, self._files, self.size = stream, files, stream.seek(0, 2)
        stream.seek(0)

    def read(self, count: int) -> bytes:
        self._files.may_fail()
        return self._stream.read(min(count, 4000))  # short reads, as over a network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Failing(MemoryFileSystem):
    """An object store in memory that fails a share of its operations."""

    protocol = "failing"
    share = 0.1
    store: dict[str, Any] = {}  # noqa: RUF012 (as in the base class)
    failures = 0
    rng = random.Random(1)

    def may_fail(self) -> None:
        if self.rng.random() < self.share:
            type(self).failures += 1
            raise ConnectionError("the store is busy")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super().open(path, mode, **options)
        self.may_fail()
        return _FailingFile(super().open(path, mode, **options), self)

    def glob(self, path: str, **options: Any) -> Any:
        self.may_fail()
        return super().glob(path, **options)


@pytest.fixture(autouse=True)
def _object_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
    yield
    for name in ("failing", "memory"):
        files = fsspec.filesystem(name)
        files.store.clear()
        files.pseudo_dirs[:] = [""]


def _put(address: str, content: bytes) -> str:
    with fsspec.open(address, "wb") as stream:
        stream.write(content)
    return address


def _tsv(pairs: list[tuple[str, str]] = PAIRS) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in pairs).encode()


def _parquet() -> bytes:
    stream = io.BytesIO()
    table = arrow.table({"source": [one for one, _ in PAIRS], "target": [other for _, other in PAIRS]})
    parquet.write_table(table, stream, row_group_size=500)
    return stream.getvalue()


@pytest.mark.parametrize("protocol", ["memory", "failing"])
def test_remote_files_of_every_kind_give_the_pairs_of_local_ones(protocol: str) -> None:
    before = Failing.failures
    objects = "".join(json.dumps({"source": one, "target": other}) + "\n" for one, other in PAIRS).encode()
    addresses = [
        _put(f"{protocol}://corpus/a.tsv", _tsv()),
        _put(f"{protocol}://corpus/a.tsv.gz", gzip.compress(_tsv())),
        _put(f"{protocol}://corpus/a.jsonl", objects),
        _put(f"{protocol}://corpus/a.parquet", _parquet()),
    ]
    for address in addresses:
        assert [(one.source, one.target) for one in read_corpus(Corpus(path=address))] == PAIRS, address
    sides = [
        _put(f"{protocol}://corpus/a.{side}", "".join(f"{one[side]}\n" for one in PAIRS).encode()) for side in (0, 1)
    ]
    parallel = Corpus(source=sides[0], target=sides[1])
    assert [(one.source, one.target) for one in read_corpus(parallel)] == PAIRS
    failures = Failing.failures - before
    assert (failures > 5) == (protocol == "failing")
    if failures:
        outcome, files = "the pairs of local files, of every format", len(addresses) + 1
        record("object store that fails a tenth of its reads", outcome, files, files, failed_reads=[failures])


def test_fingerprint_of_a_remote_file_is_that_of_its_content() -> None:
    first, same = (_put(f"memory://{name}.tsv", _tsv()) for name in "ab")
    other = _put("memory://c.tsv", _tsv(PAIRS[1:]))
    hashes = [fingerprint(Corpus(path=address)) for address in (first, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_patterns_match_remote_shards_in_order() -> None:
    shards = [_put(f"failing://corpus/part-{number}.tsv", _tsv(PAIRS[number::3])) for number in (2, 0, 1)]
    for train in ("failing://corpus/part-*.tsv", {"path": "failing://corpus/part-*.tsv", "weight": 2.0}):
        corpora = parse({"data": {"train": train}}).data.train
        assert [corpus.path for corpus in corpora] == sorted(shards)
        assert [pair.source for pair in read_corpus(corpora[1])] == [source for source, _ in PAIRS[1::3]]
    assert {corpus.weight for corpus in corpora} == {2.0}


def test_a_recipe_is_chosen_for_remote_data() -> None:
    recipe = recipe_for(_put("memory://corpus/pairs.tsv", _tsv(PAIRS[:200])))
    assert recipe.data.train[0].path == "memory://corpus/pairs.tsv"


def test_errors_name_the_address_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    address = _put("failing://bad.tsv", _tsv(PAIRS[:3]) + b"\xff\tx\n")
    with pytest.raises(InputError, match="invalid UTF-8") as caught:
        list(read_corpus(Corpus(path=address)))
    assert caught.value.where == "failing://bad.tsv:4"
    with pytest.raises(InputError, match="no such file") as caught:
        list(read_corpus(Corpus(path="failing://missing.tsv")))
    assert caught.value.where == "failing://missing.tsv"
    with pytest.raises(InputError, match="Protocol not known") as caught:
        list(read_corpus(Corpus(path="nowhere://a.tsv")))
    assert caught.value.where == "nowhere://a.tsv"
    monkeypatch.setattr(Failing, "share", 1.0)
    with pytest.raises(InputError, match="8 attempts failed: the store is busy"):
        list(read_corpus(Corpus(path=address)))
    with pytest.raises(InputError, match="cannot be listed: 8 attempts failed"):
        parse({"data": {"train": "failing://*.tsv"}})


def test_a_store_that_fails_for_good_is_reported_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    address = _put("failing://long.tsv", _tsv() * 40)  # longer than the buffer
    pairs = read_corpus(Corpus(path=address))
    next(pairs)
    monkeypatch.setattr(Failing, "share", 1.0)
    with pytest.raises(InputError, match="8 attempts failed") as caught:
        list(pairs)
    assert caught.value.where.startswith("failing://long.tsv:")
    assert "try again later" in caught.value.remedy


def test_a_file_that_changes_between_two_attempts_is_refused() -> None:
    address = _put("failing://changing.tsv", _tsv() * 40)
    pairs = read_corpus(Corpus(path=address))
    next(pairs)
    _put(address, _tsv())
    with pytest.raises(InputError, match="has changed while it was read"):
        list(pairs)


def test_sources_that_name_files_are_local() -> None:
    address = _put("memory://captions.tsv", b"a.png\ta cat\n")
    with pytest.raises(InputError, match="read from this machine"):
        list(read_corpus(Corpus(path=address, modalities=("image",))))
