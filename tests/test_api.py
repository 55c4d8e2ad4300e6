"""The Python interface: any iterable is read, values say what they are, and the commands are functions."""

from __future__ import annotations

import json
import re
import runpy
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
    monkeypatch.setattr("transduce.data.readers.corpus.WINDOW_LINES", 2)
    monkeypatch.setattr("transduce.data.readers.corpus.in_windows.__kwdefaults__", {"size": 2, "ready": lambda: True})
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


def test_text_representations_of_results(model: transduce.Model) -> None:
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


WRONG = (5, None, [], {}, print, [3], ("a", "b", "c"))


@pytest.mark.parametrize("name", ["train", "plan", "evaluate", "load", "compare", "export", "align"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_public_functions_refuse_wrong_arguments_with_a_message(
    name: str, wrong: Any, model: transduce.Model, tmp_path: Path
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: transduce.train(wrong, tmp_path / "run"),
        "plan": lambda: transduce.plan(wrong),
        "evaluate": lambda: transduce.evaluate(wrong),
        "load": lambda: transduce.load(wrong),
        "compare": lambda: transduce.compare(wrong, folder=tmp_path),
        "export": lambda: transduce.export(wrong, tmp_path / "out", "onnx"),
        "align": lambda: transduce.align(wrong, [("a", "b")]),
    }
    with pytest.raises(InputError) as caught:
        calls[name]()
    assert caught.value.problem


def test_options_of_train_are_checked(tmp_path: Path) -> None:
    pairs = [("a", "b")] * 3
    for options in ({"settings": 3}, {"callbacks": [print]}, {"callbacks": transduce.Callback()}):
        with pytest.raises(InputError) as caught:
            transduce.train(pairs, tmp_path / "run", **options)
        assert caught.value.remedy
    with pytest.raises(InputError, match="is no path"):
        transduce.train(pairs, 5)  # type: ignore[arg-type]


class EventRecorder(transduce.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def start(self, step: int, steps: int, validated: int) -> None:
        self.events.append(("start", steps))

    def advance(self, step: int) -> None:
        self.events.append(("advance", step))

    def validation(self, step: int, scores: Any) -> None:
        self.events.append(("validation", step))
        assert "loss" in scores

    def close(self) -> None:
        self.events.append(("close", 0))


def test_callbacks_get_every_update_and_validation(tmp_path: Path) -> None:
    recorder = EventRecorder()
    transduce.train(colour_pairs(60), tmp_path / "run", settings=SETTINGS, callbacks=[recorder])
    updates = [("advance", step) for step in range(1, 5)]
    assert recorder.events == [("start", 4), *updates, ("validation", 4), ("close", 0)]


def test_an_estimator_fits_and_predicts(tmp_path: Path) -> None:
    sources, targets = zip(*colour_pairs(60), strict=True)
    estimator = transduce.TransduceEstimator(settings=SETTINGS)
    with pytest.raises(InputError, match="not fitted"):
        estimator.predict(["red"])
    assert estimator.fit(sources, targets) is estimator
    found = estimator.predict(iter(sources[:3]))
    assert list(found) == [one.text for one in estimator.model_.generate(sources[:3])]
    assert 0 <= estimator.score(sources[:3], targets[:3]) <= 1
    for wrong in ((sources, targets[:3]), ("red", targets), ([3], ["a"])):
        with pytest.raises(InputError):
            transduce.TransduceEstimator().fit(*wrong)
    with pytest.raises(InputError, match="did you mean 'minutes'"):
        estimator.set_params(minute=3)
    assert estimator.set_params(minutes=3).get_params()["minutes"] == 3
    assert repr(transduce.TransduceEstimator(task="classify")) == "TransduceEstimator(task='classify')"


def test_scikit_learn_clones_an_estimator_and_cross_validates_it(
    model: transduce.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed: transduce[map]")
    selection = pytest.importorskip("sklearn.model_selection")
    estimator = transduce.TransduceEstimator(task="generate", settings=SETTINGS)
    copy = base.clone(estimator)
    assert copy is not estimator
    assert copy.get_params() == estimator.get_params()
    assert base.is_classifier(transduce.TransduceEstimator(task="classify"))

    def fit(self: Any, sources: Any, targets: Any) -> Any:  # with a trained model: training is tested above
        assert len(sources) == len(targets) == 10
        self.model_ = model
        return self

    monkeypatch.setattr(transduce.TransduceEstimator, "fit", fit)
    sources, targets = zip(*colour_pairs(20), strict=True)
    scores = selection.cross_val_score(estimator, list(sources), list(targets), cv=2)
    assert scores.min() > 0.5


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_network_of_a_recipe_trains_in_a_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(60)))
    main = runpy.run_path(str(EXAMPLES / "pytorch_loop.py"))["main"]
    main(str(pairs), str(tmp_path / "run"), epochs=2, settings=SETTINGS)
    events = capsys.readouterr().out
    losses = [float(one) for one in re.findall(r"loss (\S+)", events)]
    assert losses[1] < losses[0]
    assert transduce.load(tmp_path / "run").recipe.training.steps == 4


def test_the_forward_pass_is_that_of_training(tmp_path: Path) -> None:
    from transduce.api import build

    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(60)))
    built = build(pairs, settings=SETTINGS)
    batch = next(built.batches())
    step = built.model(batch, with_attention=True)
    assert step.logits.shape == (*batch.labels.values.shape, built.target.size)
    rows = [row for epoch_batch in built.batches(1) for row in epoch_batch.rows]
    assert sorted(rows) == sorted(row for epoch_batch in built.batches() for row in epoch_batch.rows)
    with pytest.raises(InputError, match="data file or a recipe"):
        build([("a", "b")])


@pytest.mark.slow
def test_the_network_of_a_recipe_trains_in_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning", reason="the example needs Lightning: pip install lightning")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(60)))
    main = runpy.run_path(str(EXAMPLES / "lightning_loop.py"))["main"]
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    main(str(pairs), str(tmp_path / "run"), epochs=2, settings=SETTINGS, **quiet)
    assert "->" in capsys.readouterr().out
    assert transduce.load(tmp_path / "run").generate(["red"])
