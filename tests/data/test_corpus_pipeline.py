"""Corpus preparation: what is dropped and why, the same bytes from any number of processes, and after any kill."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from fault_records import record
from run_fixtures import Command, colour_pairs

import transduce
from transduce.autoconfig import recipe_for
from transduce.data import sharded_work
from transduce.data.corpus_pipeline import AUTO, MANIFEST, PipelineOptions, prepare_corpora
from transduce.data.filters import TextFilters, is_badly_encoded
from transduce.data.readers.corpus import read_corpus, split_corpus
from transduce.errors import InputError
from transduce.recipe import Corpus, parse
from transduce.run import Run

ALL = PipelineOptions(
    TextFilters(min_length=3, max_length=200, max_ratio=4, copies=False, bad_encoding=False),
    normalisation=("canonical", "quotes", "spaces"),
    invalid="drop",
    drop_duplicates=True,
    near_duplicates=0.8,
    shard_lines=40,
)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in parquet.read_table(file).to_pylist()]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, of which some are duplicates, copies and so on; 300 lines in two files."""
    draw, folder = random.Random(1), tmp_path_factory.mktemp("corpus")
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(300)]
    good = [" ".join(draw.choices(words, k=10)) for _ in range(200)]
    lines = [f"{text}\t{text[::-1].title()}" for text in good]
    lines += draw.choices(lines[:50], k=40)
    lines += [f"{text} x\t{text[::-1].title()} x" for text in good[50:80]]  # near duplicates
    lines += ["", "ab\tcd", "one side\t", "same text\tSame  Text", "fÃ¼r mich\tfor my part", "a\ufffdb c\td e f"]
    lines += [f"{'long ' * 50}\tx y z", "a b c\t" + "d " * 40, "no tab"] + [f"{one}\tYY {one}" for one in words[:21]]
    draw.shuffle(lines)
    (folder / "a.tsv").write_text("\n".join(lines[:170]) + "\n", encoding="utf-8")
    (folder / "b.tsv").write_text("\n".join(lines[170:]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpora(noisy: Path) -> list[Corpus]:
    return [Corpus(path=str(noisy / name)) for name in ("a.tsv", "b.tsv")]


@pytest.fixture(scope="module")
def prepared(corpora: list[Corpus], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "out"
    prepare_corpora(corpora, folder, ALL)
    return folder


def test_every_line_is_kept_once_or_counted_with_its_reason(prepared: Path, corpora: list[Corpus]) -> None:
    manifest, rows = json.loads((prepared / MANIFEST).read_bytes()), _rows(prepared)
    assert manifest["read"] == 300 == manifest["kept"] + sum(manifest["dropped"].values())
    assert manifest["kept"] == len(rows) == sum(shard["rows"] for shard in manifest["shards"])
    expected = {"bad encoding", "copy", "duplicate", "empty", "missing column", "near duplicate", "ratio", "too long"}
    assert {*manifest["dropped"]} == expected | {"too short"}
    dropped = manifest["dropped"]
    assert (dropped["duplicate"], dropped["copy"], dropped["bad encoding"]) == (40, 1, 2)
    assert 25 <= dropped["near duplicate"] <= 30
    place = manifest["first"]["missing column"]
    file, _, line = place.rpartition(":")
    assert Path(file).read_text(encoding="utf-8").split("\n")[int(line) - 1] == "no tab"
    assert not (prepared / ".work").exists()


def test_the_first_of_equal_pairs_is_kept_as_brute_force_finds_it(corpora: list[Corpus], tmp_path: Path) -> None:
    options = PipelineOptions(invalid="drop", drop_duplicates=True, shard_lines=23)
    prepare_corpora(corpora, tmp_path / "out", options)
    seen, expected = set(), []
    for corpus in corpora:
        for pair in read_corpus(corpus, "drop"):
            both = pair.source, pair.target
            if pair.source.strip() and (pair.target or "").strip() and both not in seen:
                seen.add(both)
                expected.append((*both, pair.file, pair.line))
    found = [(row["source"], row["target"], row["file"], row["line"]) for row in _rows(tmp_path / "out")]
    assert found == expected


def test_a_part_without_any_row_left_has_its_place_in_the_manifest(tmp_path: Path) -> None:
    """A file that is given twice, and one whose lines are all wrong."""
    (tmp_path / "a.tsv").write_text("a b\tx\nc d\ty\n", encoding="utf-8")
    (tmp_path / "wrong.tsv").write_text("a b\n\n", encoding="utf-8")
    (tmp_path / "b.tsv").write_bytes((tmp_path / "a.tsv").read_bytes())
    given = [Corpus(path=str(tmp_path / name)) for name in ("a.tsv", "wrong.tsv", "b.tsv")]
    for options in (PipelineOptions(invalid="drop", drop_duplicates=True), replace(ALL, filters=TextFilters())):
        out = tmp_path / f"out {options.near_duplicates}"
        manifest = prepare_corpora(given, out, options)
        assert (manifest["kept"], manifest["dropped"]["duplicate"]) == (2, 2)
        assert manifest["first"]["duplicate"] == f"{tmp_path / 'b.tsv'}:1"
        assert [shard["rows"] for shard in manifest["shards"]] == [2]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(corpora: list[Corpus], prepared: Path, tmp_path: Path) -> None:
    prepare_corpora(corpora, tmp_path / "out", ALL, workers=2)
    assert _files(tmp_path / "out") == _files(prepared)


class _Killer:
    """Progress of a process that is killed after so many reports."""

    def __init__(self, kill: int) -> None:
        self.left = kill

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_preparation_is_continued_with_the_same_bytes(
    corpora: list[Corpus], prepared: Path, tmp_path: Path
) -> None:
    """Nine parts are read, nine are written; killed at the ends of both steps and inside of them."""
    for kill in (1, 5, 9, 10, 18):
        folder = tmp_path / str(kill)
        child = os.fork()
        if child == 0:
            prepare_corpora(corpora, folder, ALL, progress=_Killer(kill))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert not (folder / MANIFEST).exists()
        again = _Killer(0)
        prepare_corpora(corpora, folder, ALL, progress=again)
        assert -again.left == 18 - kill  # nothing is done twice
        assert _files(folder) == _files(prepared)
    record("driver of a preparation killed", "continued, no shard done twice, same bytes", 5, 5)


def test_other_options_or_a_changed_corpus_are_refused(corpora: list[Corpus], noisy: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    for file in files:
        file.write_bytes((noisy / file.name).read_bytes())
    own, folder = [Corpus(path=str(file)) for file in files], tmp_path / "out"
    child = os.fork()
    if child == 0:
        prepare_corpora(own, folder, ALL, progress=lambda *_: os._exit(9))
    os.waitpid(child, 0)
    with pytest.raises(InputError, match="other values of: options") as caught:
        prepare_corpora(own, folder, replace(ALL, near_duplicates=0.9))
    assert "remove the folder" in caught.value.remedy
    before = files[1].read_bytes()
    files[1].write_bytes(before + b"\nx\ty")
    with pytest.raises(InputError, match="other values of: files"):
        prepare_corpora(own, folder, ALL)
    manifest = prepare_corpora(own, tmp_path / "other", ALL)
    assert prepare_corpora(own, tmp_path / "other", ALL) == json.loads(json.dumps(manifest))
    with pytest.raises(InputError, match="another corpus, or other options"):
        prepare_corpora(own[:1], tmp_path / "other", ALL)


def test_after_an_error_before_the_first_part_is_done_the_command_may_have_other_options(tmp_path: Path) -> None:
    """Those that the error asks for."""
    (tmp_path / "in.tsv").write_text("red\trot\nno tab\n", encoding="utf-8")
    corpora, folder = [Corpus(path=str(tmp_path / "in.tsv"))], tmp_path / "out"
    with pytest.raises(InputError, match=r"missing column") as caught:
        prepare_corpora(corpora, folder, replace(ALL, invalid="error"))
    assert "data.invalid=drop" in caught.value.remedy
    with pytest.raises(InputError, match="no profile of the language 'xx'"):
        prepare_corpora(corpora, folder, replace(ALL, languages={"xx": ""}))
    assert prepare_corpora(corpora, folder, ALL)["kept"] == 1


def test_an_error_after_a_part_is_done_keeps_what_is_done(corpora: list[Corpus], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(InputError, match="missing column"):
        prepare_corpora(corpora, folder, replace(ALL, invalid="error", shard_lines=1))
    assert list(folder.rglob("*.done.json"))
    with pytest.raises(InputError, match="other values of: options"):
        prepare_corpora(corpora, folder, ALL)


def test_errors_of_a_part_name_file_and_line(corpora: list[Corpus], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing column") as caught:
        prepare_corpora(corpora, tmp_path / "out", replace(ALL, invalid="error"))
    assert caught.value.where.rpartition(":")[2].isdecimal()


def test_pairs_in_another_language_are_dropped(tmp_path: Path) -> None:
    english = ["the red house of the king", "we are there with the dog", "this is what they have", "she was at home"]
    german = ["das rote Haus des Königs", "wir sind dort mit dem Hund", "das ist was sie haben", "sie war zu Hause"]
    pairs = [(f"{one} {n}", f"{other} {n}") for n in range(20) for one, other in zip(english, german, strict=True)]
    pairs[7] = pairs[7][1], pairs[7][1]  # the source is German
    pairs[11] = pairs[11][0], pairs[11][0]  # the target is English
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{one}\t{other}\n" for one, other in pairs), encoding="utf-8")
    (tmp_path / "en").write_text("\n".join(english), encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(german), encoding="utf-8")
    given = {one: str(tmp_path / one) for one in ("en", "de")}
    for name, languages in {"auto": AUTO, "given": given, "known": dict.fromkeys(given, "")}.items():
        manifest = prepare_corpora([Corpus(path=str(path))], tmp_path / name, PipelineOptions(languages=languages))
        assert manifest["dropped"] == {"language": 2}
        assert manifest["first"]["language"] == f"{path}:8"
    with pytest.raises(InputError, match="pairs of two languages"):
        prepare_corpora([Corpus(path=str(path), language="de")], tmp_path / "tag", PipelineOptions(languages=AUTO))


def test_scores_tokens_and_packed_rows_are_those_of_the_run(
    attention_run: Path, model: transduce.Model, tmp_path: Path
) -> None:
    path, pairs = tmp_path / "pairs.tsv", colour_pairs(60, seed=5)
    path.write_text("".join(f"{one}\t{other}\n" for one, other in pairs))
    options = PipelineOptions(scored_by=str(attention_run), tokenizers=str(attention_run), pack=(12, 13))
    prepare_corpora([Corpus(path=str(path))], tmp_path / "out", options)
    rows, (source, target) = _rows(tmp_path / "out"), Run(attention_run).tokenizers()
    assert [row["source_ids"] for row in rows] == [source.encode(one).ids for one, _ in pairs]
    assert [row["target_ids"] for row in rows] == [target.encode(other).ids for _, other in pairs]
    scores = [one.score / len(one.token_scores) for one in model.score(pairs)]
    assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-4)
    for side, capacity in (("source_ids", 12), ("target_ids", 13)):
        filled: dict[int, int] = {}
        for row in rows:
            filled[row["bin"]] = filled.get(row["bin"], 0) + len(row[side]) + 1
        assert max(filled.values()) <= capacity
    middle = sorted(scores)[30]
    best = prepare_corpora([Corpus(path=str(path))], tmp_path / "best", replace(options, min_score=middle, pack=None))
    assert best["dropped"]["score"] == sum(score < middle for score in scores)


def test_the_command_writes_what_training_reads(command: Command, noisy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files, drops = f"{noisy}/*.tsv", ["--drop-duplicates", "--drop-copies", "--drop-bad-encoding", "--max-ratio", "4"]
    called = command("prepare", files, "data.invalid=drop", "--output", out, "--shard-lines", "50", *drops)
    assert called.code == 0, called.err
    assert "40 dropped: duplicate (first at " in called.out
    corpora = parse({"data": {"train": f"{out}/*.parquet", "columns": ["source", "target"]}}).data.train
    assert len(corpora) == 7
    pairs = [(pair.source, pair.target) for corpus in corpora for pair in read_corpus(corpus)]
    assert pairs == [(row["source"], row["target"]) for row in _rows(out)]
    assert len(recipe_for(f"{out}/*.parquet").data.train) == 7
    refused = command("prepare", files, "--output", tmp_path / "bad", "--pack", "128")
    assert refused.code == 2
    assert "128,128" in refused.err


def test_languages_of_targets_are_a_column(tmp_path: Path) -> None:
    path = tmp_path / "three.tsv"
    path.write_text("a house\tein Haus\tde\na dog\tun chien\tfr\n")
    prepare_corpora([Corpus(path=str(path), language_column="column3")], tmp_path / "out", PipelineOptions())
    rows = _rows(tmp_path / "out")
    assert [(row["source"], row["language"]) for row in rows] == [("a house", "de"), ("a dog", "fr")]
    again = Corpus(
        path=str(tmp_path / "out" / "shard-000000.parquet"), columns=("source", "target"), language_column="language"
    )
    assert [pair.source for pair in read_corpus(again)] == ["<2de> a house", "<2fr> a dog"]


@pytest.mark.parametrize("text", ["fÃ¼r", "schÃ¶n ist es", "donâ€™t", "a\ufffdb", "x\x92y"])
def test_damaged_text_is_found(text: str) -> None:
    assert is_badly_encoded(text)


@pytest.mark.parametrize(
    "text", ["für", "schön", "don’t", "naïve café", "© 2026", "Ärger, Öl", "日本語", "Â", "дом", "20 €"]
)
def test_sound_text_is_not_taken_for_damaged(text: str) -> None:
    assert not is_badly_encoded(text)


@pytest.mark.parametrize("lines", [1, 3, 7, 100])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_parts_of_a_corpus_are_the_corpus(tmp_path: Path, lines: int, end: str) -> None:
    pairs = [(f"Zeile {number}", f"line {number}" if number % 5 else "") for number in range(23)]
    tables = ["source\ttarget\tid", *(f"{one}\t{other}\t7" for one, other in pairs)]
    contents = {
        "a.tsv": tables,
        "a.de": [one for one, _ in pairs],
        "a.en": [other for _, other in pairs],
        "a.jsonl": [json.dumps({"source": one, "target": other}) for one, other in pairs],
    }
    for name, content in contents.items():
        final = end if name != "a.tsv" else ""
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (end.join(content) + final).encode())
    one, two = (Corpus(path=str(tmp_path / name)) for name in ("a.tsv", "a.jsonl"))
    for corpus in (one, two, Corpus(source=str(tmp_path / "a.de"), target=str(tmp_path / "a.en"))):
        parts = split_corpus(corpus, lines)
        assert len(parts) == -(-(len(pairs) + (corpus is one)) // lines)
        found = [pair for part in parts for pair in read_corpus(corpus, "error", None, part)]
        assert found == list(read_corpus(corpus))


def test_parallel_files_of_different_lengths_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    (tmp_path / "a.en").write_text("one\n")
    corpus = Corpus(source=str(tmp_path / "a.de"), target=str(tmp_path / "a.en"))
    with pytest.raises(InputError, match="2 lines"):
        prepare_corpora([corpus], tmp_path / "out", PipelineOptions())


class DiesOnce:
    """Work whose process is killed once in the middle of a task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: int) -> None:
        mark = self.folder / f"killed-{task}"
        if task == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 5 and (self.folder / "refuse").exists():
            raise InputError("a bad line", where="file:5", remedy="correct it")
        sharded_work.mark_done(self.folder, task, {"task": task})


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_errors_come_back(tmp_path: Path) -> None:
    sharded_work.run_tasks(DiesOnce(tmp_path), range(8), workers=2)
    assert (tmp_path / "killed-3").exists()
    assert sharded_work.unfinished(tmp_path, range(8)) == []
    assert [record["task"] for record in sharded_work.records(tmp_path, range(8))] == list(range(8))
    (tmp_path / "refuse").touch()
    with pytest.raises(InputError, match="a bad line") as caught:
        sharded_work.run_tasks(DiesOnce(tmp_path), range(8), workers=2)
    assert (caught.value.where, caught.value.remedy) == ("file:5", "correct it")
    record("worker process killed", "replaced, every shard done", 1, 1)


def test_two_commands_do_not_work_in_one_folder(tmp_path: Path) -> None:
    folder, settings = tmp_path / "work", {"lines": 3}
    with sharded_work.work_folder(folder, settings):
        with (
            pytest.raises(InputError, match=f"process {os.getpid()} on .* works in this folder"),
            sharded_work.work_folder(folder, settings),
        ):
            raise AssertionError("both work")
        assert json.loads((folder / "settings.json").read_text()) == settings  # the refused one removed nothing
    with sharded_work.work_folder(folder, settings):  # which continues
        pass
    with pytest.raises(InputError, match="bad line"), sharded_work.work_folder(folder, settings):
        raise InputError("bad line")
    assert not folder.exists()
