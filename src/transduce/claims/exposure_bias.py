"""Claim about exposure bias: quality after reference prefixes and after the model's own, by position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import numpy as np

from transduce.claims.claim import (
    ATTENTION,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    encode_pairs,
    recipe,
    scaled,
    teacher_forced,
)
from transduce.flow import Example
from transduce.inference import Model

LENGTHS, BASE = (6, 12), 4  # digits of a source, and values of a digit
REMEDIES: dict[str, dict[str, Any]] = {
    "teacher forcing": {"kind": "cross_entropy", "label_smoothing": 0.0},
    "scheduled sampling": {"kind": "scheduled_sampling", "rate": 0.25, "label_smoothing": 0.0},
    "minimum risk": {"kind": "minimum_risk", "samples": 4, "weight": 0.5},
}


def running_sums(seed: int) -> Iterator[Example]:
    """y_t = (y_{t-1} + x_t) mod 4: easy after the right y_{t-1}, and wrong ever after a wrong one."""
    chance = random.Random(seed)
    while True:
        digits = [chance.randrange(BASE) for _ in range(chance.randint(*LENGTHS))]
        yield Example(" ".join(map(str, digits)), " ".join(str(total % BASE) for total in accumulate(digits)))


def by_position(model: Model, examples: list[Example]) -> dict[str, np.ndarray]:
    """The share of right tokens at each target position: after reference prefixes, and after the model's own."""
    batch = encode_pairs(model, examples)
    forced = teacher_forced(model, batch).cpu().numpy()
    outputs = [out.text.split() for out in model.generate([one.source for one in examples])]
    targets = [(one.target or "").split() for one in examples]
    longest = max(map(len, targets))
    right, total = {"after reference": np.zeros(longest), "after own": np.zeros(longest)}, np.zeros(longest)
    for row, (output, target) in enumerate(zip(outputs, targets, strict=True)):
        for position, token in enumerate(target):
            total[position] += 1
            right["after reference"][position] += forced[row, position]
            right["after own"][position] += position < len(output) and output[position] == token
    return {name: counts / total for name, counts in right.items()}


def measure_exposure_bias(budget: Budget) -> Measurement:
    examples = list(islice(running_sums(3), budget.pick(300, 1000)))
    data = {
        "train": budget.write_pairs("sums-train", islice(running_sums(1), 10_000)),
        "dev": budget.write_pairs("sums-dev", islice(running_sums(2), 100)),
        "cache": str(budget.folder / "cache"),
    }
    model = scaled(ATTENTION, 64)
    common: dict[str, Any] = {"batch_tokens": 1024, "optimiser": {"learning_rate": 0.005}}
    start = recipe(data, model, budget.pick(300, 600), schedule={"kind": "constant", "warmup": 30}, **common)
    budget.train("sums", start)
    found = {}
    for name, objective in REMEDIES.items():
        schedule = {"kind": "linear", "warmup": 5}
        more = recipe(data, model, budget.pick(80, 300), objective=objective, schedule=schedule, **common)
        more["init"] = {"model": str(budget.run("sums").folder)}
        found[name] = by_position(budget.train(f"sums-{name.replace(' ', '-')}", more), examples)
    return _measurement(found)


def _measurement(found: dict[str, dict[str, np.ndarray]]) -> Measurement:
    gaps = {name: float(np.mean(one["after reference"] - one["after own"])) for name, one in found.items()}
    plain = found["teacher forcing"]
    gap = plain["after reference"] - plain["after own"]
    half = len(gap) // 2
    early, late = float(gap[:half].mean()), float(gap[half:].mean())
    own = {name: float(one["after own"].mean()) for name, one in found.items()}
    checks = [
        Check(
            "teacher forcing: quality after reference prefixes is higher than after the model's own",
            gaps["teacher forcing"] > 0.02,
            {"gap": gaps["teacher forcing"], "limit": 0.02},
        ),
        Check("the gap grows with the position", late > early, {"first half": early, "second half": late}),
    ]
    rows = [(name, float(one["after reference"].mean()), own[name], gaps[name]) for name, one in found.items()]
    columns = ["training", "right after reference prefixes", "right after own prefixes", "gap"]
    panels = []
    for name, one in found.items():
        positions = list(range(1, len(one["after own"]) + 1))
        series = [Series(label, positions, values.tolist()) for label, values in one.items()]
        panels.append(Panel(name.capitalize(), "target position", "share right", series))
    return Measurement([ClaimTable("", columns, rows)], panels, checks)


EXPOSURE_BIAS = Claim(
    "exposure-bias",
    "A model that was trained on reference prefixes is worse after its own, and the later the position the more.",
    "Ranzato et al. 2016, Sequence Level Training; Bengio et al. 2015 (scheduled sampling); Shen et al. 2016 (minimum "
    "risk)",
    "A GRU with attention learns running sums of digits, y_t = (y_{t-1} + x_t) mod 4, where one wrong output makes "
    "all later ones wrong. After the same beginning it is trained on with teacher forcing, scheduled sampling, or "
    "minimum risk, for equal numbers of updates. The remedies are measured, not assumed to help.",
    measure_exposure_bias,
)
