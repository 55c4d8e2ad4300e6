"""Precisions on a CPU: what the benchmark compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.precision import recipe_in
from transduce.autoconfig import plan_for


def test_both_precisions_have_the_network_that_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.autoconfig.computes_in_bf16", lambda device: True)
    path, letters = tmp_path / "pairs.tsv", "abcdefghij"
    path.write_text("".join(f"{a} {b} {c}\t{a} {b} {c}\n" for a in letters for b in letters for c in letters))
    chosen = plan_for(str(path), ["training.device=cpu"]).recipe
    assert plan_for(str(path), ["training.device=cpu", "training.precision=fp32"]).recipe.model != chosen.model
    for precision in ("fp32", "bf16"):
        recipe = recipe_in(precision, str(path), "generate", 16)
        assert (recipe.model, recipe.training.batch_tokens) == (chosen.model, chosen.training.batch_tokens)
        assert recipe.training.precision == precision
