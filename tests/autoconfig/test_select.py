"""Recipe selection: recipes for files of very different shape can be built and fit the data."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from transduce.autoconfig import GIVEN, choose, continued_recipe, plan_for, recipe_for
from transduce.autoconfig.sizes import (
    CPU_MINUTES,
    GRID,
    LETTERS,
    MANY_LETTERS,
    MANY_SENTENCES,
    MONOTONIC,
    SENTENCES,
    TimeBudget,
    affordable,
    candidates_for,
    ensemble_for,
)
from transduce.autoconfig.tasks import LOW_EDITS, MEDIUM_EDITS, POINTER
from transduce.errors import InputError
from transduce.recipe import Recipe, TrainingRecipe, build, parse
from transduce.run import Run
from transduce.training.ensemble_run import portfolio
from transduce.training.resolve import resolve, resumed_recipe

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def word(draw: random.Random, longest: int = 9) -> str:
    return "".join(draw.choices(ALPHABET, k=draw.randint(2, longest)))


def sentences(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(1)
    words = [word(draw) for _ in range(2000)]
    return [tuple(" ".join(draw.choices(words, k=draw.randint(8, 20))) for _ in range(2)) for _ in range(count)]


def phones(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(2)
    return [(one, " ".join(letter.upper() + "H" for letter in one)) for one in (word(draw) for _ in range(count))]


def dates(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(3)
    return [(f"{draw.randint(1, 28)}. March {draw.randint(1900, 2100)}", f"{draw.random():.6f}") for _ in range(count)]


def commands(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(4)
    steps = ["walk", "jump", "turn left", "look around right", "twice"]
    return [
        (" ".join(draw.choices(steps, k=6)), " ".join(draw.choices(["GO", "JUMP", "LEFT"], k=9))) for _ in range(count)
    ]


def written(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def check(recipe: Recipe) -> None:
    """Complete, buildable, and its measures fit together."""
    completed = build.complete_recipe(recipe)
    build.build_model(completed.model, 50, 50)
    training = recipe.training
    assert training.monitor in recipe.evaluation.metrics
    assert training.monitor != "exact"  # it may stay at 0 for long while the model learns
    assert training.validate_every <= training.steps
    assert training.checkpoint_every <= training.steps
    assert training.schedule.warmup < training.steps


@pytest.mark.parametrize(
    ("pairs", "kinds", "encoder", "metrics"),
    [
        (sentences(), ("bpe", "bpe"), "transformer", ("bleu", "chrf")),
        (phones(), ("chars", "words"), "recurrent", ("exact", "wer")),
        (dates(), ("chars", "chars"), "recurrent", ("exact", "cer")),
        (commands(), ("words", "words"), "recurrent", ("exact", "wer")),
    ],
    ids=["sentences", "phones", "dates", "commands"],
)
def test_what_fits(tmp_path: Path, pairs, kinds, encoder: str, metrics) -> None:
    recipe = recipe_for(str(written(tmp_path / "pairs.tsv", pairs)))
    check(recipe)
    assert (recipe.tokens.source.kind, recipe.tokens.target.kind) == kinds
    assert recipe.model.encoder["kind"] == encoder
    assert recipe.evaluation.metrics == metrics


@profile(deadline=None, max_examples=40)
@given(pairs=st.lists(st.tuples(*[st.text("ab cé漢 ", min_size=1, max_size=60).filter(str.strip)] * 2), min_size=1))
def test_any_pairs_have_a_recipe(bench: Path, pairs: list[tuple[str, str]]) -> None:
    path = str(written(bench / "any.tsv", pairs))
    recipe = recipe_for(path)
    check(recipe)
    assert recipe_for(path) == recipe
    assert choose({"train": path}).recipe == recipe


def test_more_data_means_longer_training(tmp_path: Path) -> None:
    few, many = (recipe_for(str(written(tmp_path / f"{n}.tsv", sentences(50) * n))) for n in (1, 400))
    assert few.training.steps < many.training.steps <= 100_000
    assert few.training.validate_every < many.training.validate_every


def lookup(recipe: Recipe, key: str) -> Any:
    value: Any = recipe.model_dump(mode="json")
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize("pairs", [sentences(), phones(), dates(), commands(), phones(20)])
def test_a_plan_has_a_reason_for_what_it_chose(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    path = str(written(tmp_path / "pairs.tsv", pairs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_for(path, ["training.clip=0.5", "training.steps=70"])
        assert recipe_for(path, ["training.clip=0.5", "training.steps=70"]) == plan.recipe
    default = TrainingRecipe().model_dump(mode="json")
    chosen = {key for key, value in plan.recipe.training.model_dump(mode="json").items() if value != default[key]}
    explained = {key.split(".")[1] for key in plan.reasons if key.startswith("training.")}
    assert chosen - {"checkpoint_every"} <= explained  # as often as a validation
    assert {"tokens.source", "tokens.target", "model.encoder"} <= plan.reasons.keys()
    assert plan.reasons["training.clip"] == plan.reasons["training.steps"] == GIVEN
    assert f"{len(pairs):,} pairs" in plan.reasons["model.encoder"]
    side = plan.statistics.source
    assert any(f"{n:g}" in plan.reasons["tokens.source"] for n in (side.words, side.vocabulary))
    for key in plan.reasons:
        lookup(plan.recipe, key)
    assert 0 < plan.tokens[0][0] <= plan.recipe.tokens.source.size


def test_every_candidate_trains_and_its_record_exists() -> None:
    lines = (Path(__file__).parents[2] / GRID).read_text(encoding="utf-8").splitlines()
    trials = {(trial["group"], trial["variant"]) for trial in map(json.loads, lines)}
    every = [one for table in (LETTERS, MONOTONIC, SENTENCES) for rows in table.values() for one in rows]
    for one in [*every, *MANY_LETTERS, *MANY_SENTENCES]:
        assert one.record == ("", "") or one.record in trials
        with torch.device("meta"):
            build.build_model(build.complete_recipe(parse({"model": one.model})).model, 20, 20)


def test_the_time_and_the_device_decide_the_network() -> None:
    """More time never means a cheaper network; without a limit it is the first, and for no time the last."""
    for pairs in (20, 800, 8_000, 100_000, 10**6):
        for sentences, monotonic in ((False, False), (True, False), (False, True)):
            rows = candidates_for(pairs, sentences, monotonic)
            assert affordable(rows, TimeBudget("cuda")) is rows[0]
            assert affordable(rows, TimeBudget("cpu", 1e-9)) is rows[-1]
            assert affordable(rows, TimeBudget("cpu", 1e9)) is rows[0]
            chosen = [affordable(rows, TimeBudget("cpu", float(minutes))) for minutes in (1, 10, 100, 1000, 10_000)]
            assert [rows.index(one) for one in chosen] == sorted((rows.index(one) for one in chosen), reverse=True)
            faster = [affordable(rows, TimeBudget("cpu", float(minutes), bf16=True)) for minutes in (1, 10, 100)]
            assert all(rows.index(one) <= rows.index(other) for one, other in zip(faster, chosen, strict=False))
    assert TimeBudget("cpu").minutes == CPU_MINUTES
    assert TimeBudget("cuda").minutes is None
    assert TimeBudget("cuda", 3.0).minutes == TimeBudget("cpu", 3.0).minutes == 3.0


def test_a_network_takes_less_time_in_bf16_where_that_was_measured() -> None:
    for pairs, sentences, monotonic in ((800, False, True), (8_000, False, False), (29_000, True, False)):
        for one in candidates_for(pairs, sentences, monotonic):
            plain, fast = one.minutes(TimeBudget("cpu")), one.minutes(TimeBudget("cpu", bf16=True))
            assert fast < plain
            assert fast / plain == pytest.approx((one.bf16_microseconds or 0) / one.microseconds)
    tables = (*LETTERS.values(), *MONOTONIC.values(), *SENTENCES.values(), MANY_LETTERS, MANY_SENTENCES)
    for one in (*(one for rows in tables for one in rows), POINTER, LOW_EDITS, MEDIUM_EDITS):
        assert one.training.bf16 == (one.bf16_microseconds is not None)


def test_an_ensemble_is_planned_where_the_time_suffices(tmp_path: Path) -> None:
    assert ensemble_for(800, TimeBudget("cuda")) is not None
    for bf16, members in ((False, 4), (True, 5)):
        few = ensemble_for(800, TimeBudget("cpu", bf16=bf16))
        assert few is not None
        assert few.members == members
        assert ensemble_for(8_000, TimeBudget("cpu", bf16=bf16)) is None
    assert ensemble_for(8_000, TimeBudget("cuda")) is not None
    assert ensemble_for(800, TimeBudget("cpu", 1)) is None
    assert {ensemble_for(pairs, TimeBudget("cuda")) for pairs in (99, 50_000)} == {None}
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{number:04}\t{number:04}\n" for number in range(200)), encoding="utf-8")
    assert plan_for(str(path), [], "transliterate").ensemble is not None
    assert plan_for(str(path), ["training.clip=2.0"], "transliterate").ensemble is not None
    assert plan_for(str(path), ["model.encoder.width=64"], "transliterate").ensemble is None
    assert plan_for(str(path), [], "generate").ensemble is None


@pytest.mark.parametrize(
    "setting",
    ["training.batch_tokens=512", "training.optimiser.learning_rate=0.01", "training.objective.label_smoothing=0.2"],
)
def test_settings_that_are_given_are_those_of_all_members(tmp_path: Path, setting: str) -> None:
    """Each network of the portfolio has its own: where one is given, all members are of one network."""
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{number:04}\t{number:04}\n" for number in range(200)), encoding="utf-8")
    plain, planned = plan_for(str(path), [], "transliterate"), plan_for(str(path), [setting], "transliterate")
    assert plain.ensemble is not None
    assert planned.ensemble is not None
    assert planned.ensemble.members == plain.ensemble.members
    keys, value = setting.partition("=")[0].split("."), yaml.safe_load(setting.partition("=")[2])
    known = {one.name: one.recipe for one in portfolio(resolve(planned.recipe))}
    for name in planned.ensemble.networks:
        found: Any = known[name].model_dump(mode="json")
        for key in keys:
            found = found[key]
        assert found == value, name


def test_the_time_is_that_of_the_precision_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.autoconfig.computes_in_bf16", lambda device: True)
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{number:04}\t{number:04}\n" for number in range(200)), encoding="utf-8")
    for settings, members in (([], 5), (["training.precision=auto"], 5), (["training.precision=fp32"], 4)):
        ensemble = plan_for(str(path), ["training.device=cpu", *settings], "transliterate").ensemble
        assert ensemble is not None
        assert ensemble.members == members


def test_small_networks_compute_in_fp32_on_a_cpu(tmp_path: Path) -> None:
    forms = tmp_path / "forms.tsv"
    forms.write_text("".join(f"{letter}ag\tN;PL\t{letter}age\n" for letter in ALPHABET * 8))
    for device, expected in (("cpu", "fp32"), ("cuda", "auto")):
        plan = choose({"train": str(forms)}, "inflect", TimeBudget(device))
        assert plan.recipe.training.precision == expected
        assert ("bf16 does not pay" in plan.reasons["training.precision"]) == (device == "cpu")
    words = tmp_path / "words.tsv"
    words.write_text("".join(f"{letter}ag\t{letter} a k\n" for letter in ALPHABET * 8))
    assert choose({"train": str(words)}, "pronounce", TimeBudget("cpu")).recipe.training.precision == "auto"


def test_minutes_of_the_command_line_and_of_the_recipe_are_one(tmp_path: Path) -> None:
    path = str(written(tmp_path / "pairs.tsv", phones()))
    assert recipe_for(path, minutes=2) == recipe_for(path, ["training.minutes=2"])
    assert recipe_for(path, minutes=2).training.minutes == 2
    (tmp_path / "r.yaml").write_text("training: {steps: 5}")
    assert recipe_for(str(tmp_path / "r.yaml"), minutes=2).training.minutes == 2
    labels = recipe_for(path, task="classify", minutes=2)
    assert (labels.training.minutes, recipe_for(path, task="classify").training.minutes) == (2, None)


def test_blank_and_endless_lines_do_not_decide(tmp_path: Path) -> None:
    plain = recipe_for(str(written(tmp_path / "pairs.tsv", phones())))
    odd = [*[("", "")] * 400, *phones(), ("x " * 100_000, "y " * 100_000)]
    mixed = recipe_for(str(written(tmp_path / "pairs.tsv", odd)))
    assert mixed.tokens == plain.tokens
    assert mixed.model == plain.model
    assert mixed.evaluation == plain.evaluation


def test_shared_letters_share_a_vocabulary(tmp_path: Path) -> None:
    assert recipe_for(str(written(tmp_path / "a.tsv", sentences()))).tokens.shared
    other = {ord(letter): 0x4E00 + ord(letter) for letter in ALPHABET}
    foreign = [(source, target.translate(other)) for source, target in sentences()]
    apart = recipe_for(str(written(tmp_path / "b.tsv", foreign)))
    assert not apart.tokens.shared
    assert apart.model.tie == "target"


def test_changes_come_on_top(tmp_path: Path) -> None:
    path = str(written(tmp_path / "pairs.tsv", phones()))
    recipe = recipe_for(path, ["training.steps=7", "model.encoder.layers=3", "data.max_length=99"])
    assert (recipe.training.steps, recipe.model.encoder["layers"], recipe.data.max_length) == (7, 3, 99)
    with pytest.raises(InputError, match="steps"):
        recipe_for(path, ["training.stepz=7"])


def test_a_recipe_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("training: {steps: 5}")
    assert recipe_for(str(tmp_path / "r.yaml"), ["training.seed=3"]).training.model_dump(include={"steps", "seed"}) == {
        "steps": 5,
        "seed": 3,
    }


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty"):
        recipe_for(str(written(tmp_path / "pairs.tsv", [("a", ""), ("", "b"), (" ", " ")])))


def test_labels_without_a_task_get_a_hint(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    lines = [f"a film number {number} of some length\t{('good', 'bad')[number % 2]}\n" for number in range(200)]
    (tmp_path / "labels.tsv").write_text("".join(lines), encoding="utf-8")
    recipe_for(str(tmp_path / "labels.tsv"), [], "classify")
    assert not recwarn.list
    recipe_for(str(tmp_path / "labels.tsv"))
    assert "2 different lines" in str(recwarn.pop().message)
    assert not recwarn.list


def test_few_examples_get_a_warning(tmp_path: Path) -> None:
    (tmp_path / "few.tsv").write_text("one line\tanother line\ntwo lines\tmore lines\n" * 3, encoding="utf-8")
    with pytest.warns(UserWarning, match="6 examples are few"):
        recipe_for(str(tmp_path / "few.tsv"))


def test_a_run_that_began_on_another_device_continues_with_its_own_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, run = tmp_path / "pairs.tsv", Run(tmp_path / "run")
    pairs.write_text("".join(f"a b {number}\tA B {number}\n" for number in range(300)))
    with monkeypatch.context() as patched:
        patched.setattr("transduce.autoconfig.pick_device", lambda _: torch.device("cuda"))
        begun = resolve(recipe_for(str(pairs)))
    run.save_recipe(begun)
    with pytest.raises(InputError, match="the recipe has changed"):
        resumed_recipe(begun, resolve(recipe_for(str(pairs))), "recipe.yaml")
    continued = continued_recipe(run, str(pairs), ["training.keep=2"])
    assert continued is not None
    assert resumed_recipe(begun, resolve(continued), "recipe.yaml").training.keep == 2
    assert continued_recipe(run, str(tmp_path / "other.tsv"), []) is None
    assert continued_recipe(Run(tmp_path / "none"), str(pairs), []) is None


def test_names_of_the_hub_are_no_files() -> None:
    (corpus,) = parse({"data": {"train": "hf://opus:de-en:train"}}).data.train
    assert corpus.absolute() == corpus
