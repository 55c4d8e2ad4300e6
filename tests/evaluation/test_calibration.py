"""Calibration: isotonic regression against scikit-learn, calibration error by brute force, all shapes of model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_fixtures import RECURRENT, TRANSFORMER, Command

import transduce
from transduce.api import build
from transduce.errors import InputError
from transduce.evaluation.calibration import (
    FILE,
    Calibration,
    cross_fitted,
    expected_calibration_error,
    fit_calibration,
    isotonic_regression,
    line_qualities,
    reliability,
    report_calibration,
)
from transduce.evaluation.evaluate import SystemOutput
from transduce.evaluation.held_out import calibrate
from transduce.flow import EOS, Batch, Padded
from transduce.inference.prediction import Prediction
from transduce.interop import bundle
from transduce.run import Run

rng = np.random.default_rng(1)


@pytest.fixture(scope="module", params=[7, 60, 400])
def outcomes(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, and outcomes that grow with them, with exceptions."""
    scores = np.round(-5 * rng.random(request.param), 1)
    return scores, (rng.random(request.param) < np.exp(scores / 2)).astype(float)


def test_isotonic_regression_is_that_of_scikit_learn(outcomes):
    from sklearn.isotonic import IsotonicRegression

    scores, right = outcomes
    oracle = IsotonicRegression(out_of_bounds="clip").fit(scores, right)
    points = np.linspace(-6, 1, 300)
    np.testing.assert_allclose(
        np.interp(points, *isotonic_regression(scores.tolist(), right.tolist())), oracle.predict(points), atol=1e-12
    )


def brute_force_error(confidences: list[float], qualities: list[float], bins: int) -> float:
    total = 0.0
    for number in range(bins):
        last = number == bins - 1
        inside = [
            (sure, right)
            for sure, right in zip(confidences, qualities, strict=True)
            if number / bins <= sure and (sure < (number + 1) / bins or last)
        ]
        if inside:
            gap = sum(sure for sure, _ in inside) / len(inside) - sum(right for _, right in inside) / len(inside)
            total += len(inside) / len(confidences) * abs(gap)
    return total


def test_calibration_error_is_that_of_brute_force(outcomes):
    scores, right = outcomes
    confidences = [*np.exp(scores).tolist(), 1.0, 0.0]
    qualities = [*right.tolist(), 1.0, 0.0]
    for bins in (4, 8):  # whose limits are exact in binary
        error = expected_calibration_error(reliability(confidences, qualities, bins))
        assert error == pytest.approx(brute_force_error(confidences, qualities, bins))


def test_cross_fitted_confidence_has_not_seen_its_line(outcomes):
    scores, right = outcomes
    before = cross_fitted(scores, right)
    changed = right.copy()
    changed[0] = 1 - changed[0]
    own_fold = np.arange(len(scores)) % 5 == 0
    assert (cross_fitted(scores, changed)[own_fold] == before[own_fold]).all()


def output_of(exact: float, lines: int = 2000, overconfident: float = 0.3) -> tuple[SystemOutput, list[list[str]]]:
    """Outputs with probability q that are right with probability q ** (1 / overconfident), a share of them at most."""
    draw = np.random.default_rng(3)
    scores = -2 * draw.random(lines)
    right = draw.random(lines) < exact * np.exp(scores / overconfident)
    texts = ["the cat" if one else "the cot" for one in right]
    return SystemOutput(texts, token_scores=[(one / 2, one / 2) for one in scores]), [["the cat"]] * lines


def test_an_overconfident_model_is_calibrated_on_new_lines():
    output, references = output_of(exact=1.0)
    half = len(references) // 2
    assert output.texts is not None
    assert output.token_scores is not None
    fitted = fit_calibration(
        SystemOutput(output.texts[:half], token_scores=output.token_scores[:half]), references[:half]
    )
    assert fitted is not None
    assert fitted.quality == "exact"
    rest = SystemOutput(output.texts[half:], token_scores=output.token_scores[half:])
    report = report_calibration(fitted, rest, references[half:], fitted_here=False)
    assert report is not None
    assert report.ece_before > 0.2
    assert report.ece_after < 0.08
    assert fitted.ece_before > 0.2 > 0.08 > fitted.ece_after
    confidences = [fitted.confidence(one) for one in sorted(output.token_scores, key=sum)]
    assert confidences == sorted(confidences)
    assert 0 <= confidences[0] <= confidences[-1] <= 1


def test_the_confidence_is_the_interpolation_of_numpy():
    knots, values = (-9.0, -4.5, -4.25, -1.0, -0.125), (0.125, 0.5, 0.5, 0.75, 1.0)
    fitted = Calibration("ser", knots, values, 5, 0.0, 0.0)
    for score in (*knots, *np.linspace(-9, 1, 101)):
        assert fitted.confidence((float(score),)) == pytest.approx(np.interp(score, knots, values), abs=1e-15)


def test_an_output_less_probable_than_all_of_the_development_set_is_not_certain():
    scores = [(-one / 100,) for one in range(1, 41)]
    fitted = fit_calibration(SystemOutput(["a"] * 40, token_scores=scores), [["a"]] * 40)
    assert fitted is not None
    assert [fitted.confidence(one) for one in ((-0.01,), (-0.4,))] == [1.0, 1.0]
    assert fitted.confidence((-2.4,)) == pytest.approx(math.exp(-2.0))


