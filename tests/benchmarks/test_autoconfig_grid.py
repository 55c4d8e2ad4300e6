"""The grid behind the chosen recipes: data sets, trials, table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import autoconfig
from transduce.recipe.build import complete_recipe


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The layout of the two shared tasks, with a few made-up words."""
    words = [f"{a}{b}{c}" for a in "kt" for b in "aeo" for c in "ns"]
    (tmp_path / "g2p2021").mkdir()
    (tmp_path / "inflection2017").mkdir()
    for size, languages in (("low", autoconfig.LOW), ("medium", autoconfig.MEDIUM)):
        for language in languages:
            for split in ("train", "dev"):
                lines = "".join(f"{word}\t{' '.join(word)}\n" for word in words)
                (tmp_path / "g2p2021" / f"{size}_{language}_{split}.tsv").write_text(lines, encoding="utf-8")
    for language in autoconfig.INFLECTION:
        for split in ("dev", *(f"train-{size}" for size in autoconfig.SIZES)):
            lines = "".join(f"{word}\t{word}i\tN;PL\n" for word in words)
            (tmp_path / "inflection2017" / f"{language}-{split}.tsv").write_text(lines, encoding="utf-8")
    return tmp_path


def test_every_variant_is_a_recipe_for_every_data_set(data, tmp_path):
    sets = list(autoconfig.character_sets(data, tmp_path))
    assert {one.group for one in sets} == {"g2p low", "g2p medium", "inflect low", "inflect medium", "inflect high"}
    for dataset in sets:
        for variant in autoconfig.CHARACTER_VARIANTS:
            if variant.groups and dataset.group not in variant.groups:
                continue
            recipe = autoconfig.recipe_of(dataset, variant, 3, "cpu", 1.0)
            assert complete_recipe(recipe).training.seed == 3
            assert recipe.data.test == ()  # settings are chosen on development data


def test_sentences_are_joined_and_every_schedule_is_a_recipe(tmp_path):
    pieces = tmp_path / "multi30k" / "bpe"
    pieces.mkdir(parents=True)
    for name in ("train", "val"):
        for language in autoconfig.LANGUAGES:
            lines = "".join(f"a dog number {number} ru@@ ns in the park .\n" for number in range(120))
            (pieces / f"{name}.{language}").write_text(lines, encoding="utf-8")
    (dataset,) = autoconfig.sentence_sets(tmp_path, tmp_path)
    assert Path(dataset.dev).read_text().splitlines()[7].split("\t")[0] == "a dog number 7 runs in the park ."
    recipes = [autoconfig.recipe_of(dataset, variant, 3, "cpu", 1.0) for variant in autoconfig.SENTENCE_VARIANTS]
    assert [one.training.steps for one in recipes[1:]] == [3500, 3500, 5000, 8000]
    assert all(complete_recipe(one).training.schedule.kind == "cosine" for one in recipes[1:])
    assert autoconfig.score_of({"chrf": 60.0, "bleu": 40.0}) == 40.0


def test_every_variant_of_the_label_grid_is_a_recipe(tmp_path):
    for name, label in (("ud_ewt", "NOUN VERB"), ("sst2", "1")):
        (tmp_path / name).mkdir()
        for part in ("train", "dev"):
            lines = "".join(f"word{number} runs\t{label}\n" for number in range(120))
            (tmp_path / name / f"{part}.tsv").write_text(lines, encoding="utf-8")
    tags, texts = autoconfig.label_sets(tmp_path, tmp_path)  # without an imported encoder
    for dataset in (tags, texts):
        for variant in autoconfig.LABEL_VARIANTS:
            if dataset.group in variant.groups:
                recipe = complete_recipe(autoconfig.recipe_of(dataset, variant, 3, "cpu", 1.0))
                assert recipe.data.test == ()
                assert recipe.model.head["kind"] == {"tag": "tagger", "classify": "classifier"}[dataset.task]
    assert autoconfig.score_of({"macro_f1": 60.0, "accuracy": 40.0}) == 40.0


def test_a_trial_has_scores_and_a_failure_is_recorded(data, tmp_path, capsys):
    dataset = next(autoconfig.character_sets(data, tmp_path))
    small = autoconfig.Variant("small", autoconfig._recurrent("gru", 8, 1, 0.0))

    def trial(variant: autoconfig.Variant, seed: int, until: float = math.inf) -> autoconfig.Trial | None:
        place = tmp_path / variant.name / str(seed)
        return autoconfig.run_trial(dataset, variant, seed, "cpu", 0.01, place, until)

    found = [trial(small, 1), trial(small, 2)]
    assert [one.steps for one in found] == [25, 25]
    assert all(set(one.scores) == {"exact", "per"} for one in found)
    members = [tmp_path / "small" / seed for seed in "12"]
    both = autoconfig.run_ensemble(dataset, "2 x small", members, "cpu", math.inf)
    assert both.parameters == sum(one.parameters for one in found)
    assert set(both.scores) == {"exact", "per"}
    broken = autoconfig.Variant("broken", autoconfig._transformer(10, 1, 0.0))  # four heads do not divide ten
    failed = trial(broken, 1)
    assert failed.failed.startswith("InputError")
    assert trial(small, 3, until=0.0) is None
    autoconfig.show([*found, both, failed], Console())
    assert "g2p low" in capsys.readouterr().out


def test_ensembles_combine_seeds_and_networks():
    found = autoconfig.ensembles(autoconfig.CHARACTER_VARIANTS, [1, 2])
    assert found["2 x edit transducer"] == [("edit transducer", 1), ("edit transducer", 2)]
    assert len(found["mixed: 4 networks, 2 seeds"]) == 8
    names = {one.name for one in autoconfig.CHARACTER_VARIANTS}
    assert all(name in names for members in found.values() for name, _ in members)
