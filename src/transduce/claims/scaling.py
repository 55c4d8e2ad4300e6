"""Claims about equal time and scaling: quality against time, data and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transduce.claims.claim import (
    ATTENTION,
    ONE_VECTOR,
    TRANSFORMER,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    Validation,
    fitted_exponent,
    letters,
    power_law,
    recipe,
    scaled,
    validations,
)

SYMBOLS = tuple("abcdefghij")
WIDTH = 64
FAMILIES = {"GRU with attention": scaled(ATTENTION, WIDTH), "Transformer": scaled(TRANSFORMER, WIDTH)}
DATA = (250, 1000, 4000, 16_000)
WIDTHS = (16, 32, 64, 96)


def timed_models() -> dict[str, Mapping[str, Any]]:
    return {
        "GRU, one vector": scaled(ONE_VECTOR, 80),
        "GRU with attention": scaled(ATTENTION, 80),
        "Transformer": TRANSFORMER,
        "Transformer, wider": scaled(TRANSFORMER, 96),
    }


def reached(history: Sequence[Validation], seconds: float) -> Validation:
    """The last validation within a budget of time; the first one if there is none."""
    return max((one for one in history if one.seconds <= seconds), key=lambda one: one.step, default=history[0])


def measure_equal_time(budget: Budget) -> Measurement:
    """Each model is trained once, at a constant learning rate: every validation is the end of a shorter run."""
    data, _ = letters(budget, symbols=SYMBOLS)
    histories, parameters = dict[str, list[Validation]](), dict[str, int]()
    steps, constant = budget.pick(300, 2000), {"kind": "constant", "warmup": 50}
    for name, model in timed_models().items():
        run = f"time-{name.lower().replace(' ', '-').replace(',', '')}"
        changes: dict[str, Any] = {"validate_every": 25, "log_every": 5, "patience": None, "batch_tokens": 1024}
        parameters[name] = budget.train(run, recipe(data, model, steps, schedule=constant, **changes)).parameters
        histories[name] = validations(budget.run(run))
    least = min(history[-1].seconds for history in histories.values())  # what every model was trained for
    seconds = (least / 4, least / 2, least)
    last = {name: reached(history, seconds[-1]).scores["exact"] for name, history in histories.items()}
    checks = [
        Check(
            "in the same time, a recurrent model reaches more with attention than with one vector",
            last["GRU with attention"] > last["GRU, one vector"] + 5,
            last,
        ),
        Check(
            "every model reaches more in more time",
            all(reached(one, seconds[-1]).scores["loss"] < one[0].scores["loss"] for one in histories.values()),
            {name: one[0].scores["loss"] - reached(one, seconds[-1]).scores["loss"] for name, one in histories.items()},
        ),
    ]
    rows: list[tuple[str | float, ...]] = []
    for name, history in histories.items():
        ends = [reached(history, limit) for limit in seconds]
        rows.append((name, parameters[name], ends[-1].step, *(float(end.scores["exact"]) for end in ends)))
    columns = ["model", "parameters", "updates", *(f"exact match after {limit:.1f} s" for limit in seconds)]
    return Measurement([ClaimTable("", columns, rows)], _time_panels(histories), checks)


def _time_panels(histories: Mapping[str, Sequence[Validation]]) -> list[Panel]:
    panels = []
    for title, score in (("Exact match on held-out pairs", "exact"), ("Loss on held-out pairs", "loss")):
        series = [
            Series(name, [one.seconds for one in history], [one.scores[score] for one in history])
            for name, history in histories.items()
        ]
        panels.append(Panel(title, "seconds of training", score, series, log_y=score == "loss"))
    return panels


EQUAL_TIME = Claim(
    "equal-time",
    "In the same time and on the same data, attention reaches more than one vector; whether a recurrent model or a "
    "Transformer leads depends on the time and the machine.",
    "Vaswani et al. 2017, Attention Is All You Need, section 6.1; Bahdanau et al. 2015",
    "Recurrent and Transformer models, and a wider Transformer, learn to reverse letters, with a constant learning "
    "rate. Exact match and loss of held-out pairs against time, for three budgets, the longest of which every model "
    "was trained for. Time is updates times the time of an undisturbed update, the lowest tenth of those in the log. "
    "What wins depends on the machine: a GPU favours the models without sequential steps.",
    measure_equal_time,
)


def best_loss(budget: Budget, family: str, data: Mapping[str, str], count: int, width: int) -> tuple[float, int]:
    """The lowest development loss of a run, and its number of parameters."""
    name, steps = f"scaling-{family.lower().replace(' ', '-')}-{count}-{width}", budget.pick(200, 800)
    settings = recipe(
        data,
        scaled(FAMILIES[family], width),
        steps,
        validate_every=steps // 4,
        checkpoint_every=steps // 4,
        batch_tokens=1024,
    )
    parameters = budget.train(name, settings).parameters
    return min(one.scores["loss"] for one in validations(budget.run(name))), parameters


def measure_scaling(budget: Budget) -> Measurement:
    sets = {count: letters(budget, length=(3, 8), symbols=SYMBOLS, count=count)[0] for count in DATA}
    by_data: dict[str, list[float]] = {}
    by_size: dict[str, tuple[list[int], list[float]]] = {}
    for name in FAMILIES:
        by_data[name] = [best_loss(budget, name, sets[count], count, WIDTH)[0] for count in DATA]
        grown = [best_loss(budget, name, sets[DATA[-1]], DATA[-1], width) for width in WIDTHS]
        by_size[name] = [parameters for _, parameters in grown], [loss for loss, _ in grown]
    exponents = {f"{name}, data": -fitted_exponent(DATA, losses) for name, losses in by_data.items()}
    exponents |= {f"{name}, parameters": -fitted_exponent(*curve) for name, curve in by_size.items()}
    checks = [
        Check(
            "the loss falls with data and with parameters, for both families",
            min(exponents.values()) > 0.05,
            {f"exponent, {name}": value for name, value in exponents.items()},
        )
    ]
    rows: list[tuple[str | float, ...]] = [(name, *losses) for name, losses in by_data.items()]
    tables = [ClaimTable("Loss against training pairs", ["model", *(f"{count:,}" for count in DATA)], rows)]
    rows = [(name, *losses) for name, (_, losses) in by_size.items()]
    tables.append(ClaimTable("Loss against width", ["model", *(f"width {width}" for width in WIDTHS)], rows))
    fitted = [(name, value) for name, value in exponents.items()]
    tables.append(ClaimTable("Power laws: loss = a size^-b", ["curve", "b"], fitted))
    curves = {name: (list(DATA), losses) for name, losses in by_data.items()}
    panels = [_power_panel("Data", "training pairs", curves), _power_panel("Parameters", "parameters", by_size)]
    return Measurement(tables, panels, checks)


def _power_panel(title: str, unit: str, curves: Mapping[str, tuple[list[int], list[float]]]) -> Panel:
    """The curves, and the fitted power laws as dashed lines."""
    series = [Series(name, *curve) for name, curve in curves.items()]
    for sizes, losses in curves.values():
        factor, exponent = power_law(sizes, losses)
        series.append(Series("", sizes, [factor * size**exponent for size in sizes], dashed=True))
    return Panel(title, unit, "loss", series, log_x=True, log_y=True)


SCALING = Claim(
    "scaling",
    "Quality grows with data and with parameters, for recurrent and for Transformer models, as a power law.",
    "Hestness et al. 2017, Deep Learning Scaling Is Predictable, Empirically; Kaplan et al. 2020, Scaling Laws",
    "Models that reverse letters are trained for equal numbers of updates on nested training sets of four sizes, and "
    "with four widths on the largest. The lowest development loss is fitted by a power law, least squares of the "
    "logarithms.",
    measure_scaling,
)
