"""A trained model and what was held out in, its scores and a few examples out, kept in the run."""

from __future__ import annotations

import dataclasses

from transduce import evaluation
from transduce.predict import Model
from transduce.prepare import Data
from transduce.run import Run
from transduce.score import answer, as_lines, read_corpora, score_outputs
from transduce.training import loop
from transduce.training.curves import draw_curves

SHOWN = 5  # examples at the end


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished or interrupted run. The model is the one that training ended with."""

    run: Run
    model: Model
    outcome: loop.Outcome
    scores: dict[str, evaluation.Evaluation]  # by data set: dev, test
    examples: tuple[tuple[str, str, str], ...]  # source, output, reference


def finish(run: Run, model: Model, outcome: loop.Outcome, data: Data) -> Trained:
    """Scores what was held out, and writes down how it went."""
    settings = model.recipe
    sets = {"dev": data.dev_examples()}
    if settings.data.test:
        sets["test"] = read_corpora(settings.data.test, model)
    scores: dict[str, evaluation.Evaluation] = {}
    shown: list[tuple[str, str, str]] = []
    for name, examples in sets.items():
        lines = as_lines(examples, settings.evaluation)
        outputs = answer(model, lines, settings.evaluation.metrics)
        scores[name] = score_outputs(model, lines, outputs)
        texts = zip(lines, outputs.texts or (), strict=outputs.texts is not None)
        shown = [(line.source, text, line.references[0]) for line, text in texts][:SHOWN]
        if outputs.texts is not None and outputs.asked is not None:
            asked = zip(outputs.asked.sources, outputs.texts, outputs.asked.references, strict=True)
            shown = [(source, text, references[0]) for source, text, references in asked][:SHOWN]
    run.save_metrics(
        {
            **{name: score.to_json() for name, score in scores.items()},
            "parameters": model.parameters,
            "training": dataclasses.asdict(outcome),
            "data": data.train.report.to_json(),
        }
    )
    draw_curves(run.log, run.curves)
    return Trained(run, model, outcome, scores, tuple(shown))
