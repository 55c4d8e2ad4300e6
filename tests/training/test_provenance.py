"""Provenance of weights: recipe, tokenizers, data and environment recorded in checkpoints, and changes of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fault_records import record
from run_fixtures import RECURRENT, Command, colour_pairs, settings
from training_fixtures import RecordingReport, TinyBatches, TinyModel, run_training
from training_fixtures import settings as training_settings

import transduce
from transduce.errors import InputError
from transduce.run import Run
from transduce.training.checkpoint import CheckpointManager
from transduce.training.report import read_log
from transduce.training.resume import Provenance
from transduce.training.trainer import Outcome, train

MODEL = {"encoder": {**RECURRENT, "width": 8}, "decoder": {**RECURRENT, "width": 8, "context": "luong"}}
LENGTHS: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "validate_every": 2, "patience": None}


def write(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def recipe(folder: Path, **training: Any) -> dict[str, Any]:
    content = settings(folder / "train.tsv", MODEL, "words", **training)
    content["data"].update(dev=str(folder / "dev.tsv"), cache=str(folder / "cache"))
    content["evaluation"] = {"metrics": ["exact"], "resamples": 2}
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("provenance")
    write(folder / "train.tsv", colour_pairs(60))
    write(folder / "dev.tsv", colour_pairs(5, seed=2))
    transduce.train(recipe(folder, **LENGTHS), folder / "run")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run; the data are restored afterwards."""
    files = {path: path.read_bytes() for path in trained.glob("*.tsv")}
    yield Path(shutil.copytree(trained / "run", tmp_path / "run"))
    for path, content in files.items():
        path.write_bytes(content)


def continued(run: Path, *allowed: str, **training: Any) -> Outcome:
    folder = Path(Run(run).recorded_recipe().data.train[0].path or "").parent
    made = recipe(folder, **LENGTHS | training)
    return transduce.train(made, run, resume=True, allow_changes=allowed).outcome


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    change(content)
    (run / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


READERS = ("generate", "evaluate", "export", "train")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer.source.json", "tokenizer.target.json"])
def test_a_changed_file_of_a_run_is_refused(name: str, reader: str, run: Path, command: Command) -> None:
    path = run / name
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b"clip: 1.0", b"clip: 2.0").replace(b'"red"', b'"rot"').replace(b'"RED"', b'"ROT"')
    )
    assert path.read_bytes() != content
    options = {"export": (run.with_name("out.zip"), "--to", "bundle"), "train": ("--run", run, "--resume")}
    source = run / "recipe.yaml" if reader == "train" else run
    called = command(reader, source, *options.get(reader, ()), stdin=b"red\n")
    assert called.code == 2
    assert str(path) in called.err
    hashes = r"SHA-256 expected \w{64}, found \w{64}"
    edited = (reader, name) == ("train", "recipe.yaml")
    assert re.search(r"training\.clip: 1\.0 -> 2\.0" if edited else hashes, called.err)


def test_every_truncation_of_a_recipe_is_refused(run: Path) -> None:
    path = run / "recipe.yaml"
    content = path.read_bytes()
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        with pytest.raises(InputError):
            Run(run).recipe()


def test_an_edited_recipe_is_shown_as_a_diff_and_restored_or_changed_by_name(run: Path, command: Command) -> None:
    before = (run / "recipe.yaml").read_bytes()
    edit(run, lambda content: content["generation"].update(beam=9))
    with pytest.raises(InputError, match=r"generation\.beam: 5 -> 9\n.*edit-recipe"):
        transduce.load(run)
    assert command("edit-recipe", run).code == 0
    assert (run / "recipe.yaml").read_bytes() == before
    (run / "recipe.yaml").unlink()
    with pytest.raises(InputError, match=r"checkpoints but no recipe\.yaml\n.*edit-recipe"):
        continued(run)
    assert command("edit-recipe", run).code == 0
    assert (run / "recipe.yaml").read_bytes() == before
    called = command("edit-recipe", run, "generation.beam=9")
    assert (called.code, called.out) == (0, "generation.beam: 5 -> 9\n")
    assert transduce.load(run).recipe.generation.beam == 9
    called = command("edit-recipe", run, "model.encoder.width=16")
    assert (called.code, "model.encoder.width" in called.err) == (2, True)
    assert transduce.load(run).recipe.generation.beam == 9


def test_a_recipe_edited_by_hand_is_not_resumed_silently(run: Path) -> None:
    edit(run, lambda content: content["training"].update(clip=7.0))
    with pytest.raises(InputError, match=r"training\.clip: 1\.0 -> 7\.0\n.*--allow-change training\.clip"):
        continued(run, steps=6)
    edit(run, lambda content: content["training"].update(clip=1.0, log_every=3))  # has no effect on the weights
    assert continued(run, steps=6).step == 6
    assert Run(run).recipe().training.steps == 6


