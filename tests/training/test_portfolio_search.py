"""Successive halving, efforts, the portfolio, and `train --effort best`: record, resuming, final comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_fixtures import RECURRENT, colour_pairs, settings

import transduce
from transduce.cli.display import show_ensemble
from transduce.errors import InputError
from transduce.recipe import Recipe, dump, parse
from transduce.recipe.build import complete_recipe
from transduce.run import Run
from transduce.training import ensemble_run, experiment
from transduce.training import ensemble_run as portfolio_search
from transduce.training.ensemble_run import (
    NORMAL,
    SHARES,
    EnsembleResult,
    Variant,
    development_scores,
    portfolio,
    shortened,
    successive_halving,
    time_of_trainings,
    train_best,
    with_effort,
)
from transduce.training.resolve import resolve

SMALL = {"encoder": {**RECURRENT, "width": 8}, "decoder": {**RECURRENT, "width": 8}}


def recipe(pairs: Path, kind: str = "words", **training: object) -> Recipe:
    content = settings(pairs, SMALL, kind, **{"steps": 8, "validate_every": 4, "monitor": "wer", **training})
    return complete_recipe(parse(content))


def variants(count: int) -> list[Variant]:
    one = parse({"model": SMALL})
    return [Variant(str(number), one) for number in range(count)]


def test_the_time_of_a_search_counts_every_training(pairs: Path):
    limited = recipe(pairs, minutes=2.0)
    trials: list[float] = []
    successive_halving(portfolio(resolve(limited)), lambda one, share: trials.append(share) or 0.0, SHARES)
    text = time_of_trainings(limited, 3, search=True)
    assert text is not None
    assert text.startswith(f"{len(trials)} short trainings and 4 in full, of at most 2 minutes")
    assert text.endswith(f"at most {2 * (sum(trials) + 4):.0f} minutes in all")
    assert (
        time_of_trainings(limited, 3, search=False)
        == "3 trainings, of at most 2 minutes each: at most 6 minutes in all"
    )
    assert time_of_trainings(recipe(pairs), 3, search=True) is None


def test_the_better_half_goes_on_with_twice_the_training():
    trials: list[tuple[str, float]] = []

    def evaluate(variant: Variant, share: float) -> float:
        trials.append((variant.name, share))
        return float(variant.name)

    assert [one.name for one in successive_halving(variants(6), evaluate, SHARES)] == ["5", "4", "3", "2", "1", "0"]
    assert [name for name, share in trials if share == 1 / 8] == ["0", "1", "2", "3", "4", "5"]
    assert [name for name, share in trials if share == 1 / 4] == ["5", "4", "3"]
    assert [name for name, share in trials if share == 1 / 2] == ["5", "4"]


def test_of_equal_variants_the_first_wins_and_one_needs_no_trial():
    assert [one.name for one in successive_halving(variants(5), lambda *_: 1.0, SHARES)] == list("01234")
    (only,) = successive_halving(variants(1), lambda *_: pytest.fail("nothing to compare"), SHARES)
    assert only.name == "0"


@pytest.mark.parametrize("count", range(1, 17))
def test_all_variants_are_ranked_whatever_their_number(count):
    found = successive_halving(variants(count), lambda variant, _: -abs(int(variant.name) - count // 2), SHARES)
    assert found[0].name == str(count // 2)
    assert sorted(int(one.name) for one in found) == list(range(count))


@pytest.mark.parametrize("kind", ["chars", "words"])
def test_portfolios_begin_with_the_recipe_and_build(kind, tmp_path):
    given = recipe(tmp_path / "pairs.tsv", kind)
    found = portfolio(given)
    assert found[0] == Variant(NORMAL, given)
    assert len(found) >= 4
    assert len({repr(one.recipe.model) for one in found}) == len(found)
    for one in found:
        complete_recipe(one.recipe)
        assert (one.recipe.data, one.recipe.tokens, one.recipe.evaluation) == (
            given.data,
            given.tokens,
            given.evaluation,
        )


def test_initialised_weights_keep_their_network(tmp_path):
    given = recipe(tmp_path / "pairs.tsv", "chars")
    fixed = given.model_copy(update={"init": given.init.model_copy(update={"model": "runs/one"})})
    for one in portfolio(fixed):
        assert one.recipe.model.encoder["width"] == 8


def test_a_share_of_the_training(tmp_path):
    given = recipe(tmp_path / "pairs.tsv", steps=1000, validate_every=100, minutes=10)
    short = shortened(given, 1 / 4).training
    assert (short.steps, short.minutes, short.validate_every, short.schedule.warmup) == (250, 2.5, 25, 5)
    assert with_effort(given, "normal", []) == with_effort(given, "best", []) == given
    quick = with_effort(given, "quick", ["training.steps=1000"]).training
    assert (quick.steps, quick.minutes) == (1000, 2.0)  # what the user gave is kept
    with pytest.raises(InputError, match="unknown effort 'hard'"):
        with_effort(given, "hard", [])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(80)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experiment.train(recipe(pairs), tmp_path_factory.mktemp("search") / "run").run.folder


@pytest.fixture
def started(trained: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trainings that a search began: each is a copy of one run with another recipe, of the same network."""
    folders: list[str] = []

    def copied(given: Recipe, target: Path, **_: object) -> experiment.TrainingResult:
        folders.append(target.name)
        if folders == ["normal-0.25", "dropout-0-1-0.25", "normal"]:
            raise KeyboardInterrupt
        shutil.copytree(trained, target)
        run = Run(target)
        run.save_recipe(resolve(given))
        run.checkpoints.rebind()
        outcome = experiment.trainer.Outcome(given.training.steps, None, None, "steps", {})
        return experiment.TrainingResult(run, None, outcome, {}, ())  # type: ignore[arg-type]

    def few(given: Recipe) -> list[Variant]:
        return portfolio(given)[:2]

    monkeypatch.setattr(ensemble_run, "train", copied)
    monkeypatch.setattr(portfolio_search, "portfolio", few)
    monkeypatch.setattr(portfolio_search, "SHARES", (1 / 4,))
    return folders


