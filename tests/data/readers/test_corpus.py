"""Corpora: every format gives the same examples; unreadable lines are reported or counted."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from transduce.autoconfig import recipe_for
from transduce.autoconfig.statistics import corpus_statistics
from transduce.data.readers.corpus import DropCounter, fingerprint, read_corpus, read_lines
from transduce.data.readers.translation_files import suspicious_line
from transduce.errors import InputError
from transduce.flow import Example
from transduce.recipe import Corpus, parse

PAIRS = [("ein Haus", "a house"), ("zwei\u2028Häuser", "two\x0bhouses\x85"), ("", "empty"), ("drei 😀", "three  ")]


def _pairs(examples: Any) -> list[tuple[str, str | None]]:
    return [(example.source, example.target) for example in examples]


def _write(path: Path, content: bytes) -> str:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        middle = len(content) // 2  # two frames: both must be read
        content = b"".join(zstandard.compress(part) for part in (content[:middle], content[middle:]))
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("final", [True, False])
def test_all_formats_give_the_same_examples(tmp_path: Path, packed: str, end: str, mark: bytes, final: bool) -> None:
    def store(name: str, lines: list[str]) -> str:
        text = end.join(lines) + (end if final else "")
        return _write(tmp_path / f"{name}{packed}", mark + text.encode())

    tsv = Corpus(path=store("a.tsv", ["\t".join(pair) for pair in PAIRS]))
    objects = [json.dumps({"source": source, "target": target, "id": 7}) for source, target in PAIRS]
    jsonl = Corpus(path=store("a.jsonl", objects))
    sides = [store(f"a.{side}", [pair[side] for pair in PAIRS]) for side in (0, 1)]
    parallel = Corpus(source=sides[0], target=sides[1])
    for corpus in (tsv, jsonl, parallel):
        examples = list(read_corpus(corpus))
        assert _pairs(examples) == PAIRS
        assert [example.line for example in examples] == [1, 2, 3, 4]
        assert {example.file for example in examples} == {str(corpus.path or corpus.source)}
    assert len(list(read_lines(sides[0]))) == 4
    assert list(read_lines(sides[1])) == [target for _, target in PAIRS]
    assert next(read_corpus(jsonl)).extra == {"id": "7"}


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = str(tmp_path / "a.parquet")
    table = arrow.table(
        {"de": [a for a, _ in PAIRS], "en": [b for _, b in PAIRS], "year": [1, 2, None, 4], "share": [0.5] * 4}
    )
    parquet.write_table(table, path, row_group_size=2)
    examples = list(read_corpus(Corpus(path=path, columns=("de", "en"))))
    assert _pairs(examples) == PAIRS
    assert [dict(example.extra) for example in examples] == [
        {"year": "1", "share": "0.5"},
        {"year": "2", "share": "0.5"},
        {"share": "0.5"},
        {"year": "4", "share": "0.5"},
    ]
    with pytest.raises(InputError, match=r"missing field: 'dee'(.|\n)*did you mean 'de'"):
        list(read_corpus(Corpus(path=path, columns=("dee", "en"))))
    with pytest.raises(InputError, match="not text"):
        list(read_corpus(Corpus(path=path, columns=("share", "en"))))
    Path(path).write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(InputError, match="Parquet"):
        list(read_corpus(Corpus(path=path)))


def test_parquet_with_nulls_and_invalid_utf8(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = str(tmp_path / "a.parquet")
    bad = arrow.array([b"good", b"\xff", b"ni\0l", b"x"], arrow.binary())
    source = arrow.StringArray.from_buffers(4, *bad.buffers()[1:])
    parquet.write_table(arrow.table({"source": source, "target": ["a", "b", "c", None]}), path)
    counts: Counter[str] = Counter()
    assert _pairs(read_corpus(Corpus(path=path), "drop", counts)) == [("good", "a")]
    assert counts == {"invalid UTF-8": 1, "NUL character": 1, "missing field": 1}


def test_further_columns_become_extra(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.txt", b"a\tb\tc\td\n")
    example = next(read_corpus(Corpus(path=path)))
    assert example == Example("a", "b", {"column3": "c", "column4": "d"}, path, 1)


BAD_LINES = [
    ("a.tsv", b"one column", "missing column"),
    ("a.tsv", b"a\xffb\tc", "invalid UTF-8"),
    ("a.tsv", b"\xed\xa0\x80\tc", "invalid UTF-8"),
    ("a.tsv", b"a\tb\x00c", "NUL character"),
    ("a.jsonl", b"{oops", "malformed JSON"),
    ("a.jsonl", b"[1, 2]", "malformed JSON"),
    ("a.jsonl", b"[" * 100_000, "malformed JSON"),
    ("a.jsonl", b'{"source": "a"}', "missing field"),
    ("a.jsonl", b'{"source": "a", "target": null}', "missing field"),
    ("a.jsonl", b'{"source": "a", "target": 3.5}', "not text"),
    ("a.jsonl", b'{"source": "a", "target": "\\ud800"}', "invalid UTF-8"),
    ("a.jsonl", b'{"source": "a", "target": "\\u0000"}', "NUL character"),
]


@pytest.mark.parametrize(("name", "line", "reason"), BAD_LINES)
def test_unreadable_line_is_reported_or_counted(tmp_path: Path, name: str, line: bytes, reason: str) -> None:
    good = b"x\ty" if name == "a.tsv" else b'{"source": "x", "target": "y"}'
    corpus = Corpus(path=_write(tmp_path / name, b"\n".join([good, line, good, line, b""])))
    with pytest.raises(InputError, match=reason) as caught:
        list(read_corpus(corpus))
    assert caught.value.where == f"{corpus.path}:2"
    counts = DropCounter()
    assert _pairs(read_corpus(corpus, "drop", counts)) == [("x", "y")] * 2
    assert counts == {reason: 2}
    assert counts.places == {reason: (corpus.path, 2)}
    plain: Counter[str] = Counter()
    list(read_corpus(corpus, "drop", plain))
    assert plain == counts


def test_unreadable_side_of_parallel_files_is_reported(tmp_path: Path) -> None:
    sides = _write(tmp_path / "a.de", b"a\nb\n"), _write(tmp_path / "a.en", b"a\n\xff\n")
    with pytest.raises(InputError) as caught:
        list(read_corpus(Corpus(source=sides[0], target=sides[1])))
    assert caught.value.where == f"{sides[1]}:2"
    assert "byte 0xff at byte 1" in str(caught.value)


def test_blank_lines_are_empty_pairs(tmp_path: Path) -> None:
    assert _pairs(read_corpus(Corpus(path=_write(tmp_path / "a.tsv", b"\na\tb\n\r\n")))) == [
        ("", ""),
        ("a", "b"),
        ("", ""),
    ]
    assert _pairs(read_corpus(Corpus(path=_write(tmp_path / "a.jsonl", b"\n")))) == [("", "")]


def test_byte_order_mark_inside_a_file_stays(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.txt", "\ufeffone\n\ufefftwo\r\r\n".encode())
    assert list(read_lines(path)) == ["one", "\ufefftwo\r"]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.tsv.zst", "a.jsonl"])
def test_empty_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, b"")
    with pytest.raises(InputError, match="no pairs"):
        list(read_corpus(Corpus(path=path)))
    assert list(read_lines(path)) == []


def test_files_that_cannot_be_opened_are_reported(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.tsv", "no such file"), (tmp_path, "directory")):
        for action in (lambda path: list(read_corpus(Corpus(path=path))), lambda path: fingerprint(Corpus(path=path))):
            with pytest.raises(InputError, match=problem):
                action(str(path))
    with pytest.raises(InputError, match="both"):
        list(read_corpus(Corpus(source=str(tmp_path / "a"))))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("invalid", ["error", "drop"])
def test_truncated_archive_is_an_error(tmp_path: Path, ending: str, invalid: Any) -> None:
    lines = b"".join(b"%d %d\tline %d\n" % (n, n * n, n) for n in range(20_000))
    path = tmp_path / f"a.tsv{ending}"
    path.write_bytes(gzip.compress(lines) if ending == ".gz" else zstandard.compress(lines))
    whole = path.read_bytes()
    assert len(list(read_corpus(Corpus(path=str(path))))) == 20_000
    for damage in (whole[: len(whole) // 2], whole[:-1], b"not an archive" + whole):
        path.write_bytes(damage)
        with pytest.raises(InputError, match="cannot be read further") as caught:
            list(read_corpus(Corpus(path=str(path)), invalid))
        assert caught.value.where.startswith(f"{path}:")


def test_parallel_files_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    words = [b"x" * (n * 37 % 50 + 1) for n in range(100)]
    source = _write(tmp_path / "a.de", b"\n".join(words))
    target = _write(tmp_path / "a.en", b"\n".join(words[:60] + words[61:]))
    with pytest.raises(InputError) as caught:
        list(read_corpus(Corpus(source=source, target=target)))
    assert "has 100 lines" in str(caught.value)
    assert "has 99" in str(caught.value)
    assert caught.value.where == f"{source}:61"


@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans())
def test_suspicious_line_is_located(seed: int, surplus: int, swap: bool) -> None:
    draw = np.random.default_rng(seed)
    longer = draw.integers(1, 100, 80)
    place = int(draw.integers(0, 80 - surplus))
    shorter = np.round(np.delete(longer, range(place, place + surplus)) * 1.5)
    sides = (shorter, longer) if swap else (longer, shorter)
    line, _ = suspicious_line(*sides)
    # No other place to take the surplus out fits the lengths better; by chance one may fit as well as the true one.
    short, long = np.log1p(shorter), np.log1p(longer)
    usual = np.median(long) - np.median(short)
    costs = [np.abs(np.delete(long, range(k, k + surplus)) - short - usual).sum() for k in range(81 - surplus)]
    found = line if line == 80 - surplus and costs[-1] == min(costs) else line - 1
    assert costs[found] == pytest.approx(min(costs))
    assert abs(line - (place + 1)) <= 2 or costs[place] >= costs[found] - 1e-9
    hole = longer.copy()
    hole[20] = 0
    if place > 20:
        assert suspicious_line(hole, shorter)[0] == 21
    assert suspicious_line(np.array([3, 4]), np.zeros(0))[0] == 1


@given(lines=st.lists(st.text().filter(lambda line: not set("\n\0\r") & set(line))))
def test_read_lines_gives_every_line(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    expected = [lines[0].removeprefix("\ufeff"), *lines[1:]] if lines else []
    assert list(read_lines(path)) == expected


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(b"one\n\xff\n")

    monkeypatch.setattr(sys, "stdin", Input())
    lines = read_lines("-")
    assert next(lines) == "one"
    with pytest.raises(InputError, match="standard input:2"):
        next(lines)


def test_utf16_is_recognised(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tsv", "a\tb\n".encode("utf-16"))
    with pytest.raises(InputError, match="UTF-16"):
        list(read_corpus(Corpus(path=path)))


def test_a_file_of_another_encoding_says_how_to_convert_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tsv", "über\tup\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"(?s)a\.tsv:1.*byte 0xfc.*iconv -f LATIN1"):
        corpus_statistics([Corpus(path=path)], "drop")  # all lines were dropped: the reason is told


def test_fingerprint_depends_on_content_not_name(tmp_path: Path) -> None:
    one = Corpus(path=_write(tmp_path / "a.tsv", b"a\tb\n"))
    same = Corpus(path=_write(tmp_path / "b.tsv", b"a\tb\n"))
    others = [
        Corpus(path=_write(tmp_path / "c.tsv", b"a\tc\n")),
        Corpus(path=_write(tmp_path / "a.jsonl", b"a\tb\n")),
        Corpus(path=str(tmp_path / "a.jsonl"), columns=("x", "y")),
        Corpus(source=str(one.path), target=str(same.path)),
    ]
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(corpus) for corpus in [one, *others]}) == 5


def test_large_file_is_streamed(tmp_path: Path) -> None:
    """A megabyte passes, and a fifth of it is never held at once."""
    path = _write(tmp_path / "a.tsv", b"some words here\tsome words there\n" * 30_000)
    examples = read_corpus(Corpus(path=path))
    next(examples)
    tracemalloc.start()
    try:
        assert sum(1 for _ in examples) == 30_000 - 1
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_text_without_a_source_is_one_named_column_of_a_tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("c a b\ta b c\n\nz y\ty z\n")

    def texts(**settings):
        data = parse({"data": {"format": "text", "train": {"path": str(path), **settings}}}).data
        return [example.target for example in read_corpus(data.train[0])]

    with pytest.raises(InputError, match=r"(?s)pairs\.tsv:1.*2 columns.*column2"):
        texts()
    assert texts(columns=["column2"]) == ["a b c", "", "y z"]
    assert texts(columns=["column1"]) == ["c a b", "", "z y"]
    with pytest.raises(InputError, match="missing column: column3 of 2"):
        texts(columns=["column3"])
    path.write_text("a b c\ny z\n")
    assert texts() == ["a b c", "y z"]


def test_a_tab_in_plain_text_is_white_space(tmp_path):
    path = tmp_path / "code.txt"
    path.write_text("if x:\n\tpass\n")
    corpus = parse({"data": {"format": "text", "train": str(path)}}).data.train[0]
    assert [example.target for example in read_corpus(corpus)] == ["if x:", "\tpass"]


def test_held_out_texts_have_the_column_of_the_training_text():
    train = {"path": "train.tsv", "columns": ["column2"]}
    data = parse({"data": {"format": "text", "train": train, "dev": "dev.tsv"}}).data
    assert data.dev[0].columns == data.held_out("test.tsv")[0].columns == ("column2",)
    with pytest.raises(InputError, match="one column is a text without a source"):
        next(read_corpus(parse({"data": {"train": train}}).data.train[0]))


@pytest.mark.parametrize("task", ["lm", "mask"])
def test_tasks_on_text_ask_for_the_column_of_a_tsv(tmp_path, task):
    path = tmp_path / "pairs.tsv"
    path.write_text("c a b\ta b c\n" * 30_000)
    with pytest.raises(InputError, match=r"name it: `data\.train="):
        recipe_for(str(path), [], task)
    named = f"data.train={{path: {path}, columns: [column2]}}"
    assert recipe_for(str(path), [named], task).data.train[0].columns == ("column2",)
