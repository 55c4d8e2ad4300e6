"""The whole line in small: pairs, three trained runs, and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from line_standins import RECURRENT, TRANSFORMER, Command, call, colour_pairs, settings

import transduce


@pytest.fixture(scope="session")
def command() -> Command:
    return call


@pytest.fixture(scope="session", autouse=True)
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for all of it; nothing is kept in the user's own cache."""
    folder = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patched.setenv("COLUMNS", "200")
        yield folder


@pytest.fixture(scope="session")
def pairs(bench: Path) -> Path:
    path = bench / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def attention_run(bench: Path, pairs: Path) -> Path:
    """Two recurrent networks with attention over words, trained until they know the task."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "reader": "luong"}}
    transduce.train(settings(pairs, model, "words", steps=200), bench / "attention")
    return bench / "attention"


@pytest.fixture(scope="session")
def transformer_run(bench: Path, pairs: Path) -> Path:
    """A Transformer over characters whose positions end at 48."""
    model = {"encoder": TRANSFORMER, "decoder": TRANSFORMER}
    transduce.train(settings(pairs, model, "chars", steps=40), bench / "transformer")
    return bench / "transformer"


@pytest.fixture(scope="session")
def bottleneck_run(bench: Path, pairs: Path) -> Path:
    """No attention: all the decoder knows came through one vector."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "reader": "start"}}
    transduce.train(settings(pairs, model, "words", steps=20), bench / "bottleneck")
    return bench / "bottleneck"


@pytest.fixture(scope="session")
def model(attention_run: Path) -> transduce.Model:
    return transduce.load(attention_run)
