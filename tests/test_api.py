"""The Python interface: any iterable is read, values say what they are, and the commands are functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import colour_pairs

import transduce
from transduce.errors import InputError

LINES = ["red green", "", "blue", "green blue red"]
SETTINGS = {
    "training.steps": 4,
    "training.batch_tokens": 512,
    "training.validate_every": 4,
    "training.checkpoint_every": 4,
    "model.encoder.width": 16,
    "model.decoder.width": 16,
    "evaluation.resamples": 10,
    "data.dev_size": 8,
}
KINDS: dict[str, Callable[[list[Any]], Iterable[Any]]] = {
    "tuple": tuple,
    "generator": lambda items: (item for item in items),
    "iterator": iter,
    "keys": lambda items: dict.fromkeys(items).keys(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_iterable_gives_what_a_list_gives(model: transduce.Model, kind: str) -> None:
    of = KINDS[kind]
    assert model.generate(of(LINES)) == model.generate(LINES)
    assert model.generate(of(LINES), prefixes=of(["A", "", "B", "C"])) == model.generate(
        LINES, prefixes=["A", "", "B", "C"]
    )
    assert (model.embed(of(LINES[2:])) == model.embed(LINES[2:])).all()
    pairs = [("red", "RED"), ("blue", "BLUE")]
    assert model.score(of(pairs)) == model.score(pairs)
    assert [one.score for one in model.explain_pairs(of(pairs))] == [one.score for one in model.explain_pairs(pairs)]


def test_an_open_file_is_read_line_by_line(model: transduce.Model, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES))
    with (tmp_path / "in.txt").open() as stream:
        assert [one.source for one in model.generate(stream)] == LINES
    with (tmp_path / "in.txt").open() as stream:
        assert list(model.stream(stream)) == model.generate(LINES)


def test_a_stream_reads_no_more_than_it_needs(model: transduce.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.data.readers.windows.LINES", 2)
    monkeypatch.setattr("transduce.data.readers.windows.in_windows.__kwdefaults__", {"size": 2, "ready": lambda: True})
    read = []

    def lines() -> Iterable[str]:
        for line in LINES * 10:
            read.append(line)
            yield line

    found = model.stream(lines(), strategy={"kind": "sample"})
    assert next(iter(found)).source == LINES[0]
    assert len(read) == 2
    sampled = model.generate(LINES * 10, strategy={"kind": "sample"})
    assert [one.text for one in found] == [one.text for one in sampled[1:]]


@pytest.mark.parametrize("method", ["generate", "embed", "score", "explain_pairs", "stream", "explain"])
@pytest.mark.parametrize("wrong", ["red", 3, [3], [("a",)], [("a", 3)], None])
def test_wrong_arguments_are_explained(model: transduce.Model, method: str, wrong: Any) -> None:
    if (method, wrong) == ("explain", "red"):
        return
    with pytest.raises((InputError, TypeError)) as caught:
        list(getattr(model, method)(wrong))
    assert isinstance(caught.value, InputError)
    assert caught.value.remedy


def test_values_say_what_they_are(model: transduce.Model) -> None:
    (out,) = model.generate(["red green"])
    assert str(out) == f"{out}" == out.text
    assert repr(model).startswith("<Model recurrent -> recurrent, ")
    assert f"{model.parameters:,} parameters" in repr(model)
    assert "srcdoc=" in out._repr_html_()
    assert "red green" in model.explain("red green")._repr_html_()
    assert model.generate([""])[0]._repr_html_() == "<p></p>"


def test_public_names_are_listed_and_found() -> None:
    assert {"train", "load", "evaluate", "compare", "plan", "export", "align", "__version__"} <= set(dir(transduce))
    for name in transduce.__all__:
        assert getattr(transduce, name).__doc__


def test_pairs_in_memory_are_trained_on_and_evaluated(tmp_path: Path) -> None:
    pairs = [*colour_pairs(60), ("with a\ttab\nand lines", "x")]
    trained = transduce.train(iter(pairs), tmp_path / "run", settings=SETTINGS)
    stored = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(one["source"], one["target"]) for one in stored] == pairs
    assert trained.model.recipe.training.steps == 4
    test = tmp_path / "test.tsv"
    test.write_text("red\tRED\n")
    assert (
        transduce.evaluate(trained.model, str(test)).to_json()
        == transduce.evaluate(tmp_path / "run", str(test)).to_json()
    )
    assert transduce.plan(tmp_path / "run.jsonl", settings={"training.steps": 7}).recipe.training.steps == 7
    for wrong in ([], [("a",)], "nothing.tsv"):
        with pytest.raises(InputError):
            transduce.train(wrong, tmp_path / "other")
