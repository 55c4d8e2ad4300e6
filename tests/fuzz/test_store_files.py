"""Damaged files of the data cache: an error, or the data of the intact cache."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

from fuzzing import Outcome, fuzz, mutate_bytes

from transduce.data.filters import Filters
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.recipe import Corpus

PAIRS = [(f"wort {number} ä", f"word {number % 7} 😀") for number in range(60)]
WORDS = Tokenizer.train([side for pair in PAIRS for side in pair], "words", 500)


def test_store(tmp_path: Path) -> None:
    corpus = Corpus(path=str(tmp_path / "pairs.tsv"))
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\tmore\n" for source, target in PAIRS))

    def contents(folder: Path) -> list[object]:
        store = build_store([corpus], WORDS, WORDS, Filters(), "error", folder)
        rows = range(len(store))
        return [*[(store.ids(row), store.example(row)) for row in rows], store.groups().tolist(), store.describe()]

    expected = contents(tmp_path / "intact")

    def attempt(draw: random.Random) -> Outcome:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "intact", folder)
        file = draw.choice([one for one in sorted(folder.rglob("*")) if one.is_file()])
        file.write_bytes(mutate_bytes(draw, file.read_bytes()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cache that is built again is announced
            found = contents(folder)
        assert found == expected, file.name
        return "equal"

    fuzz("data cache", "token ids, texts and tables of the data cache", attempt, cases=20)
