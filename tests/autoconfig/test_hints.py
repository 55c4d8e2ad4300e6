"""Hints before training: tasks that data look like, headers that are read as data, columns that are not read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from transduce.autoconfig import plan_for
from transduce.errors import InputError

DRAW = random.Random(1)
CHINESE = [f"{chr(0x4E00 + number)}{chr(0x5E00 + number)}" for number in range(150)]
WORDS = ["".join(DRAW.choices("abcdefghij", k=DRAW.randint(3, 8))) for _ in range(150)]


def write(path: Path, rows: list[str], ending: str = "\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(row + ending for row in rows).encode())
    return str(path)


@pytest.fixture
def hints(recwarn: pytest.WarningsRecorder) -> Callable[..., list[str]]:
    """The warnings that a plan for a file gives."""

    def found(path: str, *settings: str, task: str = "generate") -> list[str]:
        recwarn.clear()
        plan_for(path, settings, task)
        return [str(one.message) for one in recwarn.list]

    return found


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("a.csv", ["Zeichen;Laut", *(f"{one};{two}" for one, two in zip(CHINESE, WORDS, strict=True))], "Zeichen,Laut"),
        ("a.tsv", ["words\tprice", *(f"{one}\t{number}" for number, one in enumerate(WORDS))], "words,price"),
        ("a.tsv", ["name_de\tname en", *(f"{one}\t{one[::-1]}" for one in WORDS)], "name_de,name en"),
        ("a.csv", ["remark,mood", *(f"{one},{['good', 'bad'][len(one) % 2]}" for one in WORDS)], "remark,mood"),
    ],
)  # fmt: skip
def test_a_line_that_looks_like_a_header_is_reported(tmp_path: Path, hints, name, rows, columns) -> None:
    path = write(tmp_path / name, rows, "\r\n")
    (about,) = [one for one in hints(path) if "names of columns" in one]
    assert about.startswith(f"{path}:1:")
    assert f"--columns {columns} " in about
    before = plan_for(path).statistics.pairs
    assert plan_for(path, [f"data.columns={columns}"]).statistics.pairs == before - 1
    assert not [one for one in hints(path, f"data.columns={columns}") if "names of columns" in one]


@pytest.mark.parametrize(
    "rows",
    [
        [f"{one}\t{two}" for one, two in zip(CHINESE, WORDS, strict=True)],
        [f"{two}\t{one}" for one, two in zip(CHINESE, WORDS, strict=True)],
        [f"{one}\t{number}" for number, one in enumerate(WORDS)],
        [f"{one}\t{one[::-1]}" for one in WORDS],
        ["Hello.\tGood morning, everybody!", *(f"{one}\t{number}" for number, one in enumerate(WORDS))],
    ],
)
def test_data_without_a_header_are_left_alone(tmp_path: Path, hints, rows) -> None:
    assert not [one for one in hints(write(tmp_path / "a.tsv", rows)) if "names of columns" in one]


def test_known_names_among_others_are_a_header(tmp_path: Path, hints) -> None:
    rows = ["id,text,label,annotator", *(f"{place},{one},x{len(one)},k" for place, one in enumerate(WORDS))]
    plan = plan_for(write(tmp_path / "a.csv", rows), (), "classify")
    assert plan.recipe.data.train[0].columns == ("text", "label")
    assert plan.statistics.pairs == len(WORDS)


def test_columns_that_are_not_read_are_reported(tmp_path: Path, hints) -> None:
    path = write(tmp_path / "a.tsv", [f"{place}\t{one}\t{one[::-1]}" for place, one in enumerate(WORDS)])
    (about,) = hints(path)
    assert "of 3 columns, column 1 is the source and column 2 the target: --columns 2,3" in about
    assert hints(path, "data.columns=2,3") == []
    assert hints(path, task="embed") == []  # the third column may be a similarity
    assert hints(path, task="converse") == []  # reads all columns


def test_a_third_column_of_numbers_may_be_a_similarity(tmp_path: Path, hints) -> None:
    rows = [f"{one}\t{one[::-1]}\t{place % 50 / 10}" for place, one in enumerate(WORDS)]
    (about,) = hints(write(tmp_path / "a.tsv", rows))
    assert "column 3 holds numbers" in about
    assert "--task embed" in about
    (about,) = hints(write(tmp_path / "a.tsv", [*rows, "x\ty\tz"]))
    assert "--columns 2,3" in about


@pytest.mark.parametrize(("name", "separator"), [("a.txt", "tab"), ("a.csv", "comma")])
def test_texts_without_targets_are_refused_with_the_tasks_that_need_none(
    tmp_path: Path, name: str, separator: str
) -> None:
    path = write(tmp_path / name, ["", *WORDS])
    for task in ("generate", "pronounce"):
        with pytest.raises(InputError, match=f"no line has a {separator}.*without targets") as refused:
            plan_for(path, (), task)
        assert "--task lm" in str(refused.value)
    plan_for(path, (), "lm")
    broken = write(tmp_path / "b.tsv", [*(f"{one}\tx{one}" for one in WORDS), WORDS[0]])
    with pytest.raises(InputError, match="151: missing column"):  # one line is at fault, and it is named
        plan_for(broken, ())


def test_tags_get_a_hint_and_copied_symbols_do_not(tmp_path: Path, hints) -> None:
    sentences = [[DRAW.choice(WORDS) for _ in range(6)] for _ in range(150)]
    tags = [
        "\t".join((" ".join(one), " ".join("NOUN" if len(word) > 5 else "VERB" for word in one))) for one in sentences
    ]
    (about,) = hints(write(tmp_path / "tags.tsv", tags))
    assert "--task tag" in about
    assert hints(write(tmp_path / "tags.tsv", tags), task="tag") == []
    symbols = [DRAW.choices("abcdef", k=6) for _ in range(150)]
    assert hints(write(tmp_path / "reverse.tsv", [f"{' '.join(one)}\t{' '.join(one[::-1])}" for one in symbols])) == []


@pytest.mark.parametrize(
    ("names", "task"),
    [
        ([f"photos/{number}.jpg" for number in range(150)], "--task caption "),
        ([f"{number}.wav" for number in range(150)], "--task transcribe "),
        ([f"LJ{number}" for number in range(150)], "--task transcribe "),
    ],
)
def test_sources_that_name_files_get_a_hint(tmp_path: Path, hints, names: list[str], task: str) -> None:
    for name in names:
        write(tmp_path / "wavs" / f"{name}.wav", [])
    path = write(tmp_path / "a.tsv", [f"{one}\t{two}" for one, two in zip(names, WORDS, strict=True)])
    (about,) = hints(path)
    assert task in about


def test_equal_targets_get_a_warning(tmp_path: Path, hints) -> None:
    assert "all targets are the same line" in "".join(hints(write(tmp_path / "a.tsv", [f"{one}\tx" for one in WORDS])))
