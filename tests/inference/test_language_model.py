"""Language models through the whole line: text without a source is trained on, scored, continued and explained."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fixtures import RECURRENT, call

import transduce
from transduce.autoconfig import recipe_for
from transduce.contracts import ScoredText
from transduce.data.readers.corpus import text_chunks
from transduce.data.tokenizers.tokenizer import count_text
from transduce.errors import InputError
from transduce.evaluation.comparison import compare
from transduce.evaluation.evaluate import SystemOutput, evaluate, find_metric
from transduce.evaluation.held_out import load_held_out, predict
from transduce.flow import BOS, EOS, Example
from transduce.inference import Model
from transduce.training.experiment import TrainingResult, train
from transduce.training.resolve import resolve

TRANSFORMER = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "ff_width": 16, "dropout": 0.0}
LEARNED = {**TRANSFORMER, "position": {"kind": "learned", "max_positions": 24}}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = random.Random(1), tmp_path_factory.mktemp("book") / "book.txt"
    words = ["the", "cat", "sat", "on", "a", "red", "mat"]
    lines = [" ".join(draw.choice(words) for _ in range(draw.randint(1, 6))) for _ in range(300)]
    path.write_text("\n".join(line if number % 20 else "" for number, line in enumerate(lines)) + "\n")
    return path


def recipe(book: Path, decoder: dict[str, Any], block_size: int | None = 24, **training: Any) -> dict[str, Any]:
    return {
        "data": {"train": str(book), "format": "text", "block_size": block_size, "cache": str(book.parent / "cache")},
        "tokens": {"target": {"kind": "chars" if block_size else "words"}},
        "model": {"decoder": decoder},
        "training": {
            "steps": 20,
            "batch_tokens": 512,
            "validate_every": 10,
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"kind": "constant", "warmup": 0},
            **training,
        },
        "generation": {"strategy": "sample", "beam": 1, "max_length": 20},
        "evaluation": {"resamples": 20},
    }


@pytest.fixture(scope="module")
def trained(book: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingResult]:
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "running": recipe(book, RECURRENT, objective={"kind": "tbptt", "window": 5}),
        "limited": recipe(book, LEARNED),
        "lines": recipe(book, TRANSFORMER, None),
    }
    return {name: train(one, folder / name) for name, one in made.items()}


def log_p(model: Model, ids: list[int]) -> np.ndarray:
    """Straight from the logits: log p of every id after the first."""
    logits = model.logits(target=torch.tensor([ids[:-1]])).log_softmax(-1)[0]
    return logits.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).double().numpy()


def test_training_scores_by_probability_alone(trained: dict[str, TrainingResult]) -> None:
    for name, one in trained.items():
        scores = one.scores["dev"].scores
        assert list(scores) == ["perplexity", "word_perplexity", "bits_per_character"]
        assert scores["perplexity"].value < one.model.target.size, name
        assert one.scores["dev"].by_length == {}
        assert one.examples == ()
        assert one.model.source is one.model.target


@pytest.mark.parametrize("name", ["running", "limited", "lines"])
def test_outputs_continue_their_prompt(name: str, trained: dict[str, TrainingResult]) -> None:
    model = transduce.load(trained[name].run.folder)
    beginnings = ["the cat", "", "the Ω", "a"]
    found = model.generate(beginnings)
    assert len(found) == 4
    for prefix, one in zip(beginnings, found, strict=True):
        assert one.text.startswith(prefix)
        assert one.tokens
        if prefix == "the cat":
            scored = log_p(model, [BOS, *one.decoded.hypothesis.ids])  # type: ignore[union-attr]
            np.testing.assert_allclose(one.token_scores, scored, atol=1e-4)
    assert len({one.text for one in model.generate([""] * 8)}) > 1  # every line is drawn by itself
    assert [one.text for one in model.generate(beginnings)] == [one.text for one in found]
    with pytest.raises(InputError, match="prefixes"):
        model.generate(["a"], prefixes=["b"])


def test_a_beginning_longer_than_the_reach_is_cut_and_kept(trained: dict[str, TrainingResult]) -> None:
    model, text = trained["limited"].model, "the cat sat on a mat and on a red cat too"
    (one,) = model.generate([text])
    assert one.source_cut
    assert one.text.startswith(text)
    assert len(one.tokens) == 24


def test_scores_of_lines_are_their_log_probabilities(trained: dict[str, TrainingResult], book: Path) -> None:
    model = trained["lines"].model
    texts = ["the cat sat", "", "a"]
    found = model.score([("", text) for text in texts])
    for text, one in zip(texts, found, strict=True):
        ids = [BOS, *model.target.encode(text).ids, EOS]
        np.testing.assert_allclose(one.token_scores, log_p(model, ids), atol=1e-4)
    called = call("score", trained["lines"].run.folder, book)
    assert called.code == 0
    assert len(called.out.splitlines()) == 300  # blank lines too
    assert "300 lines, perplexity" in called.err
    assert "per word" in called.err
    assert "per character" in called.err


@pytest.mark.parametrize("name", ["running", "limited"])
def test_running_text_is_scored_in_one_or_in_passages(
    name: str, trained: dict[str, TrainingResult], book: Path
) -> None:
    model = trained[name].model
    parts = [one.target or "" for one in text_chunks(Example("", line) for line in book.read_text().split("\n")[:60])]
    text = count_text(model.target, parts)
    found = model.score_running(parts)
    count, ids = len(text.ids) - 1, text.ids.tolist()
    assert [one.tokens for one in found] == [min(24, count - begin) for begin in range(0, count, 24)]
    assert sum(one.characters for one in found) == len("".join(parts)) + 1
    if name == "running":
        direct = log_p(model, ids)  # the state goes on to the end
    else:
        direct = np.concatenate([log_p(model, ids[begin : begin + 25]) for begin in range(0, count, 24)])
    assert sum(one.log_probability for one in found) == pytest.approx(direct.sum(), rel=1e-5)
    np.testing.assert_allclose(found[1].log_probability, direct[24:48].sum(), rtol=1e-4)
    called = call("score", trained[name].run.folder, book, "--json")
    assert len(called.out.splitlines()) == 1
    assert "1 texts" in called.err


def test_commands_accept_a_language_model(trained: dict[str, TrainingResult]) -> None:
    folder = trained["running"].run.folder
    written = call("generate", folder, "-", stdin=b"the cat\n\n")
    assert written.code == 0
    assert len(written.out.splitlines()) == 2
    assert written.out.startswith("the cat")
    assert call("generate", folder, "--unconditional", "3", "--json").out.count('"tokens"') >= 3
    assert call("evaluate", folder).code == 0
    explained = call("explain", folder, "the cat")
    assert explained.code == 0
    assert "no self-attention" in explained.out


def test_explain_shows_the_look_back(trained: dict[str, TrainingResult]) -> None:
    explained = trained["lines"].model.explain("the cat")
    assert explained.attention is not None
    assert explained.source_tokens[0] == "<s>"
    weights = explained.map().weights
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    assert np.allclose(np.triu(weights, 1), 0)  # nothing looks ahead


def test_nothing_is_generated_unless_a_metric_needs_it(
    trained: dict[str, TrainingResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "generate", lambda *_, **__: pytest.fail("generated"))
    model = trained["lines"].model
    _, lines = load_held_out(model, None)
    outputs = predict(model, lines, ["perplexity"])
    assert outputs.texts is None
    assert outputs.scored is not None
    assert len(outputs.scored) == len(lines)


def test_perplexity_of_pairs_is_teacher_forced(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}{b}\t{b} {a}\n" for a in "abcdef" for b in "ghij"))
    one = train(
        {
            "data": {"train": str(tmp_path / "pairs.tsv"), "cache": str(tmp_path / "cache")},
            "tokens": {"source": {"kind": "chars"}, "target": {"kind": "chars"}},
            "model": {"encoder": RECURRENT, "decoder": RECURRENT},
            "training": {"steps": 2},
            "evaluation": {"metrics": ["exact", "perplexity", "word_perplexity"], "resamples": 5},
        },
        tmp_path / "run",
    )
    _, lines = load_held_out(one.model, None)
    found = one.model.score([(line.source, line.references[0]) for line in lines])
    total, tokens = sum(pair.score for pair in found), sum(len(pair.token_scores) for pair in found)
    scores = one.scores["dev"].scores
    assert scores["perplexity"].value == pytest.approx(math.exp(-total / tokens))
    assert scores["word_perplexity"].value == pytest.approx(math.exp(-total / (3 * len(lines))))  # two words and </s>


def test_measures_of_probability() -> None:
    scored = [ScoredText(-6.0, 3, 2, 8), ScoredText(-10.0, 5, 3, 12)]
    values = {"perplexity": math.exp(2), "word_perplexity": math.exp(16 / 5), "character_perplexity": math.exp(0.8)}
    values["bits_per_character"] = 0.8 / math.log(2)
    result = evaluate(SystemOutput(scored=scored), [["x"], ["y"]], None, list(values), 10)
    for name, value in values.items():
        assert result.scores[name].value == pytest.approx(value)
        assert not result.scores[name].higher_is_better
    assert find_metric("perplexity").value(np.array([-1e9, 1.0])) < math.inf
    with pytest.raises(InputError, match="cannot be computed"):
        evaluate(SystemOutput(scored=scored), [["x"], ["y"]], None, ["bleu"])


def test_stopped_and_resumed_on_running_text(book: Path, tmp_path: Path) -> None:
    def weights(folder: Path, *steps: int) -> dict[str, torch.Tensor]:
        for number in steps:
            wanted = recipe(book, RECURRENT, steps=number, checkpoint_every=5)
            train(wanted, folder, resume=True)
        return transduce.load(folder).network.state_dict()

    whole, halves = weights(tmp_path / "a", 12), weights(tmp_path / "b", 7, 12)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_recipe_chosen_for_running_text(book: Path) -> None:
    chosen = resolve(recipe_for(str(book), [], "lm"))
    assert (chosen.data.format, chosen.data.block_size, chosen.model.encoder) == ("text", 128, None)
    assert chosen.generation.strategy == "sample"
    assert resolve(recipe_for(str(book), ["data.block_size=null"], "lm")).data.train[0].format == "lines"


def test_language_models_are_compared(trained: dict[str, TrainingResult], tmp_path: Path) -> None:
    folders = [trained[name].run.folder for name in ("running", "limited")]
    result = compare(folders, folder=tmp_path)
    assert {test.metric for test in result.tests} >= {"perplexity", "bits_per_character"}
    assert result.systems[0].generation.tokens_per_second is None
    assert "perplexity" in (tmp_path / "compare.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"encoder": RECURRENT, "decoder": RECURRENT}}, "an encoder needs a source"),
        ({"evaluation": {"metrics": ["bleu"]}}, "no source to write one for"),
        (
            {"model": {"decoder": {**LEARNED, "position": {"kind": "learned", "max_positions": 23}}}},
            "positions end at 23",
        ),
        ({"tokens": {"target": {"kind": "bpe", "dropout": 0.1}}}, "tokenised once"),
    ],
)
def test_incompatible_settings_are_refused(changes: dict[str, Any], message: str, book: Path) -> None:
    with pytest.raises(InputError, match=message):
        resolve({**recipe(book, RECURRENT), **changes})
