"""Objectives in recipes: training, teachers, options, resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import transduce
from transduce.errors import InputError
from transduce.objectives import OBJECTIVES, CrossEntropy, Distillation, RDrop
from transduce.recipe import build, parse
from transduce.recipe.registry import options
from transduce.training.experiment import TrainingResult, train
from transduce.training.resolve import resolve

PART = {"kind": "recurrent", "width": 16}
OWN = '''
from transduce.objectives import CrossEntropy

class Louder(CrossEntropy):
    """cross-entropy"""
'''


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efg" for c in "hij"]
    file.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")
    return file


def recipe(pairs: Path, objective: dict[str, Any] | None = None, size: str = "chars") -> dict[str, Any]:
    training: dict[str, Any] = {"steps": 4, "batch_tokens": 64, "log_every": 1, "validate_every": 4}
    return {
        "data": {"train": str(pairs), "dev_size": 4},
        "tokens": {"source": {"kind": size}, "target": {"kind": size}},
        "model": {"encoder": PART, "decoder": PART},
        "training": training | ({} if objective is None else {"objective": objective}),
        "evaluation": {"metrics": ["exact"], "resamples": 5},
    }


@pytest.fixture(scope="module")
def teacher(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return train(recipe(pairs), tmp_path_factory.mktemp("teacher") / "run")


@pytest.mark.parametrize("kind", sorted(OBJECTIVES))
def test_every_objective_trains_from_a_recipe(kind: str, pairs: Path, teacher: TrainingResult, tmp_path: Path) -> None:
    objective = {"kind": kind} | ({"teacher": str(teacher.run.folder)} if kind == "distillation" else {})
    wanted = recipe(pairs, objective)
    if OBJECTIVES[kind].uses_embeddings:
        wanted["tokens"]["shared"] = True
        wanted["model"] = {"encoder": PART, "head": {"kind": "embedder"}}
        wanted["evaluation"]["metrics"] = ["recall@1"]
    if OBJECTIVES[kind].uses_similarities:
        rated = tmp_path / "rated.tsv"
        rated.write_text(
            "".join(f"{line}\t{number % 6}\n" for number, line in enumerate(pairs.read_text().splitlines()))
        )
        wanted["data"]["train"] = str(rated)
        wanted["evaluation"]["metrics"] = ["recall@1", "spearman"]
    if kind == "skip_gram":
        text = tmp_path / "text.txt"
        text.write_text(pairs.read_text().replace("\t", " "))
        wanted["data"] |= {"format": "text", "noise": {"kind": "nothing"}, "train": str(text)}
        wanted["model"] = {"encoder": {"kind": "identity", "width": 8}, "head": {"kind": "cbow"}}
    if kind == "prefix_lm":
        wanted["tokens"]["shared"] = True
        wanted["model"] = {"decoder": PART}
    if kind == "ctc":
        wanted["model"] = {"encoder": PART, "head": {"kind": "ctc"}}
    if kind == "joint_ctc":
        wanted["model"]["ctc"] = {}
    if kind == "reinforce":
        wanted["model"]["decoder"] = {**PART, "context": {"kind": "luong", "normaliser": "sampled"}}
    if kind == "imitation":
        wanted["tokens"]["shared"] = True
        wanted["model"]["decoder"] = {"kind": "edit_transducer", "width": 16}
    if kind == "guided_alignment":
        linked = tmp_path / "linked.tsv"
        linked.write_text("".join(f"{line}\t0-0\n" for line in pairs.read_text().splitlines()))
        wanted["data"]["train"] = {"path": str(linked), "alignment": "column3"}
    trained = train(wanted, tmp_path / "run")
    assert trained.outcome.step == 4
    saved = transduce.load(tmp_path / "run").recipe.training.objective
    assert saved["kind"] == kind
    assert saved.keys() == {"kind", *options(OBJECTIVES[kind])}  # every option is written down
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    entry = next(line for line in lines if line["kind"] == "update")
    assert set(OBJECTIVES[kind].parts) <= entry.keys()


def test_pairs_without_a_gold_similarity_are_refused(pairs: Path, tmp_path: Path) -> None:
    wanted = recipe(pairs, {"kind": "cosent"})
    wanted["tokens"]["shared"] = True
    wanted["model"] = {"encoder": PART, "head": {"kind": "embedder"}}
    wanted["evaluation"]["metrics"] = ["recall@1"]
    with pytest.raises(InputError, match="no gold similarity") as error:
        train(wanted, tmp_path / "run")
    assert error.value.where.startswith(str(pairs))
    rated = tmp_path / "rated.tsv"
    rated.write_text("".join(f"{line}\tvery\n" for line in pairs.read_text().splitlines()))
    wanted["data"]["train"] = str(rated)
    with pytest.raises(InputError, match="'very' is not a number"):
        train(wanted, tmp_path / "other")


def test_a_teacher_is_loaded_once_and_not_changed(pairs: Path, teacher: TrainingResult, tmp_path: Path) -> None:
    before = transduce.load(teacher.run.folder).network.state_dict()
    student = recipe(pairs, {"kind": "distillation", "teacher": str(teacher.run.folder), "weight": 1.0})
    train(student, tmp_path / "run")
    after = transduce.load(teacher.run.folder).network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unsuitable_teachers_are_refused(pairs: Path, teacher: TrainingResult, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a teacher"):
        resolve(recipe(pairs, {"kind": "distillation"}))
    with pytest.raises(InputError, match="not a run directory"):
        train(recipe(pairs, {"kind": "distillation", "teacher": str(tmp_path)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    other = recipe(pairs, {"kind": "distillation", "teacher": str(teacher.run.folder)}, size="words")
    with pytest.raises(InputError, match="tokenizers of the teacher differ"):
        train(other, tmp_path / "run")


def test_the_teacher_path_is_stored_as_an_absolute_path(
    pairs: Path, teacher: TrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.run.folder.parent)
    completed = resolve(recipe(pairs, {"kind": "distillation", "teacher": "run"}))
    assert completed.training.objective["teacher"] == str(teacher.run.folder)


def test_resume_with_another_objective_is_refused(pairs: Path, tmp_path: Path) -> None:
    train(recipe(pairs, {"kind": "r_drop", "weight": 2.0}), tmp_path / "run")
    with pytest.raises(InputError, match=r"training\.objective\.weight: 2\.0 -> "):
        train(recipe(pairs, {"kind": "r_drop"}), tmp_path / "run", resume=True)


def refused(_: str) -> torch.nn.Module:
    raise AssertionError("no teacher was asked for")


def test_recipe_options_are_passed_to_the_objective() -> None:
    def made(spec: dict[str, Any]) -> Any:
        return build.build_objective(build.complete_objective(spec, "here"), refused)

    plain = made({})
    assert isinstance(plain, CrossEntropy)
    assert plain.label_smoothing == 0.1
    assert made({"label_smoothing": 0.0}).label_smoothing == 0
    dropped = made({"kind": "r_drop", "weight": 3})
    assert isinstance(dropped, RDrop)
    assert dropped.weight == 3
    opened: list[str] = []
    spec = build.complete_objective({"kind": "distillation", "teacher": "x"}, "here")
    taught = build.build_objective(spec, lambda run: opened.append(run) or torch.nn.Identity())  # type: ignore[func-returns-value]
    assert isinstance(taught, Distillation)
    assert opened == ["x"]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"kind": "rdrop"}, "did you mean 'r_drop'"),
        ({"label_smothing": 0.1}, "did you mean 'label_smoothing'"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"kind": "scheduled_sampling", "rate": 1.5}, "rate"),
        ({"kind": "scheduled_sampling", "choice": "worst"}, "choice"),
        ({"kind": "minimum_risk", "samples": 0}, "samples"),
        ({"kind": "minimum_risk", "sharpness": 0}, "sharpness"),
        ({"kind": "r_drop", "weight": float("inf")}, "weight"),
        ({"kind": 3}, "kind"),
    ],
)
def test_invalid_options_are_named(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        build.complete_recipe(parse({"model": {"encoder": PART, "decoder": PART}, "training": {"objective": spec}}))


def test_an_objective_from_a_user_file(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    train(recipe(pairs, {"kind": "mine:Louder"}), tmp_path / "run")
    with pytest.raises(InputError, match="code of the user"):
        transduce.load(tmp_path / "run")  # completing its recipe would run that code
    assert transduce.load(tmp_path / "run", trust_user_code=True).generate(["aeh"])
