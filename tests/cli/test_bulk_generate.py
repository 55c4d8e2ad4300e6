"""Bulk generation: shards give the outputs of the whole file, exactly once, after any kill."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fault_records import record
from run_fixtures import Command, call, colour_pairs

from transduce.cli import bulk_generate

LINES = [source for source, _ in colour_pairs(47, seed=3)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sources.txt"
    path.write_text("".join(f"{line}\n" for line in [*LINES[:20], "", *LINES[20:]]))
    return path


@pytest.mark.parametrize(
    "options",
    [[], ["--sample"], ["--nbest", "2", "--beam", "3"], ["--json"], ["--pairs"]],
    ids=lambda one: "".join(one[:1]),
)
def test_shards_give_the_outputs_of_the_whole_file(
    command: Command, attention_run: Path, text: Path, tmp_path: Path, options: list[str]
) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    assert command("generate", attention_run, text, "--output", whole, *options).code == 0
    bulk = ["--backend", "local", "--shard-lines", "10"]
    called = command("generate", attention_run, text, "--output", sharded, *bulk, *options)
    assert called.code == 0, called.err
    assert "shards: 5 of 5" in called.err
    assert _texts(sharded) == _texts(whole)
    assert not sharded.with_name("sharded.parts").exists()


def _texts(path: Path) -> list[Any]:
    """The lines, without scores, whose last digits depend on the batch."""
    lines = path.read_text().splitlines()
    return [json.loads(line)["text"] if line.startswith("{") else line.split(" ||| ")[:2] for line in lines]


def test_files_by_pattern_are_written_by_shard_with_a_manifest(
    command: Command, attention_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "a-1.txt").write_text("\n".join(LINES[:15]))
    (tmp_path / "a-2.txt.gz").write_bytes(gzip.compress("\n".join(LINES[15:]).encode()))
    bulk = ["--backend", "local", "--shard-lines", "10", "--by-shard", "--pairs"]
    called = command("generate", attention_run, f"{tmp_path}/a-*", "--output", tmp_path / "out", *bulk)
    assert called.code == 0, called.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert [shard["lines"] for shard in manifest["shards"]] == [10, 5, 32]
    assert manifest["lines"] == 47
    contents = [(tmp_path / "out" / shard["file"]).read_bytes() for shard in manifest["shards"]]
    assert [shard["sha256"] for shard in manifest["shards"]] == [hashlib.sha256(one).hexdigest() for one in contents]
    assert [line.partition("\t")[0] for line in b"".join(contents).decode().splitlines()] == LINES
    again = command("generate", attention_run, f"{tmp_path}/a-*", "--output", tmp_path / "out", *bulk)
    assert again.code == 2
    assert "this folder is complete" in again.err


def test_a_killed_command_continues_and_does_no_shard_twice(
    attention_run: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, marked = bulk_generate.mark_done, list[int]()
    arguments = ["generate", attention_run, text, "--backend", "local", "--shard-lines", "10", "--output"]

    def counted(folder: Path, task: int, content: Any) -> None:
        mark(folder, task, content)
        marked.append(task)

    def killed(folder: Path, task: int, content: Any) -> None:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        mark(folder, task, content)

    assert call(*arguments, tmp_path / "whole").code == 0
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(bulk_generate, "mark_done", killed)
        call(*arguments, tmp_path / "out")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(bulk_generate, "mark_done", counted)
    other = call(*arguments, tmp_path / "out", "--beam", "2")
    assert other.code == 2
    assert "other values of: options" in other.err
    assert call(*arguments, tmp_path / "out").code == 0
    assert marked == [3, 4]
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    record("driver of a bulk generation killed", "continued, no shard done twice, same bytes", 1, 1)


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(command: Command, attention_run: Path, text: Path, tmp_path: Path) -> None:
    bulk = ["--backend", "local", "--shard-lines", "10"]
    for workers in ("1", "2"):
        called = command("generate", attention_run, text, "--output", tmp_path / workers, *bulk, "--workers", workers)
        assert called.code == 0, called.err
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_errors_name_the_line_of_the_input(command: Command, attention_run: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in LINES]
    lines[33] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    bulk = ["--backend", "local", "--shard-lines", "10", "--output", tmp_path / "out"]
    called = command("generate", attention_run, tmp_path / "in.jsonl", "--json-input", *bulk)
    assert called.code == 2
    assert f"{tmp_path / 'in.jsonl'}:34" in called.err
    (tmp_path / "bad.txt").write_bytes(b"red\n" * 12 + b"\xff\n")
    called = command("generate", attention_run, tmp_path / "bad.txt", *bulk[:-1], tmp_path / "bad")
    assert f"{tmp_path / 'bad.txt'}:13: invalid UTF-8" in called.err


def test_after_an_error_before_the_first_shard_is_done_the_command_may_have_other_options(
    command: Command, attention_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"red \xff\nblue\n")
    bulk = ["--backend", "local", "--output", tmp_path / "out"]
    assert "in.txt:1: invalid UTF-8" in command("generate", attention_run, tmp_path / "in.txt", *bulk).err
    (tmp_path / "in.txt").write_bytes(b"red\nblue\n")
    called = command("generate", attention_run, tmp_path / "in.txt", "--beam", "2", *bulk)
    assert called.code == 0, called.err


def test_a_folder_with_files_of_somebody_else_is_left_alone(
    command: Command, attention_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"red \xff\n")
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "notes.txt").write_text("mine")
    called = command("generate", attention_run, tmp_path / "in.txt", "--backend", "local", "--output", tmp_path / "out")
    assert called.code == 2
    assert f"{tmp_path / 'out.parts'}: this folder has other files" in called.err
    assert (tmp_path / "out.parts" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-"], "write standard input to a file"),
        (["TEXT", "--stream", "--output", "x"], "leave out --unconditional"),
        (["TEXT"], "give --output"),
        (["TEXT", "--output", "x", "--backend", "moon"], "unknown backend 'moon'"),
    ],
)
def test_what_has_no_shards_is_refused(
    command: Command, attention_run: Path, text: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    given = [str(text) if one == "TEXT" else str(tmp_path / one) if one == "x" else one for one in options]
    called = command("generate", attention_run, "--backend", "local", *given)
    assert called.code == 2
    assert message in called.err
