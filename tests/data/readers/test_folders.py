"""Folder and IDX corpora: names, labels, metadata files and errors."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from transduce.data.readers.corpus import DropCounter, fingerprint, read_corpus
from transduce.data.readers.folders import idx_array, read_idx
from transduce.errors import InputError, UnreadableError
from transduce.recipe import Corpus


def corpus(path: Path | str, **more) -> Corpus:
    return Corpus(path=str(path), modalities=("a file",), **more)


def idx(path: Path, values: np.ndarray, kind: int = 8) -> Path:
    content = bytes([0, 0, kind, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def labelled(tmp_path):
    for name in ("cat/2", "cat/1", "cat/deep/3", "a dog/1", ".hidden/1", "cat/.thumbs"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "README").write_text("no folder of a label")
    return tmp_path


def test_subfolders_are_labels(labelled):
    found = list(read_corpus(corpus(labelled)))
    wanted = [("a dog/1", "a dog"), ("cat/1", "cat"), ("cat/2", "cat"), ("cat/deep/3", "cat")]
    assert [(one.source, one.target) for one in found] == [(str(labelled / name), label) for name, label in wanted]
    assert [one.line for one in found] == [1, 2, 3, 4]
    assert all(Path(one.source).is_file() for one in found)


def test_new_file_changes_the_fingerprint(labelled):
    before = fingerprint(corpus(labelled))
    assert fingerprint(corpus(labelled)) == before
    (labelled / "cat" / "4").write_text("")
    assert fingerprint(corpus(labelled)) != before


@pytest.mark.parametrize("name", ["captions.jsonl", "metadata.jsonl"])
@pytest.mark.parametrize("fields", [("file_name", "caption"), ("file_name", "text"), ("seen", "captions")])
def test_metadata_file_gives_sources_and_targets(tmp_path, name, fields):
    (tmp_path / "one").write_text("")
    source, target = fields
    text = ["first", "second"] if target == "captions" else "first"
    lines = [{source: "one", target: text, "id": 3}, {source: "one", target: "third"}]
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(one.source, one.target, one.line, one.file) for one in read_corpus(corpus(tmp_path))]
    at, place = str(tmp_path / "one"), str(tmp_path / name)
    more = [(at, "second", 1, place)] if target == "captions" else []
    assert found == [(at, "first", 1, place), *more, (at, "third", 2, place)]


@pytest.mark.parametrize("header", ["file_name,text", "id,file_name,transcription", None])
def test_a_table_is_a_metadata_file(tmp_path, header):
    name = "a.wav" if header else "wavs/a.wav"
    (tmp_path / "wavs").mkdir()
    (tmp_path / name).write_text("")
    number = "7," if header and "id" in header else ""
    lines = [header, f'{number}a.wav,"one, two"'] if header else ["a|one, two|ignored", "a|three|"]
    (tmp_path / "metadata.csv").write_text("".join(f"{line}\n" for line in lines))
    found = [(one.source, one.target, one.line) for one in read_corpus(corpus(tmp_path))]
    at = str(tmp_path / name)
    assert found == ([(at, "one, two", 2)] if header else [(at, "one, two", 1), (at, "three", 2)])


def test_columns_select_fields_of_the_metadata_file(tmp_path):
    (tmp_path / "captions.jsonl").write_text(json.dumps({"a": "x", "b": "y", "caption": "no"}) + "\n")
    found = next(read_corpus(corpus(tmp_path, columns=("a", "b"))))
    assert (found.source, found.target) == (str(tmp_path / "x"), "y")


def test_unreadable_metadata_lines_are_counted(tmp_path):
    (tmp_path / "one").write_text("")
    bad = ["{", "[1]", '{"file_name": "one"}', '{"caption": "x"}', '{"file_name": "one", "caption": [3]}']
    good = '{"file_name": "one", "caption": ["x", "y"]}'
    (tmp_path / "captions.jsonl").write_text("\n".join([*bad, good]) + "\n")
    counts = DropCounter()
    assert [one.target for one in read_corpus(corpus(tmp_path), "drop", counts)] == ["x", "y"]
    assert counts == {"malformed JSON": 2, "missing field": 2, "not text": 1}
    assert counts.places["not text"] == (str(tmp_path / "captions.jsonl"), 5)
    with pytest.raises(InputError) as error:
        list(read_corpus(corpus(tmp_path)))
    assert error.value.where.endswith("captions.jsonl:1")


def test_folder_without_labels_or_metadata_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for action in (lambda one: list(read_corpus(one)), fingerprint):
        with pytest.raises(InputError, match="neither labels"):
            action(corpus(tmp_path))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_arrays_are_named_by_number(tmp_path, ending):
    values = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    source = idx(tmp_path / f"some-idx3-ubyte{ending}", values)
    target = idx(tmp_path / f"labels-idx1-ubyte{ending}", np.array([7, 0, 7], np.uint8))
    pairs = Corpus(source=str(source), target=str(target), modalities=("a file",))
    found = list(read_corpus(pairs))
    assert [(one.source, one.target) for one in found] == [(f"{source}#{n}", label) for n, label in enumerate("707")]
    for number, one in enumerate(found):
        assert np.array_equal(idx_array(one.source), values[number])
    assert read_idx(str(source)) is read_idx(str(source))  # once a process
    before = fingerprint(pairs)
    idx(target, np.array([7, 1, 7], np.uint8))
    assert fingerprint(pairs) != before
    assert [one.target for one in read_corpus(pairs)] == ["7", "1", "7"]


def test_idx_data_types(tmp_path):
    for kind, name in ((9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")):
        values = np.array([[1, -2], [3, 100]], name)
        assert np.array_equal(read_idx(str(idx(tmp_path / f"{kind}-idx2", values, kind))), values)


@pytest.mark.parametrize("damage", ["short", "long", "kind", "huge", "gzip", "empty"])
def test_damaged_idx_files_are_refused(tmp_path, damage):
    path = idx(tmp_path / "x-idx1-ubyte", np.arange(9, dtype=np.uint8))
    raw = path.read_bytes()
    if damage == "gzip":
        path = tmp_path / "x-idx1-ubyte.gz"
    changed = {"short": raw[:-1], "long": raw + b"1", "kind": b"\0\0\1" + raw[3:], "gzip": gzip.compress(raw)[:-9]}
    changed |= {"huge": raw[:4] + b"\xff\xff\xff\xff" * 2, "empty": b""}
    if damage == "huge":
        raw = b"\0\0\x08\2"
        changed["huge"] = raw + b"\xff\xff\xff\xff" * 2
    path.write_bytes(changed[damage])
    with pytest.raises(InputError) as error:
        read_idx(str(path))
    assert str(path) in error.value.where
    with pytest.raises(UnreadableError):
        idx_array(f"{path}#0")


def test_missing_idx_arrays_are_refused(tmp_path):
    path = idx(tmp_path / "x-idx1-ubyte", np.arange(9, dtype=np.uint8))
    for name in (f"{path}#9", f"{path}#x", f"{path}#-1", "nowhere#0"):
        with pytest.raises(UnreadableError):
            idx_array(name)
    other = idx(tmp_path / "y-idx1-ubyte", np.arange(8, dtype=np.uint8))
    with pytest.raises(InputError, match="labels of shape"):
        list(read_corpus(Corpus(source=str(path), target=str(other), modalities=("a file",))))
