"""Distillation of an ensemble into one model: recipe, tokenizers, outputs as targets, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_fixtures import RECURRENT, colour_pairs, settings
from torch.nn import functional as F

import transduce
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.objectives.cross_entropy import Distillation
from transduce.recipe import parse
from transduce.run import Run
from transduce.training.ensemble_run import train_ensemble
from transduce.training.experiment import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(80)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def two(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"encoder": {**RECURRENT, "width": 8}, "decoder": {**RECURRENT, "width": 8}}
    recipe = parse(settings(pairs, model, "words", steps=4, validate_every=2))
    return train_ensemble(recipe, tmp_path_factory.mktemp("student") / "two", 2).run.folder


def batch_of(model: transduce.Model, pairs: Path) -> Batch:
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()[:3]]
    sources, targets = ([model.source.encode(line[side]).ids for line in lines] for side in (0, 1))
    return Batch(Padded.from_rows([[*ids, 2] for ids in sources]), Padded.from_rows([[1, *ids, 2] for ids in targets]))


@pytest.mark.parametrize("combination", ["mean", "log_linear"])
def test_the_gradient_is_that_of_the_divergence_from_the_combined_distribution(two, pairs, combination):
    """Brute force: sum_t sum_v q_v (log q_v - log p_v), with q combined from the members one by one."""
    teacher = transduce.load(two, combination=combination)
    members = [transduce.load(member).network for member in Run(two).members()]
    student = transduce.load(Run(two).members()[0])
    network, batch = student.network, batch_of(student, pairs)
    network.zero_grad()
    Distillation(teacher.network.requires_grad_(False), weight=1.0)(network, batch).total.backward()
    found = {name: one.grad.clone() for name, one in network.named_parameters() if one.grad is not None}
    network.zero_grad()
    with torch.no_grad():
        each = [F.softmax(one(batch).logits.double(), -1) for one in members]
    mixed = (each[0] + each[1]) / 2 if combination == "mean" else (each[0] * each[1]).sqrt()
    mixed = mixed / mixed.sum(-1, keepdim=True)
    own = network(batch).logits.double().log_softmax(-1)
    total = sum(
        (mixed[row, place] * (mixed[row, place].log() - own[row, place])).sum()
        for row, place in batch.labels.mask.nonzero().tolist()
    )
    total.backward()
    assert found
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_the_command_distils_an_ensemble(command, two, tmp_path):
    folder = tmp_path / "one"
    result = command("distil", two, "--run", folder, "training.steps=3")
    assert result.code == 0, result.err
    student, member = Run(folder), Run(Run(two).members()[0])
    recipe = student.recipe()
    assert recipe.training.objective["teacher"] == str(two)
    assert recipe.model == member.recipe().model
    assert recipe.data.dev_seed == 1
    assert [one.fingerprint for one in student.tokenizers()] == [one.fingerprint for one in member.tokenizers()]
    assert transduce.load(folder).generate(["red blue"])[0].source == "red blue"


def test_outputs_of_the_teacher_are_the_targets(command, two, tmp_path):
    folder = tmp_path / "one"
    result = command("distil", two, "--level", "both", "--run", folder, "training.steps=2")
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (folder / "distilled" / "train.jsonl").read_text().splitlines()]
    teacher = transduce.load(two)
    expected = teacher.generate([line["source"] for line in lines])
    assert [line["target"] for line in lines] == [one.text for one in expected]
    gold = dict(line.split("\t") for line in (Path(teacher.recipe.data.train[0].path)).read_text().splitlines())
    dev = [json.loads(line) for line in (folder / "distilled" / "dev.jsonl").read_text().splitlines()]
    assert len(dev) == 20
    assert all(gold[line["source"]] == line["target"] for line in dev)  # the references stay
    assert not {line["source"] for line in dev} & {line["source"] for line in lines}
    assert Run(folder).recipe().training.objective["kind"] == "distillation"


def test_new_data_keep_the_tokenizers_of_the_teacher(command, two, tmp_path):
    few = tmp_path / "few.tsv"
    few.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(30, seed=9)), encoding="utf-8")
    result = command("distil", two, "--data", few, "--run", tmp_path / "one", "data.dev_size=5", "training.steps=1")
    assert result.code == 0, result.err


def test_other_tokens_are_refused(pairs, two, tmp_path):
    member = Run(two).members()[0]
    other = settings(pairs, {"encoder": RECURRENT, "decoder": RECURRENT}, "chars", steps=1)
    with pytest.raises(InputError, match=r"init\.tokens: the `tokens` section of this run is another one"):
        train({**other, "init": {"tokens": str(member)}}, tmp_path / "run")


def test_an_unknown_level_is_refused(command, two, tmp_path):
    assert "unknown level 'letters'" in command("distil", two, "--level", "letters").err
