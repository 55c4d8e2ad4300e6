"""Streams and long input: lines of a pipe are answered as they come; truncation and refusals are reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import Command, colour_pairs

import transduce
from transduce.inference.long_sources import CHARACTERS_PER_TOKEN
from transduce.modalities.source_encoding import TextSourceEncoding

SAMPLED = ("--sample", "--set", "temperature=2.0", "--set", "max_length=8")


def test_an_open_pipe_is_answered_as_lines_come(command: Command, bottleneck_run: Path) -> None:
    """The next line is written when the last one is answered: a command that waits for more would wait for ever."""
    lines = [source for source, _ in colour_pairs(6, seed=3)]
    line = [sys.executable, "-m", "transduce", "generate", str(bottleneck_run), *SAMPLED]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for text in lines[:4]:
            process.stdin.write(f"{text}\n")
            answers.append(process.stdout.readline())
        process.stdin.write("".join(f"{text}\n" for text in lines[4:]))
        process.stdin.close()
        answers += process.stdout.readlines()
    whole = command("generate", bottleneck_run, *SAMPLED, stdin="".join(f"{text}\n" for text in lines).encode())
    assert "".join(answers) == whole.out
    assert len(set(answers)) > 1


def test_samples_do_not_depend_on_windows(model: transduce.Model) -> None:
    texts = [source for source, _ in colour_pairs(5, seed=9)]
    chosen = {"strategy": "sample", "temperature": 3.0, "max_length": 6}
    whole = [one.text for one in model.generate(texts, **chosen)]
    parts = [model.generate(texts[at : at + 2], first_number=at, **chosen) for at in (0, 2, 4)]
    assert [one.text for part in parts for one in part] == whole
    assert [model.generate([text], **chosen)[0].text for text in texts] != whole  # they are drawn by number


@pytest.fixture(scope="module")
def long_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("long")
    contents = {"source": "red " * 300 + "\tRED", "target": "red\t" + "RED " * 299 + "RED"}
    for name, content in contents.items():
        (folder / name).write_text(f"red blue\tBLUE RED\n{content}\ngreen\tGREEN\n")
    return {name: folder / name for name in contents}


@pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
def test_long_sources_are_cut_with_a_warning(
    command: Command, run: str, long_pairs: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(run)
    for name in ("score", "evaluate --set long_sources=truncate", "align", "similarity", "embed --tsv"):
        called = command(*name.split()[:1], folder, long_pairs["source"], *name.split()[1:])
        assert called.code == 0, (name, called.err)
        assert "1 texts were cut to 40 tokens (`max_source_length`), the first: 'red red" in called.err, name
        if not name.startswith("evaluate"):
            assert len(called.out.splitlines()) == 3


@pytest.mark.parametrize("name", ["score", "align"])
def test_long_targets_are_refused_with_their_line(
    command: Command, attention_run: Path, long_pairs: dict[str, Path], name: str
) -> None:
    called = command(name, attention_run, long_pairs["target"])
    assert called.code == 2
    assert f"{long_pairs['target']}:2: a target of 300 tokens, and at most 60 tokens are scored" in called.err
    assert "Traceback" not in called.err
    huge = long_pairs["target"].with_name("huge")
    huge.write_text("red\tRED\nred\t" + "RED " * 3000 + "\n")
    assert f"{huge}:2: a target of 12,000 characters" in command(name, attention_run, huge).err


def test_the_limit_of_scores_is_a_setting(command: Command, attention_run: Path, long_pairs: dict[str, Path]) -> None:
    called = command("score", attention_run, long_pairs["target"], "--set", "max_source_length=300")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 3


def test_a_long_line_is_cut_where_its_tokens_are(model: transduce.Model) -> None:
    """Characters that are not tokenised change nothing."""
    short, long = ("red blue " * count for count in (100, 100_000))
    first, second = model.generate([short, long], long_sources="truncate")
    assert first.source_cut
    assert second.source_cut
    assert (first.text, first.token_scores) == (second.text, second.token_scores)


def test_lines_of_a_million_characters_are_cut_before_they_are_tokenised(
    command: Command, attention_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of 40 of them took 3.7 GB."""
    (tmp_path / "long.txt").write_text(("red blue g " * 100_000 + "\n") * 40)
    lengths: list[int] = []
    encode = TextSourceEncoding.encode

    def counted(encoding: TextSourceEncoding, texts: Sequence[str]) -> Any:
        lengths.extend(map(len, texts))
        return encode(encoding, texts)

    monkeypatch.setattr(TextSourceEncoding, "encode", counted)
    called = command("generate", attention_run, tmp_path / "long.txt", "--set", "long_sources=truncate")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 40
    assert 0 < max(lengths) <= transduce.load(attention_run).max_source_tokens() * CHARACTERS_PER_TOKEN
