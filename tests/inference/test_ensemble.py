"""Loading several runs as an ensemble: outputs, scores, explanations, the command line, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_fixtures import RECURRENT, settings

import transduce
from transduce.errors import InputError

LINES = ["the red cat", "a green dog sees the blue bird", "", "red red red"]


@pytest.fixture(scope="module")
def ensemble(attention_run: Path, bottleneck_run: Path) -> transduce.Model:
    return transduce.load([attention_run, bottleneck_run])


def test_an_ensemble_of_a_run_with_itself_equals_the_run(attention_run, model):
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
def test_ensembles_generate_in_every_precision(attention_run, bottleneck_run, precision):
    lowered = transduce.load([attention_run, bottleneck_run], precision=precision)
    assert [one.complete for one in lowered.generate(LINES[:2])] == [True, True]


def test_settings_are_those_of_the_first_run(ensemble, attention_run):
    first = transduce.load(attention_run)
    assert ensemble.recipe == first.recipe
    assert ensemble.parameters > first.parameters


def test_runs_with_other_target_tokens_are_refused(attention_run, transformer_run):
    with pytest.raises(InputError, match=r"target vocabulary \(\d+ chars\) is not that of .* words\)") as caught:
        transduce.load([attention_run, transformer_run])
    assert str(transformer_run) in str(caught.value)
    assert "tokens.target" in caught.value.remedy


@pytest.fixture(scope="module")
def characters_run(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It reads characters and generates the words that the other runs generate."""
    recipe = settings(pairs, {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}, "words", steps=3)
    recipe["tokens"]["source"] = {"kind": "chars"}
    return transduce.train(recipe, tmp_path_factory.mktemp("ensemble") / "characters").run.folder


@pytest.mark.parametrize("combination", ["mean", "log_linear"])
def test_members_with_other_source_tokens_read_their_own(attention_run, characters_run, pairs, combination):
    runs, weights = (attention_run, characters_run, attention_run), (2.0, 1.0, 1.0)
    both = transduce.load(runs, combination=combination, weights=weights)
    some = [tuple(line.split("\t")) for line in pairs.read_text(encoding="utf-8").splitlines()[:5]]
    models = [transduce.load(run) for run in runs]
    scored = both.score(some)
    for (source, target), one in zip(some, scored, strict=True):
        each = torch.stack([_log_probs(model, source, target) for model in models])  # M T V
        shares = (torch.tensor(weights) / sum(weights))[:, None, None]
        mixed = (each + shares.log()).logsumexp(0) if combination == "mean" else (each * shares).sum(0).log_softmax(-1)
        ids = [*both.target.encode(target).ids, 2]
        expected = mixed.gather(1, torch.tensor(ids)[:, None]).flatten().tolist()
        assert one.token_scores == pytest.approx(expected, abs=1e-4)
    turned = transduce.load(runs[::-1], combination=combination, weights=weights[::-1])
    texts = [source for source, _ in some]
    assert [one.text for one in turned.generate(texts)] == [one.text for one in both.generate(texts)]


def _log_probs(model: transduce.Model, source: str, target: str) -> torch.Tensor:
    """T V: the distributions of one model alone."""
    ids, read = model.target.encode(target).ids, model.source.encode(source).ids
    return model.logits(target=torch.tensor([[1, *ids]]), source=torch.tensor([[*read, 2]]))[0].log_softmax(-1)


def test_explanations_label_the_source_of_the_first_run(attention_run, characters_run):
    both = transduce.load([attention_run, characters_run])
    found = both.explain("red blue")
    assert list(found.source_tokens) == ["red", "blue", "</s>"]
    assert found.attention == pytest.approx(
        transduce.load(attention_run).explain_pairs([("red blue", found.output)])[0].attention, abs=1e-5
    )


def test_a_long_source_is_cut_for_every_member(attention_run, characters_run):
    found = transduce.load([attention_run, characters_run]).generate(["r" * 100, "red"])
    assert [one.source_cut for one in found] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "1 weights for 2 runs"),
        ({"weights": [1, 0]}, "weights must be positive"),
        ({"combination": "median"}, "unknown combination 'median'"),
    ],
)
def test_wrong_options_are_refused(attention_run, bottleneck_run, options, message):
    with pytest.raises(InputError, match=message):
        transduce.load([attention_run, bottleneck_run], **options)


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
    runs = f"{attention_run},{bottleneck_run}"
    assert "exact" in command("evaluate", runs, str(pairs)).out
    options = ("--combination", "log_linear", "--weights", "3,1")
    weighted = transduce.load(runs, combination="log_linear", weights=[3, 1])
    scored = command("score", runs, str(pairs), *options).out.splitlines()
    first = tuple(pairs.read_text(encoding="utf-8").splitlines()[0].split("\t"))
    assert float(scored[0].split("\t")[0]) == pytest.approx(weighted.score([first])[0].score, abs=1e-3)
    result = command("generate", runs, str(source), *options)
    assert result.out.splitlines() == [one.text for one in weighted.generate(LINES)]
    refused = command("evaluate", runs, str(pairs), "--weights", "3;1")
    assert refused.code != 0
    assert "--weights" in refused.err