def search(pairs: Path, folder: Path, **options: object) -> EnsembleResult:
    return train_best(recipe(pairs), folder, 2, **options)  # type: ignore[arg-type]


def scored(**values: float) -> Callable[[Run], dict[str, float]]:
    """Development scores with these error rates, by the name of the folder."""

    def scores(run: Run) -> dict[str, float]:
        name = run.folder.name.replace("-", "_").replace(".", "_")
        return {**development_scores(run), "wer": values.get(name, values["others"])}

    return scores


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_finished_trials_are_used_again_and_the_ensemble_is_the_run(pairs, started, monkeypatch, tmp_path):
    monkeypatch.setattr(portfolio_search, "development_scores", scored(dropout_0_1_0_25=1.0, others=1e9))
    folder = tmp_path / "best"
    with pytest.raises(KeyboardInterrupt):
        search(pairs, folder)
    finished = rows(folder)
    assert [one["name"] for one in finished] == [NORMAL, "dropout 0.1"]
    with pytest.raises(InputError, match="already a run"):
        search(pairs, folder)
    found = search(pairs, folder, resume=True)
    assert started == ["normal-0.25", "dropout-0-1-0.25", "normal", "normal", "1", "2"]
    assert rows(folder)[:2] == finished
    assert [one["name"] for one in rows(folder)[2:]] == [NORMAL, "member 1", "member 2"]
    assert found.run.members() == [folder / "members" / "1", folder / "members" / "2"]
    networks = [Run(folder / "members" / number).recipe().model for number in "12"]
    assert networks[0].encoder["dropout"] == 0.1
    assert networks[1] == resolve(recipe(pairs)).model  # the second best
    loaded = transduce.load(folder)
    assert loaded.generate(["red blue"])[0].score == found.model.generate(["red blue"])[0].score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("best", "chosen", "text"), [("normal", "normal", "the normal recipe alone"), ("2", "members/2", "member 2 alone")]
)
def test_a_better_single_model_becomes_the_run(pairs, started, best, chosen, text, monkeypatch, tmp_path):
    """The run is never worse on the development set than the recipe as it was."""
    started.append("not interrupted")
    values = {"dropout_0_1_0_25": 1.0, best: -1.0, "others": 1e9}
    monkeypatch.setattr(portfolio_search, "development_scores", scored(**values))
    found = search(pairs, tmp_path / "best")
    assert found.run.members() == [tmp_path / "best" / chosen]
    with (console := Console(width=200)).capture() as shown:
        show_ensemble(found, console)
    assert f"the run is {text}, which is better on the development set than the ensemble" in shown.get()


@pytest.mark.slow
def test_where_the_recipe_wins_the_search_its_members_are_the_ensemble(pairs, started, monkeypatch, tmp_path):
    started.append("not interrupted")
    monkeypatch.setattr(portfolio_search, "development_scores", scored(normal_0_25=1.0, others=1e9))
    found = search(pairs, tmp_path / "best")
    assert found.members.keys() == {"member 1", "member 2", "ensemble"}
    assert Run(found.run.members()[0]).recipe().model == resolve(recipe(pairs)).model


@pytest.mark.slow
def test_command(command, pairs, started, tmp_path):
    started.append("not interrupted")
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe(pairs)), encoding="utf-8")
    result = command("train", written, "--effort", "best", "--ensemble", "2", "--run", tmp_path / "run")
    assert result.code == 0, result.err
    assert "normal  25.0%  done" in result.out
    assert "the run is an ensemble of 2" in result.out
    refused = command("train", written, "--effort", "none")
    assert refused.code == 2
    assert "quick, normal, best" in refused.err
