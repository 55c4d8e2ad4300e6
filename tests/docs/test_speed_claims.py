"""Speed claims of the README: each follows from the records in benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
CPU_RECORDS = (
    *("generate-base-cpu-int8", "generate-base-cpu-float32", "generate-tiny-cpu-int8"),
    *("bulk-base-cpu-int8", "bulk-base-cpu-int8-beam", "natural-multi30k-cpu"),
)


def rows(record: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{record}.json").read_text())["rows"]
    return found


def ratios(record: str, peer: str) -> list[float]:
    return [row["ratio"] for row in rows(record) if row["name"].startswith(peer) and not row["failed"]]


def test_training_speed_is_that_of_the_record() -> None:
    ours = next(row for row in rows("train-base-cuda-bfloat16") if row["name"] == "transduce")
    (ratio,) = ratios("train-base-cuda-bfloat16", "nn.Transformer")
    assert f"trains on {ours['tokens_per_second'] / 1e6:.2f} million tokens per second" in README
    assert f"{ratio:.1f} times the speed of a compiled `torch.nn.Transformer`" in README


def test_generation_speed_is_that_of_the_record() -> None:
    found = ratios("generate-base-cuda-bfloat16", "transformers")
    assert f"generates {min(found):.0f} to {max(found):.0f} times as fast as `transformers`" in README


@pytest.mark.parametrize("record", CPU_RECORDS)
def test_generation_on_a_cpu_is_faster_than_ctranslate2_in_the_same_precision(record: str) -> None:
    assert "Transformers generate faster than with CTranslate2" in README
    precisions = set(re.findall("int8|float32", record)) or {"int8", "float32"}
    found = {precision: ratios(record, f"CTranslate2 {precision}") for precision in precisions}
    assert all(found.values())
    assert min(ratio for some in found.values() for ratio in some) > 1
