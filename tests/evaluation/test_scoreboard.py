"""The scoreboard: every row has a recipe that completes, and a reproduction writes and continues its record."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_fixtures import make

import transduce
from transduce.errors import InputError
from transduce.evaluation import reproduction
from transduce.evaluation.evaluate import METRICS
from transduce.evaluation.held_out import HeldOutExample
from transduce.evaluation.reproduction import Reproduction, margins, recipe_content, reproduce, score_by_kind
from transduce.evaluation.scoreboard import ROWS, find_row, simple_tokens
from transduce.recipe import override, parse
from transduce.recipe.build import build_model, complete_recipe, count_parameters
from transduce.run import Run
from transduce.training.trainer import Outcome

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_recipes_metrics_and_figures(name):
    row = ROWS[name]
    assert set(row.metrics) <= {*METRICS}
    assert row.published or row.remark
    assert all(set(one.scores) <= set(row.metrics) for one in row.published)
    if row.recipe.startswith("task "):
        return
    settings = [setting.replace("{data}", "data") for setting in row.settings]
    recipe = complete_recipe(parse(override(yaml.safe_load((RECIPES / row.recipe).read_text()), settings)))
    if row.parameters is not None:
        vocabulary = (65, 65) if "shakespeare" in name else (8000, 6000)  # at least those of the data
        with torch.device("meta"):
            assert count_parameters(build_model(recipe.model, *vocabulary)) <= row.parameters


def test_an_unknown_row_is_named():
    with pytest.raises(InputError, match="did you mean"):
        find_row("cmudikt")


def write_scan(folder: Path, name: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = [(rng.choice(["walk", "run"]), rng.choice(["", " twice"])) for _ in range(count)]
    actions = [" ".join([f"I_{verb.upper()}"] * (2 if times else 1)) for verb, times in lines]
    text = [f"{verb}{times}\t{action}\n" for (verb, times), action in zip(lines, actions, strict=True)]
    (folder / name).write_text("".join(text))


@pytest.mark.slow
def test_a_reproduction_writes_its_record_and_continues_it(tmp_path):
    write_scan(tmp_path, "simple.train.tsv", 60, seed=1)
    write_scan(tmp_path, "simple.test.tsv", 10, seed=2)
    task = Reproduction("scan-simple", tmp_path, tmp_path / "runs", tmp_path, RECIPES, quick=True)
    reported: list[str] = []
    record = reproduce(task, 1, reported.append)
    with ThreadPoolExecutor(2) as pool:  # as `--jobs 2`, without other processes
        again = reproduce(task, 2, reported.append, pool)
    assert reported[1] == "seed 1: in the record"
    assert again["seeds"]["1"] == record["seeds"]["1"]
    assert again == json.loads(task.record_file.read_text())
    result = again["seeds"]["2"][""]
    assert result["updates"] == [8]
    assert result["leakage"]["examples"] == result["leakage"]["pairs"] == 10  # four different lines in all
    assert result["lines"] == 10
    values = [again["seeds"][seed][""]["scores"]["exact"]["value"] for seed in "12"]
    assert again["scores"]["exact"]["mean"] == pytest.approx(sum(values) / 2)
    assert next(margins(task.row, again))[2] == pytest.approx(sum(values) / 2 - 99.8)
    assert again["margins"] == [
        {"system": "best recurrent", "metric": "exact", "points": next(margins(task.row, again))[2]}
    ]
    recipe = again["content"][""]
    assert recipe["model"]["encoder"]["kind"] == "recurrent"
    assert "seed" not in recipe["training"]
    assert "train" not in recipe["data"]
    with pytest.raises(InputError, match="no such file"):
        reproduce(Reproduction("scan-jump", tmp_path, tmp_path / "runs", tmp_path, RECIPES), 1)


def test_every_ensemble_of_a_row_has_the_same_networks(tmp_path):
    task = Reproduction("g2p2021-low-ensemble", tmp_path)
    first, second = ([task.network(member) for member in task.members(seed)] for seed in (1, 2))
    assert first == second == ["normal", "edit transducer"] * 2 + ["normal"]
    assert len({task.run_folder("ice", member) for seed in (1, 2) for member in task.members(seed)}) == 10


def test_an_interrupted_training_makes_no_record(tmp_path, monkeypatch):
    write_scan(tmp_path, "simple.train.tsv", 60, seed=1)
    write_scan(tmp_path, "simple.test.tsv", 10, seed=2)
    task = Reproduction("scan-simple", tmp_path, tmp_path / "runs", tmp_path, RECIPES, quick=True)
    outcome = Outcome(3, None, None, "interrupted", {}, signal=15)
    monkeypatch.setattr(reproduction, "train", lambda *arguments, **options: SimpleNamespace(outcome=outcome))
    with pytest.raises(InputError, match="interrupted after update 3"):
        reproduce(task, 1, print)
    assert not task.record_file.exists()


def test_a_record_is_continued_with_the_same_recipe_and_version_only(tmp_path, monkeypatch):
    write_scan(tmp_path, "simple.train.tsv", 60, seed=1)
    write_scan(tmp_path, "simple.test.tsv", 10, seed=2)
    task = Reproduction("scan-simple", tmp_path, tmp_path / "runs", tmp_path, RECIPES)
    result = {"scores": {"exact": {"value": 90.0}}}
    known = {"version": transduce.__version__, "content": {"": recipe_content(task, "")}, "seeds": {"1": {"": result}}}
    monkeypatch.setattr("transduce.evaluation.reproduction.one_result", lambda task, part, seed: result)

    def seeds_kept(record: dict) -> bool:
        task.record_file.write_text(json.dumps(record))
        reported: list[str] = []
        reproduce(task, 2, reported.append)
        return reported[0] == "seed 1: in the record"

    assert seeds_kept(known)
    assert not seeds_kept({**known, "version": "0.0.0"})
    other = {**known["content"][""], "generation": {"strategy": "greedy"}}
    assert not seeds_kept({**known, "content": {"": other}})


def write_sentences(folder: Path, row: str) -> None:
    """Data sets of the form that a row reads, of words of the small BERT."""
    rng = random.Random(row)
    for name, count in (("train", 40), ("dev", 12), ("test", 12)):
        lines = []
        for _ in range(count):
            words, other = ([f"w{rng.randrange(15)}" for _ in range(rng.randint(2, 5))] for _ in range(2))
            labels = {
                "sst2-minilm": str(int("w1" in words)),
                "ud-ewt-minilm": " ".join("ODD" if int(word[1:]) % 2 else "EVEN" for word in words),
                "stsb": f"{' '.join(other)}\t{rng.random() * 5:.1f}",
            }
            lines.append(f"{' '.join(words)}\t{labels[row]}\n")
        (folder / f"{name}.tsv").write_text("".join(lines))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*examples are few")
@pytest.mark.parametrize("row", ["sst2-minilm", "ud-ewt-minilm", "stsb"])
def test_rows_train_an_encoder_of_a_hugging_face_folder(row: str, tmp_path: Path) -> None:
    write_sentences(tmp_path, row)
    (tmp_path / "minilm").mkdir()
    make("bert", tmp_path / "minilm")
    task = Reproduction(row, tmp_path, tmp_path / "runs", tmp_path, RECIPES, quick=True)
    record = reproduce(task, 1, lambda line: None)
    assert record["seeds"]["1"][""]["lines"] == 12
    assert -100 <= record["scores"][ROWS[row].metrics[0]]["mean"] <= 100
    log = (task.run_folder("", 1) / "log.jsonl").read_text().splitlines()
    start = next(event for event in map(json.loads, log) if event.get("event") == "init")
    imported = transduce.load(tmp_path / "minilm").network.state_dict()
    assert {name for name in imported if name.startswith("encoder.")} <= set(start["runs"][0]["loaded"])
    trained = Run(task.run_folder("", 1)).recipe().model
    assert trained.scale_embedding is False  # as in the imported model: its embeddings would be 20 times as large


def test_scan_is_cut_by_the_length_of_the_actions(tmp_path):
    for name, size in (("length.train.tsv", 26), ("length.test.tsv", 27)):
        (tmp_path / name).write_text("x\t" + " ".join(["I_RUN"] * size) + "\n" + "y\tI_RUN\n")
    files = ROWS["scan-cutoff-26"].prepare(tmp_path, tmp_path / "made", "")
    sizes = {
        name: [len(line.split("\t")[1].split()) for line in Path(path).read_text().splitlines()]
        for name, path in files.items()
    }
    assert sizes == {"train": [26, 1, 1], "test": [27]}


def test_preparation_of_recordings_shakespeare_and_inflection(tmp_path):
    (tmp_path / "recordings").mkdir()
    for digit, speaker, take in ((1, "theo", 0), (2, "theo", 7), (3, "lucas", 9)):
        (tmp_path / "recordings" / f"{digit}_{speaker}_{take}.wav").touch()
    rows = {part: ROWS["fsdd"].prepare(tmp_path, tmp_path / "made", part) for part in ("", "theo")}
    tests = {part: Path(files["test"]).read_text().count("\n") for part, files in rows.items()}
    assert tests == {"": 2, "theo": 2}  # the second preparation is in the same folder
    (tmp_path / "input.txt").write_text("0123456789" * 3)
    files = ROWS["shakespeare"].prepare(tmp_path, tmp_path / "text", "")
    assert [Path(files[name]).read_text() for name in ("train", "dev")] == ["0123456789" * 2 + "0123456", "789"]
    for name in ("train-low", "dev", "test"):
        (tmp_path / f"spanish-{name}.tsv").write_text("ser\tera\tV;IND;3\n")
    files = ROWS["inflection2017-low"].prepare(tmp_path, tmp_path / "forms", "spanish")
    assert Path(files["test"]).read_text() == "ser\tV;IND;3\tera\n"


def test_scores_by_kind_count_the_lines_of_each():
    lines = [HeldOutExample("s", (reference,)) for reference in ("a", "b", "c")]
    found = score_by_kind("exact", ["a", "x", "c"], lines, ["one", "one", "two"])
    assert found == {"one": {"value": 50.0, "lines": 2}, "two": {"value": 100.0, "lines": 1}}


def test_tokens_of_the_tutorials_are_lower_cased_words_and_marks():
    assert simple_tokens("Zwei Männer, die's mögen.") == "zwei männer , die's mögen ."
