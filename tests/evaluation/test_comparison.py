"""Comparison of systems, and their candidates: end to end with tiny models."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from transduce.errors import InputError
from transduce.evaluation.comparison import (
    Comparison,
    compare,
    count_parameters,
    draw_table,
    match_parameters,
    to_markdown,
)
from transduce.flow import Example
from transduce.inference import load
from transduce.recipe import ModelRecipe, build, parse
from transduce.recipe import load as load_recipe
from transduce.run import Run
from transduce.synthetic.algorithmic import split
from transduce.training.experiment import train
from transduce.training.report import read_log

pytestmark = pytest.mark.slow

RECURRENT = {"kind": "recurrent", "width": 32, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 16, "heads": 2, "ff_width": 32, "layers": 1, "dropout": 0.0}
GRU = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "bahdanau"}}
BLOCKS = {"encoder": TRANSFORMER, "decoder": TRANSFORMER}


@dataclass(frozen=True)
class Workspace:
    """Data and recipes of these tests."""

    folder: Path
    gru: Path
    blocks: Path
    test: Path

    def recipe(self, name: str, model: dict[str, Any], **changes: Any) -> Path:
        content = {
            "data": {
                "train": str(self.folder / "train.tsv"),
                "dev": str(self.folder / "dev.tsv"),
                "test": str(self.test),
                "cache": str(self.folder / "cache"),
                **changes.pop("data", {}),
            },
            "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
            "model": model,
            "training": {
                "steps": 30,
                "batch_tokens": 400,
                "validate_every": 15,
                "checkpoint_every": 15,
                "validate_examples": 10,
                "schedule": {"warmup": 5},
                "device": "cpu",
                **changes.pop("training", {}),
            },
            "generation": {"strategy": "greedy", "max_length": 12},
            "evaluation": {"metrics": ["exact", "wer"], "resamples": 200},
            **changes,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


def write_pairs(path: Path, examples: list[Example]) -> None:
    path.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples), encoding="utf-8")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    parts = zip(("train", "dev", "test"), split("reverse", 400, 20, 60, length=(2, 8), symbols="abcdef"), strict=True)
    for name, examples in parts:
        write_pairs(folder / f"{name}.tsv", examples)
    workspace = Workspace(folder, folder / "gru.yaml", folder / "blocks.yaml", folder / "test.tsv")
    workspace.recipe("gru", GRU)
    workspace.recipe("blocks", BLOCKS)
    return workspace


@pytest.fixture(scope="module")
def compared(workspace: Workspace) -> Comparison:
    """Two recipes with equal parameters, trained once for most tests."""
    return compare([workspace.gru, workspace.blocks], folder=workspace.folder / "out", equal="parameters")


def forbid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this must not be trained again")

    monkeypatch.setattr("transduce.evaluation.comparison.train", refuse)


def test_scores_are_those_of_the_saved_outputs(workspace: Workspace, compared: Comparison) -> None:
    references = [line.split("\t")[1] for line in workspace.test.read_text().splitlines()]
    for system in compared.systems:
        outputs = (workspace.folder / "out" / f"{system.name}.txt").read_text().split("\n")[:-1]
        assert len(outputs) == len(references) == compared.lines
        right = sum(a == b for a, b in zip(outputs, references, strict=True))
        score = system.evaluation.scores["exact"]
        assert score.value == pytest.approx(100 * right / len(references))
        assert score.low <= score.value <= score.high


def test_saved_outputs_are_those_of_the_run(workspace: Workspace, compared: Comparison) -> None:
    sources = [line.split("\t")[0] for line in workspace.test.read_text().splitlines()]
    model = load(workspace.folder / "out" / "gru", device="cpu")
    written = (workspace.folder / "out" / "gru.txt").read_text().splitlines()
    assert [one.text for one in model.generate(sources)] == written


def test_training_cost_and_generation_speed_are_reported(workspace: Workspace, compared: Comparison) -> None:
    for system in compared.systems:
        assert system.parameters == load(system.run, device="cpu").parameters
        assert system.training.updates == 30
        updates = [line for line in read_log(Path(system.run) / "log.jsonl") if line["kind"] == "update"]
        assert system.training.minutes == pytest.approx(updates[-1]["seconds"] / 60)
        rates = [line["tokens_per_second"] for line in updates]
        assert system.training.tokens_per_second is not None
        assert min(rates) <= system.training.tokens_per_second <= max(rates)
        assert system.training.peak_memory
        assert system.generation.tokens_per_second > system.generation.sentences_per_second > 0


def test_table_json_markdown_and_plot_are_written(workspace: Workspace, compared: Comparison) -> None:
    folder = workspace.folder / "out"
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((folder / "compare.json").read_text())
    assert [system["name"] for system in content["systems"]] == ["gru", "blocks"]
    stream = io.StringIO()
    draw_table(compared, Console(file=stream, width=80))  # nothing is cut or broken in two
    assert to_markdown(compared) == (folder / "compare.md").read_text()
    for text in (stream.getvalue(), to_markdown(compared)):
        for system in compared.systems:
            assert system.name in text
            assert f"{system.parameters:,}" in text
            assert f"{system.evaluation.scores['wer'].value:.2f}" in text
        for contest in compared.tests:
            assert contest.verdict in text
    header, rule, *rows = [line for line in to_markdown(compared).split("\n") if line.startswith("|")]
    assert len(rows) == 2
    assert all(row.count("|") == header.count("|") == rule.count("|") for row in rows)


def test_each_metric_tests_the_best_system_against_the_others(compared: Comparison) -> None:
    assert [contest.metric for contest in compared.tests] == ["exact", "wer"]
    for contest in compared.tests:
        values = {one.name: one.evaluation.scores[contest.metric].value for one in compared.systems}
        assert values[contest.best] == (max if contest.metric == "exact" else min)(values.values())
        assert contest.result.difference == pytest.approx(values[contest.best] - values[contest.other])
        assert ("no significant difference" in contest.verdict) == (contest.result.p_value >= 0.05)


def test_parameters_are_matched(workspace: Workspace, compared: Comparison) -> None:
    first, second = (system.parameters for system in compared.systems)
    unscaled = load_size(workspace.blocks, workspace.folder / "out" / "blocks")
    assert abs(second - first) <= 0.03 * first < abs(unscaled - first)


def load_size(recipe: Path, run: Path) -> int:
    model = build.complete_recipe(parse(yaml.safe_load(recipe.read_text()))).model
    return count_parameters(model, *(tokenizer.size for tokenizer in Run(run).tokenizers()))


def test_finished_runs_are_reused(workspace: Workspace, compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_training(monkeypatch)
    again = compare([workspace.gru, workspace.blocks], folder=workspace.folder / "out", equal="parameters")
    assert [one.evaluation for one in again.systems] == [one.evaluation for one in compared.systems]
    assert again.tests == compared.tests


def test_a_run_with_changed_data_is_not_reused(workspace: Workspace, compared: Comparison, tmp_path: Path) -> None:
    train_file = tmp_path / "train.tsv"
    train_file.write_bytes((workspace.folder / "train.tsv").read_bytes())
    recipe = workspace.recipe("moving", GRU, data={"train": str(train_file)}, training={"steps": 2})
    compare([recipe], folder=tmp_path / "out")
    write_pairs(train_file, split("reverse", 300, 1, 1, seed=5, length=(2, 8), symbols="abcdef")[0])
    with pytest.raises(InputError, match=r"data\.train was"):
        compare([recipe], folder=tmp_path / "out")


def test_an_unfinished_run_is_resumed(workspace: Workspace, tmp_path: Path) -> None:
    short = workspace.recipe("going", GRU, training={"steps": 15})
    train(short, tmp_path / "going")
    comparison = compare([short], folder=tmp_path, overrides=["training.steps=20"])
    assert comparison.systems[0].training.updates == 20
    assert any(line.get("event") == "resumed" for line in read_log(tmp_path / "going" / "log.jsonl"))
    assert comparison.tests == ()


def test_an_interruption_stops_the_comparison(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **names: Any) -> Any:
        trained = train(*arguments, **names)
        return replace(trained, outcome=replace(trained.outcome, reason="interrupted"))

    monkeypatch.setattr("transduce.evaluation.comparison.train", interrupted)
    with pytest.raises(KeyboardInterrupt, match="gru"):
        compare([workspace.gru, workspace.blocks], folder=tmp_path, overrides=["training.steps=1"])
    assert not (tmp_path / "compare.json").exists()


def test_existing_runs_are_used_unchanged(
    workspace: Workspace, compared: Comparison, tmp_path: Path, monkeypatch: Any
) -> None:
    forbid_training(monkeypatch)
    runs = [workspace.folder / "out" / name for name in ("blocks", "gru")]
    before = [Run(run).recipe_file.read_bytes() for run in runs]
    said = io.StringIO()
    comparison = compare(runs, folder=tmp_path, console=Console(file=said, width=200))
    assert [one.parameters for one in comparison.systems] == [one.parameters for one in compared.systems][::-1]
    assert comparison.data == "the test set of blocks"
    assert "using the run in" in said.getvalue()
    assert [Run(run).recipe_file.read_bytes() for run in runs] == before


def test_a_recipe_is_resized_to_an_existing_run(workspace: Workspace, compared: Comparison, tmp_path: Path) -> None:
    run = workspace.folder / "out" / "gru"
    comparison = compare([run, workspace.blocks], folder=tmp_path, overrides=["training.steps=1"], equal="parameters")
    first, second = (system.parameters for system in comparison.systems)
    assert abs(second - first) <= 0.03 * first
    kept = [(folder / "tokenizer.source.json").read_bytes() for folder in (run, tmp_path / "blocks")]
    assert kept[0] == kept[1]


def test_different_training_data_is_refused(workspace: Workspace, compared: Comparison, tmp_path: Path) -> None:
    write_pairs(tmp_path / "other.tsv", split("reverse", 200, 1, 1, seed=9, symbols="abcdef")[0])
    other = workspace.recipe("other", GRU, data={"train": str(tmp_path / "other.tsv")}, training={"steps": 1})
    run = workspace.folder / "out" / "gru"
    with pytest.raises(InputError, match=r"gru and other differ in data\.train:"):
        compare([run, other], folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fair = compare([run, other], folder=tmp_path / "out", data=str(workspace.test))
    assert (fair.data, fair.lines) == (str(workspace.test), 60)


def test_another_split_of_the_same_pairs_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    one, two = (
        workspace.recipe(f"seed{seed}", GRU, data={"dev": [], "test": []}, training={"seed": seed, "steps": 1})
        for seed in (1, 2)
    )
    with pytest.raises(InputError, match=r"training\.seed"):
        compare([one, two], folder=tmp_path)
    held_out = compare([one], folder=tmp_path)
    assert held_out.data == "the development set of seed1"
    assert held_out.lines == 80  # a fifth of 400


def test_equal_training_time(workspace: Workspace, tmp_path: Path) -> None:
    changes = ["training.steps=100000", "training.patience=1", "training.log_every=1"]
    comparison = compare(
        [workspace.gru, workspace.blocks], folder=tmp_path, overrides=changes, equal="minutes", minutes=0.01
    )
    for system in comparison.systems:
        run = Run(Path(system.run))
        assert run.metrics()["training"]["reason"] == "minutes"
        assert run.recipe().training.patience is None  # nobody leaves early
        assert system.training.minutes is not None
        assert 0.005 < system.training.minutes < 0.1  # the last validation is part of the time


def test_candidates_of_the_same_name_get_unique_names(workspace: Workspace, tmp_path: Path) -> None:
    comparison = compare([workspace.gru, workspace.gru], folder=tmp_path, overrides=["training.steps=1"])
    assert [system.name for system in comparison.systems] == ["gru", "gru-2"]
    assert {contest.verdict for contest in comparison.tests} == {"no significant difference (p = 1.00)"}


def test_invalid_comparisons_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        compare([], folder=tmp_path)
    with pytest.raises(InputError, match="no such recipe"):
        compare([tmp_path / "missing.yaml"], folder=tmp_path)
    with pytest.raises(InputError, match="not a run directory"):
        compare([tmp_path], folder=tmp_path)
    with pytest.raises(InputError, match="needs a time"):
        compare([workspace.gru], folder=tmp_path, equal="minutes")
    with pytest.raises(InputError, match="unknown metric 'exakt'"):
        compare([workspace.gru], folder=tmp_path, overrides=["evaluation.metrics=[exakt]"])


MODELS = st.sampled_from(
    [
        GRU,
        {"encoder": {**RECURRENT, "width": 48}, "decoder": {**RECURRENT, "context": "initial"}},
        {"encoder": TRANSFORMER, "decoder": {**TRANSFORMER, "heads": 4, "position": "rotary"}},
        {"encoder": {**RECURRENT, "width": 16}, "decoder": {**TRANSFORMER, "score": "dot"}},
    ]
)


@settings(max_examples=6, deadline=None)
@given(model=MODELS, wanted=st.integers(100_000, 2_000_000), vocabulary=st.integers(10, 200))
def test_parameter_matching_is_close_and_keeps_heads_divisible(
    model: dict[str, Any], wanted: int, vocabulary: int
) -> None:
    filled = build.complete_recipe(parse({"model": model})).model
    matched = match_parameters(filled, wanted, vocabulary, vocabulary)
    assert abs(count_parameters(matched, vocabulary, vocabulary) - wanted) <= 0.03 * wanted
    for part in (matched.encoder, matched.decoder):
        assert part is not None
        assert part["width"] % (2 * part.get("heads", 1)) == 0
        assert part.get("ff_width", 0) % 2 == 0
    if model["encoder"]["width"] == model["decoder"]["width"]:
        assert matched.encoder["width"] == matched.decoder["width"]  # type: ignore[index]
    assert strip(matched) == strip(filled)  # nothing else was touched


def test_the_dates_recipes_have_equal_parameters() -> None:
    """627 characters are read and 15 written in the generated dates."""
    folder = Path(__file__).parents[2] / "recipes" / "dates"
    models = [build.complete_recipe(load_recipe(path)).model for path in sorted(folder.glob("*.yaml"))]
    assert len(models) == 3
    sizes = [count_parameters(model, 627, 15) for model in models]
    assert max(sizes) <= 1.03 * min(sizes)


@settings(max_examples=5, deadline=None)
@given(wanted=st.integers(1_000, 40_000), vocabulary=st.integers(5, 100))
def test_parameter_matching_finds_the_nearest_width(wanted: int, vocabulary: int) -> None:
    """Small models cannot always come within 3 %; then the width is the nearest one."""
    filled = build.complete_recipe(parse({"model": GRU})).model

    def distance(width: int) -> int:
        parts = {name: {**getattr(filled, name), "width": width} for name in ("encoder", "decoder")}
        return abs(count_parameters(filled.model_copy(update=parts), vocabulary, vocabulary) - wanted)

    matched = match_parameters(filled, wanted, vocabulary, vocabulary)
    assert matched.encoder is not None
    assert distance(matched.encoder["width"]) == min(map(distance, range(2, 64, 2)))


def strip(model: ModelRecipe) -> Any:
    parts = (model.encoder, model.decoder)
    return [{key: value for key, value in (part or {}).items() if key not in ("width", "ff_width")} for part in parts]
