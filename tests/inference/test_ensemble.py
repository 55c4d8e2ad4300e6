"""Loading several runs as an ensemble: outputs, scores, explanations, the command line, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transduce
from transduce.errors import InputError

LINES = ["the red cat", "a green dog sees the blue bird", "", "red red red"]


@pytest.fixture(scope="module")
def ensemble(attention_run: Path, bottleneck_run: Path) -> transduce.Model:
    return transduce.load([attention_run, bottleneck_run])


def test_a_run_beside_itself_generates_what_it_generates_alone(attention_run, model):
    for combination in ("mean", "log_linear"):
        twice = transduce.load(f"{attention_run},{attention_run}", combination=combination)
        alone, together = model.generate(LINES, beam=4), twice.generate(LINES, beam=4)
        assert [one.text for one in together] == [one.text for one in alone]
        assert [one.score for one in together] == pytest.approx([one.score for one in alone], abs=1e-4)


def test_scores_are_those_of_the_mean_probability(ensemble, attention_run, bottleneck_run, pairs):
    some = [tuple(line.split("\t")) for line in pairs.read_text(encoding="utf-8").splitlines()[:5]]
    members = [transduce.load(run).score(some) for run in (attention_run, bottleneck_run)]
    for found, *each in zip(ensemble.score(some), *members, strict=True):
        expected = torch.tensor([one.token_scores for one in each]).exp().mean(0).log()
        assert found.token_scores == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("precision", ["auto", "fp32", "int8"])
def test_every_precision(attention_run, bottleneck_run, precision):
    lowered = transduce.load([attention_run, bottleneck_run], precision=precision)
    assert [one.complete for one in lowered.generate(LINES[:2])] == [True, True]


def test_settings_are_those_of_the_first_run(ensemble, attention_run):
    first = transduce.load(attention_run)
    assert ensemble.recipe == first.recipe
    assert ensemble.parameters > first.parameters


def test_runs_with_other_tokens_are_refused(attention_run, transformer_run):
    with pytest.raises(InputError, match="source tokens are not those of") as caught:
        transduce.load([attention_run, transformer_run])
    assert str(transformer_run) in str(caught.value)


def test_an_ensemble_does_not_embed(ensemble):
    with pytest.raises(InputError, match="an ensemble has no sentence embedding"):
        ensemble.embed(LINES[:1])


def test_no_run_is_refused():
    with pytest.raises(InputError, match="no run was given"):
        transduce.load([])


def test_commands_take_runs_separated_by_commas(command, attention_run, bottleneck_run, pairs, tmp_path, ensemble):
    source = tmp_path / "in.txt"
    source.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    result = command("generate", f"{attention_run},{bottleneck_run}", str(source))
    assert result.out.splitlines() == [one.text for one in ensemble.generate(LINES)]
    assert "exact" in command("evaluate", f"{attention_run},{bottleneck_run}", str(pairs)).out