def test_chrf_is_expected_where_outputs_are_rarely_exact():
    output, references = output_of(exact=0.02)
    fitted = fit_calibration(output, references)
    assert fitted is not None
    assert fitted.quality == "chrf"
    assert fitted.model_confidence((-1.0, -3.0)) == pytest.approx(math.exp(-2))
    wrong = line_qualities("chrf", SystemOutput(["the cot"]), [["the cat"]])[0]
    assert fitted.confidence((-1.0, -1.0)) == pytest.approx(wrong, abs=0.05)


def test_too_few_lines_and_outputs_without_scores_have_no_calibration():
    assert fit_calibration(SystemOutput(["a"] * 19, token_scores=[(-1.0,)] * 19), [["a"]] * 19) is None
    assert fit_calibration(SystemOutput(["a"] * 50), [["a"]] * 50) is None


def test_training_calibrates_and_predictions_have_the_confidence_of_their_score(attention_run: Path, tmp_path: Path):
    model = transduce.load(attention_run)
    stored = Calibration.load(attention_run)
    assert model.calibration == stored
    assert stored is not None
    (one, empty) = model.generate(["red blue", ""], nbest=2)
    assert empty.confidence is None
    for rival in one.nbest:
        assert rival.confidence == stored.confidence(rival.token_scores)
    assert one.confidence == one.nbest[0].confidence
    packed = transduce.load(bundle.pack(Run(attention_run), tmp_path / "bundle.zip"))
    assert packed.calibration == stored


@pytest.fixture
def uncalibrated(attention_run: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(attention_run, tmp_path / "run")
    (folder / FILE).unlink()
    return folder


def test_commands_calibrate_and_report(uncalibrated: Path, tmp_path: Path, command: Command):
    run, picture = uncalibrated, tmp_path / "diagram.png"
    assert json.loads(command("generate", run, "--json", stdin=b"red blue\n").out)["confidence"] is None
    assert "not calibrated" in command("evaluate", run, "--reliability", picture).err
    assert "expected calibration error" in command("calibrate", run).out
    content = json.loads(command("generate", run, "--json", stdin=b"red blue\n").out)
    assert 0 <= content["confidence"] <= 1
    assert content["nbest"][0]["confidence"] == content["confidence"]
    said = command("evaluate", run, "--reliability", picture, "--json", tmp_path / "scores.json")
    assert "confidence is the probability that the output is exactly right" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "scores.json").read_text())["calibration"]
    assert {"ece_before", "ece_after", "before", "after"} <= found.keys()
    few = tmp_path / "few.tsv"
    few.write_text("red\tRED\n")
    assert "too few" in command("calibrate", run, few).err


SHAPES = {
    "encoder-decoder": {"model": {"encoder": RECURRENT, "decoder": RECURRENT}},
    "decoder-only": {"model": {"decoder": TRANSFORMER}, "tokens": {"shared": True}},
    "classifier": {
        "model": {"encoder": RECURRENT, "head": {"kind": "classifier"}},
        "tokens": {"target": {"kind": "labels"}},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_model_is_calibrated(shape: str, tmp_path: Path):
    """A classifier's confidence is its calibrated softmax."""
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{'ab'[n % 2]} {n}\t{'XY'[n % 2]}\n" for n in range(60)))
    built = build({"data": {"train": str(path), "dev_size": 30, "max_length": 40}, **SHAPES[shape]})
    model = transduce.Model(built.model, built.source, built.target, built.recipe)
    fitted = calibrate(model)
    (one,) = model.generate(["a 3"])
    assert one.confidence == fitted.confidence(one.token_scores)
    if shape == "classifier":
        logits = built.model(next(iter(built.dev_batches()))).logits
        assert logits.shape[1] == 2
        ids = torch.tensor([built.source.encode_batch(["a 3"])[0] + [EOS]])
        probability = built.model.start(Batch(Padded(ids, ids > 0))).fixed["logits"][0, 0].softmax(-1).max().item()
        assert fitted.model_confidence(one.token_scores) == pytest.approx(probability, abs=1e-5)


def test_language_models_have_no_confidence(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"a b {n}\n" for n in range(60)))
    recipe = {"data": {"train": str(path), "format": "text", "dev_size": 30}, "model": {"decoder": RECURRENT}}
    built = build({**recipe, "tokens": {"shared": True}})
    with pytest.raises(InputError, match="confidence is for models that map a source"):
        calibrate(transduce.Model(built.model, built.source, built.target, built.recipe))


@pytest.mark.parametrize(
    "damage",
    [
        {"values": [0.5, 0.2], "inputs": [-1, 0]},
        {"values": [2.0]},
        {"inputs": ["x"]},
        {"quality": "bleu"},
        {"lines": None},
    ],
)
def test_a_damaged_calibration_is_an_input_error(tmp_path: Path, damage: dict):
    good = Calibration("exact", (-1.0,), (0.5,), 30, 0.1, 0.05)
    good.save(tmp_path)
    assert Calibration.load(tmp_path) == good
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, **damage}))
    with pytest.raises(InputError, match="not a calibration"):
        Calibration.load(tmp_path)


def test_predictions_without_calibration_have_no_confidence():
    assert Prediction("a", "b", ("b",), (-0.1,)).confidence is None
