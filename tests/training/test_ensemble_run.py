"""Training an ensemble: members, the shared development set, resuming, loading the folder everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import yaml
from run_fixtures import RECURRENT, colour_pairs, settings

import transduce
from transduce.errors import InputError
from transduce.recipe import Recipe, dump, parse
from transduce.run import Run
from transduce.training import ensemble_run, experiment
from transduce.training.ensemble_run import EnsembleResult, train_ensemble, with_seed

pytestmark = pytest.mark.slow
LINES = ["red blue", "green red red"]


def recipe(pairs: Path, **training: object) -> Recipe:
    model = {"encoder": {**RECURRENT, "width": 8}, "decoder": {**RECURRENT, "width": 8}}
    return parse(settings(pairs, model, "words", steps=4, validate_every=2, **training))


@pytest.fixture(scope="module")
def small_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ensemble") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(80)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(small_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> EnsembleResult:
    return train_ensemble(recipe(small_pairs), tmp_path_factory.mktemp("ensemble") / "two", 2)


def test_the_folder_is_the_ensemble_of_its_members(trained):
    members = [trained.run.folder / "members" / number for number in "12"]
    assert trained.run.members() == members
    together, listed = transduce.load(trained.run.folder), transduce.load(members)
    assert [one.score for one in together.generate(LINES)] == [one.score for one in listed.generate(LINES)]
    seeds = [Run(member).recipe().training.seed for member in members]
    assert seeds == [1, 2]
    assert trained.members.keys() == {"member 1", "member 2", "ensemble"}
    assert trained.run.metrics()["dev"]["scores"].keys() == {"exact", "wer"}


def test_members_have_the_development_set_of_the_first(trained, small_pairs):
    from transduce.data.prepare import prepare_data

    held = []
    for member in trained.run.members():
        run = Run(member)
        data = prepare_data(run.recipe(), run.tokenizers())
        held.append(data.dev_rows.tolist())
    assert held[0] == held[1]
    other = with_seed(recipe(small_pairs), 2).model_copy(update={"data": recipe(small_pairs).data})
    tokenizers = Run(trained.run.members()[0]).tokenizers()
    assert prepare_data(other, tokenizers).dev_rows.tolist() != held[0]  # what the seed alone would hold out


def test_finished_members_are_kept_and_an_interrupted_one_resumes(trained, small_pairs, monkeypatch, tmp_path):
    folder = tmp_path / "three"
    begun = []

    def interrupted(recipe: Recipe, folder: Path, **options: object) -> experiment.TrainingResult:
        begun.append(folder.name)
        if folder.name == "2":
            outcome = experiment.trainer.Outcome(1, None, None, "interrupted", {}, 2)
            return experiment.TrainingResult(Run(folder), None, outcome, {}, ())  # type: ignore[arg-type]
        return experiment.train(recipe, folder, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ensemble_run, "train", interrupted)
        stopped = train_ensemble(recipe(small_pairs), folder, 2)
    assert (stopped.model, stopped.signal, begun) == (None, 2, ["1", "2"])
    assert not Run(folder).ensemble_file.exists()
    with pytest.raises(InputError, match="already a run"):
        train_ensemble(recipe(small_pairs), folder, 2)
    begun.clear()

    def counted(recipe: Recipe, folder: Path, **options: object) -> experiment.TrainingResult:
        begun.append(folder.name)
        return experiment.train(recipe, folder, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ensemble_run, "train", counted)
    resumed = train_ensemble(recipe(small_pairs), folder, 2, resume=True)
    assert begun == ["2"]
    assert resumed.members == trained.members  # the same seeds: the same scores


def test_commands_take_the_folder(command, trained, small_pairs, tmp_path):
    folder = str(trained.run.folder)
    together = transduce.load(folder)
    source = tmp_path / "in.txt"
    source.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    assert command("generate", folder, source).out.splitlines() == [one.text for one in together.generate(LINES)]
    assert "exact" in command("evaluate", folder).out
    assert len(command("score", folder, small_pairs).out.splitlines()) == 80
    refused = command("edit-recipe", folder)
    assert "an ensemble of 2 runs" in refused.err


def test_an_ensemble_among_runs_shares_its_weight(trained):
    one, two = trained.run.members()
    nested = transduce.load([trained.run.folder, one])
    listed = transduce.load([one, two, one], weights=[0.5, 0.5, 1])
    assert [x.score for x in nested.generate(LINES)] == pytest.approx([x.score for x in listed.generate(LINES)])


@pytest.mark.parametrize("members", [[], ["../one"], ["/tmp"], [3], "members/1", ["."]])
def test_a_damaged_list_of_members_is_refused(members, tmp_path):
    (tmp_path / "ensemble.json").write_text(json.dumps({"members": members}))
    with pytest.raises(InputError, match="names no members"):
        transduce.load(tmp_path)


def test_train_command(command, small_pairs, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe(small_pairs)), encoding="utf-8")
    result = command("train", written, "--ensemble", "2", "--run", tmp_path / "run", "training.steps=2")
    assert result.code == 0, result.err
    assert "member 2  seed 2  done" in result.out
    assert any(line.startswith("ensemble") for line in result.out.splitlines())
    refused = command("train", written, "--ensemble", "0", "--run", tmp_path / "other")
    assert "at least 2 members" in refused.err


def test_few_words_to_pronounce_train_an_ensemble_of_two_kinds_of_networks(command, tmp_path):
    words = tmp_path / "words.tsv"
    pairs = [(first + second, f"{first} {second}") for first in "abcdefghij" for second in "klmnopqrstuv"]
    words.write_text("".join(f"{word}\t{phones}\n" for word, phones in pairs), encoding="utf-8")
    short = ["training.steps=2", "training.validate_every=2", "evaluation.resamples=2", "--minutes", "20"]
    planned = command("train", words, "--task", "pronounce", "--plan", "--minutes", "20")
    assert "ensemble: 5" in planned.out
    assert yaml.safe_load(planned.out.partition("the recipe:")[2])["training"]["minutes"] == 4  # as is trained below
    result = command("train", words, "--task", "pronounce", "--run", tmp_path / "run", *short)
    assert result.code == 0, result.err
    run = Run(tmp_path / "run")
    recipes = [Run(member).recipe() for member in run.members()]
    assert [one.model.decoder["kind"] for one in recipes] == ["hard_attention", "edit_transducer"] * 2 + [
        "hard_attention"
    ]
    assert [one.training.seed for one in recipes] == [1, 2, 3, 4, 5]
    assert {one.training.minutes for one in recipes} == {4.0}  # a fifth each
    assert transduce.load(run.folder).explain("ak").attention is not None
    again = command("train", words, "--task", "pronounce", "--run", tmp_path / "run", *short, "--resume")
    assert again.code == 0, again.err
    less = ["--minutes", "10", "--resume"]  # for which fewer members would be chosen
    again = command("train", words, "--task", "pronounce", "--run", tmp_path / "run", *short[:-2], *less)
    assert again.code == 0, again.err
    assert len(run.members()) == 5
    (run.folder / "members" / "plan.json").write_text('{"members": []}')
    broken = command("train", words, "--task", "pronounce", "--run", tmp_path / "run", *short, "--resume")
    assert broken.code == 2
    assert "plan.json: it names no members" in broken.err
    single = command("train", words, "--task", "pronounce", "--run", tmp_path / "one", *short, "--ensemble", "1")
    assert single.code == 0, single.err
    assert Run(tmp_path / "one").recipe().training.minutes == 20


def test_a_warning_of_every_member_is_printed_once(command, small_pairs, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe(small_pairs)), encoding="utf-8")
    short = ["generation.max_source_length=1", "--ensemble", "2", "--run", tmp_path / "run"]
    result = command("train", written, *short)
    assert result.code == 0, result.err
    warnings = [line for line in result.err.splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: texts of more than 1 tokens (`max_source_length`) were split into parts"]


@pytest.mark.parametrize("removed", ["members", "ensemble.json"])
def test_one_network_is_not_trained_in_the_folder_of_an_ensemble(removed, trained, small_pairs, tmp_path):
    """Of one that is complete, wherever its members are, or whose training was interrupted."""
    folder = tmp_path / "two"
    copytree(trained.run.folder, folder, ignore=ignore_patterns(removed))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for resume in (False, True):
        with pytest.raises(InputError, match="an ensemble") as refused:
            experiment.train(recipe(small_pairs), folder, resume=resume)
        assert str(folder) in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
