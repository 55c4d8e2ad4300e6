"""Without a recipe, the metrics fit the labels: macro F1 for one a line, span F1 where they mark spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.autoconfig import recipe_for

PLAIN, MARKED = "DET NOUN VERB", "B-PER I-PER O"


@pytest.mark.parametrize(
    ("task", "label", "metrics"),
    [
        ("tag", PLAIN, ("accuracy",)),
        ("tag", MARKED, ("accuracy", "span_f1")),
        ("classify", "yes", ("accuracy", "macro_f1")),
    ],
)
def test_labels_choose_their_metrics(task: str, label: str, metrics: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text(f"one two three\t{label}\n" * 20)
    recipe = recipe_for(str(file), task=task)
    assert recipe.evaluation.metrics == metrics
    assert recipe.training.monitor == "accuracy"
