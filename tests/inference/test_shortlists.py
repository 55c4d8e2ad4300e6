"""Shortlists: estimation, files, the command, Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fixtures import Command
from safetensors.torch import load_file, save_file

import transduce
from transduce.data.prepare import train_store
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.inference.shortlist import Shortlist, make_shortlist, translate

LINES = ["red blue green", "blue", "green red", "", "nobody knows this", "white white black"]


@pytest.fixture(scope="module")
def few(attention_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from run_fixtures import call

    path = tmp_path_factory.mktemp("shortlist") / "few.safetensors"
    done = call("shortlist", attention_run, path, "--per-token", "1", "--frequent", "0")
    assert done.code == 0, done.err
    return path


def test_each_colour_has_its_translation(model: transduce.Model, few: Path) -> None:
    made = Shortlist.load(few)
    for colour in ("red", "green", "blue", "black", "white"):
        (number,) = model.source.encode(colour).ids
        (best,) = made.likeliest[number].tolist()
        assert model.target.piece(best) == colour.upper()
    assert made.always.tolist() == list(range(len(SPECIALS)))


def test_a_trained_model_says_the_same_from_a_list(model: transduce.Model, few: Path) -> None:
    made = Shortlist.load(few)
    plain = [one.text for one in model.generate(LINES[:4])]
    assert plain[0] == "GREEN BLUE RED"
    assert [one.text for one in model.generate(LINES[:4], shortlist=made)] == plain
    assert [one.text for one in model.generate(LINES[:4], shortlist=made, workers=2)] == plain


def test_unknown_words_and_neighbours(model: transduce.Model, few: Path) -> None:
    """A source of unknown words leaves the tokens that every line may use, and no line hears of another's list."""
    made = Shortlist.load(few)
    together = model.generate(LINES, shortlist=made, strategy="beam", beam=3)
    for line, one in zip(LINES, together, strict=True):
        (alone,) = model.generate([line], shortlist=made, strategy="beam", beam=3)
        assert alone.text == one.text
        assert alone.score == pytest.approx(one.score, abs=1e-4)
    assert set(together[4].tokens) <= set(SPECIALS)
    assert together[3].text == ""


def test_whole_vocabulary_prefixes_and_rules(model: transduce.Model) -> None:
    prints = model.source.fingerprint, model.target.fingerprint
    size = model.target.size
    every = Shortlist(
        torch.zeros(model.source.size, 1, dtype=torch.int32), torch.arange(size, dtype=torch.int32), size, prints
    )
    none = Shortlist(every.likeliest, every.always[:4], size, prints)
    green = model.target.encode("GREEN").ids[0]
    choices: list[dict[str, Any]] = [
        {},
        {"suppress": (green,)},
        {"forced_bos": green},
        {"forced_prefix": (green,)},
        {"suppress_first": (green,)},
        {"nbest": 3},
        {"strategy": "sample", "seed": 4},
        {"no_repeat_ngram": 1},
    ]
    for settings in choices:
        plain, listed = (model.generate(LINES, shortlist=one, **settings) for one in (None, every))
        assert [one.tokens for one in plain] == [one.tokens for one in listed]
        assert [one.token_scores for one in listed] == [pytest.approx(one.token_scores, abs=1e-4) for one in plain]
    # What a line is given to say, it says, though it is on no list.
    prefixed = model.generate(["red"], shortlist=none, prefixes=["GREEN BLACK"])[0]
    assert prefixed.text.startswith("GREEN BLACK")
    assert model.generate(["red"], shortlist=none, forced_bos=green)[0].tokens[0] == "GREEN"
    assert model.generate(["red blue"], shortlist=every)[0].attention is not None


def test_shortlist_command(attention_run: Path, few: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES[:4]) + "\n")
    plain = command("generate", attention_run, tmp_path / "lines.txt")
    listed = command("generate", attention_run, tmp_path / "lines.txt", "--shortlist", few, "--precision", "int8")
    assert listed.code == plain.code == 0
    assert listed.out == plain.out


def test_unsupported_searches_are_refused(
    model: transduce.Model, transformer_run: Path, bottleneck_run: Path, few: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="other tokens"):
        transduce.load(transformer_run).generate(["red"], shortlist=Shortlist.load(few))
    with pytest.raises(InputError, match="speculative decoding"):
        model.generate(["red"], shortlist=Shortlist.load(few), draft=transduce.load(bottleneck_run), strategy="greedy")
    with pytest.raises(InputError, match="no such shortlist"):
        Shortlist.load(tmp_path / "none")
    (tmp_path / "text").write_text("not a list")
    with pytest.raises(InputError, match="not a shortlist"):
        Shortlist.load(tmp_path / "text")


@pytest.mark.parametrize("damage", ["beyond", "negative", "kind", "axes", "missing", "unmarked", "specials"])
def test_a_bad_file_is_told(few: Path, tmp_path: Path, damage: str) -> None:
    made, tensors = Shortlist.load(few), load_file(few)
    metadata = {"format": "transduce shortlist 1", "size": str(made.size), "source": "a", "target": "b"}
    if damage in ("beyond", "negative"):
        tensors["likeliest"][0, 0] = made.size if damage == "beyond" else -1
    elif damage == "kind":
        tensors["always"] = tensors["always"].float()
    elif damage == "axes":
        tensors["always"] = tensors["always"][None]
    elif damage == "missing":
        del tensors["always"]
    elif damage == "unmarked":
        metadata = {"size": "9"}
    else:
        tensors["always"] = tensors["always"][1:].clone()
    save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(InputError, match="not a shortlist"):
        Shortlist.load(tmp_path / "bad")


def test_translations_are_those_of_the_plain_loop(model: transduce.Model) -> None:
    """IBM model 1 word by word, in dictionaries."""
    store = train_store(model.recipe, (model.source, model.target))
    rows, rounds = np.arange(0, 40), 3
    pairs = [([1, *source], target) for source, target in map(store.ids, rows.tolist())]
    probabilities: dict[tuple[int, int], float] = {
        (s, t): 1.0 for source, target in pairs for s in source for t in target
    }
    for _ in range(rounds):
        counts: Counter[tuple[int, int]] = Counter()
        for source, target in pairs:
            for t in target:
                total = sum(probabilities[s, t] for s in source)
                for s in source:
                    counts[s, t] += probabilities[s, t] / total  # type: ignore[assignment]
        sums: Counter[int] = Counter()
        for (s, _), count in counts.items():
            sums[s] += count
        probabilities = {pair: count / sums[pair[0]] for pair, count in counts.items()}
    found = translate(store, rows, model.target.size, rounds)
    table = dict(
        zip(zip(found.sources.tolist(), found.targets.tolist(), strict=True), found.probabilities, strict=True)
    )
    assert table == pytest.approx(probabilities)


def test_stretches_change_nothing(model: transduce.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokenizers = train_store(model.recipe, (model.source, model.target)), (model.source, model.target)
    whole = make_shortlist(store, tokenizers, likeliest=3)
    monkeypatch.setattr("transduce.inference.shortlist.LINKS", 50)
    parts = make_shortlist(store, tokenizers, likeliest=3)
    assert torch.equal(whole.likeliest, parts.likeliest)
    fewer = make_shortlist(store, tokenizers, likeliest=1, frequent=2, lines=30)
    assert fewer.likeliest.shape == (model.source.size, 1)
    assert len(fewer.always) == len(SPECIALS) + 2