def test_a_changed_recipe_key_is_allowed_by_its_name(run: Path) -> None:
    with pytest.raises(InputError, match=r"training\.clip: 1\.0 -> 7\.0"):
        continued(run, "training.accumulate", steps=6, clip=7.0)
    assert continued(run, "training.clip", steps=6, clip=7.0).step == 6
    assert Run(run).recipe().training.clip == 7.0
    assert continued(run, steps=6, clip=7.0).step == 6  # it is the recipe of the run now
    with pytest.raises(InputError, match=r"cannot resume: training\.ema was 0\.0 and is now 0\.5"):
        continued(run, "training", steps=6, clip=7.0, ema=0.5)


def test_changed_training_data_are_noticed_whatever_the_first_batch(run: Path, trained: Path) -> None:
    pairs = colour_pairs(60)
    write(trained / "train.tsv", [*pairs[:-1], (pairs[-1][0], "RED")])
    with pytest.raises(InputError, match=r"data\.train was \w{64} and is now \w{64}\n.*--allow-change data\.train"):
        continued(run, steps=6)
    assert continued(run, "data.train", steps=6).step == 6
    texts = [line["text"] for line in read_log(run / "log.jsonl") if line.get("event") == "changed"]
    assert "data.train has changed, as allowed" in texts
    record("data changed between stop and resume", "refused with both hashes, and continued where it is allowed", 1, 1)


def test_a_replaced_development_set_is_noticed(run: Path, trained: Path) -> None:
    write(trained / "dev.tsv", colour_pairs(5, seed=3))
    with pytest.raises(InputError, match=r"data\.dev was .*\n.*--allow-change data\.dev"):
        continued(run, steps=6)
    outcome = continued(run, "data.dev", steps=6)
    assert (outcome.step, outcome.best_step) == (6, 6)  # scores on the old set are not compared with new ones


def best_run(folder: Path) -> CheckpointManager:
    """The second of three validations is the best."""
    values = iter([3.0, 1.0, 2.0])
    run_training(folder, steps=12, validate=lambda model: {"loss": next(values)})
    shutil.rmtree(folder / "final")
    return CheckpointManager(folder)


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 1', b'{"step": 12, "value": 1.0}', b"null", None])
def test_a_damaged_best_file_never_makes_the_newest_the_best(content: bytes | None, tmp_path: Path) -> None:
    checkpoints = best_run(tmp_path)
    assert checkpoints.best_step() == 8
    if content is None:
        (tmp_path / "best.json").unlink()
    else:
        (tmp_path / "best.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"best\.json .*records step 8 as the best"):
        best = checkpoints.for_inference()
    assert best is not None
    assert best.step == 8
    run_training(tmp_path, steps=12, validate=lambda model: {"loss": 2.0})  # a resumed run writes it anew
    assert json.loads((tmp_path / "best.json").read_bytes()) == {"step": 8, "value": 1.0}


def test_a_changed_environment_is_told_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(steps: int) -> list[str]:
        report = RecordingReport()
        run_training(tmp_path, steps=steps, report=report)
        return [text for kind, _, text in report.events if kind == "environment"]

    assert resumed(5) == resumed(6) == []
    torch.set_num_threads(2)
    try:
        (text,) = resumed(7)
    finally:
        torch.set_num_threads(1)
    assert text.endswith("threads: 1 -> 2")
    assert resumed(8) != []
    monkeypatch.setenv("TRANSDUCE_NATIVE", "0")
    (text,) = resumed(9)
    assert text.endswith("native kernels: True -> False")
    assert CheckpointManager(tmp_path).recorded("environment")["torch"] == torch.__version__


def test_an_allowed_change_of_the_first_batch_continues_at_the_next_epoch(tmp_path: Path) -> None:

    def go(steps: int, rows: int, allowed: tuple[str, ...] = ()) -> CheckpointManager:
        checkpoints = CheckpointManager(tmp_path)
        given = Provenance(allowed_changes=allowed)
        train(TinyModel(), TinyBatches(rows), training_settings(steps=steps), checkpoints=checkpoints, provenance=given)
        return checkpoints

    go(5, rows=6)
    with pytest.warns(UserWarning, match="the first batch has changed"):
        checkpoints = go(6, 5, ("data",))
    assert checkpoints.recorded("progress", final=False)["position"] == {"epoch": 1, "index": 1}
