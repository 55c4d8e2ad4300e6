"""Claims about training: gradients over distance, exposure bias, equal time, scaling."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.evaluation.claims.claim import (
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
    encode_pairs,
    exact_match,
    fitted_exponent,
    letters,
    power_law,
    random_batch,
    recipe,
    scaled,
    teacher_forced,
    untrained,
    validations,
)
from transduce.flow import Batch, Example, Padded
from transduce.inference import Model
from transduce.model import DecoderOnly, EncoderDecoder, Transducer
from transduce.objectives import CrossEntropy, Objective
from transduce.objectives.language_modelling import TruncatedBPTT

LENGTH, FAR, WINDOW = 56, 50, 20
EIGHT_LETTERS = tuple("abcdefgh")
LENGTHS, BASE = (6, 12), 4  # digits of a source, and values of a digit
REMEDIES: dict[str, dict[str, Any]] = {
    "teacher forcing": {"kind": "cross_entropy", "label_smoothing": 0.0},
    "scheduled sampling": {"kind": "scheduled_sampling", "rate": 0.25, "label_smoothing": 0.0},
    "minimum risk": {"kind": "minimum_risk", "samples": 4, "weight": 0.5},
}
WIDTH = 64
FAMILIES = {"GRU with attention": scaled(ATTENTION, WIDTH), "Transformer": scaled(TRANSFORMER, WIDTH)}
DATA = (250, 1000, 4000, 16_000)
WIDTHS = (16, 32, 64, 96)


def models() -> dict[str, dict[str, Any]]:
    """Recurrent encoders that read from left to right, with one vector or attention, and a Transformer."""

    def one_vector(cell: str) -> dict[str, Any]:
        part = {"kind": "recurrent", "cell": cell, "width": 64, "dropout": 0.0}
        return {"encoder": {**part, "bidirectional": False}, "decoder": {**part, "context": "initial"}}

    gru = one_vector("gru")
    attention = {**gru["decoder"], "context": {"kind": "luong", "input_feeding": False}}
    names = {"rnn": "plain RNN", "gru": "GRU", "lstm": "LSTM"}
    return {
        **{name: one_vector(cell) for cell, name in names.items()},
        "GRU with attention": {**gru, "decoder": attention},
        "Transformer": TRANSFORMER,
    }


class _Captured:
    """The outputs of an embedding, with their gradients."""

    def __init__(self, embedding: nn.Module) -> None:
        self.outputs: list[Tensor] = []
        self.handle = embedding.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        self.outputs.append(output)

    def norms(self) -> Tensor:
        """The norm of the gradient at each position, the mean over the rows of the batch."""
        self.handle.remove()
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.outputs]
        return torch.cat(parts, 1).norm(dim=-1).mean(0).detach()


def source_gradients(model: Transducer, batch: Batch) -> Tensor:
    """The norm of the gradient of the first target token's logit at each source position (S).

    Of the logit, not of the loss: that of a trained model is near 0, and its gradient too.
    """
    assert isinstance(model, EncoderDecoder)
    captured = _Captured(model.encoder.embedding)  # type: ignore[arg-type]
    labels = batch.labels.values[:, 0]
    logits = model.advance(batch.decoder_inputs.values[:, :1], model.start(batch)).logits[:, 0]
    logits.gather(1, labels[:, None]).sum().backward()
    model.zero_grad()
    return captured.norms().cpu()


def by_distance(norms: Tensor) -> list[float]:
    """The norms at distance 1, 2, ... before the </s> of the source."""
    return [float(value) for value in norms[:-1].flip(0)]


def truncated_gradients(objective: Objective, seed: int) -> Tensor:
    """The norm of the gradient of the last token's loss at each input of a recurrent language model."""
    part = {"kind": "recurrent", "cell": "gru", "width": 64, "dropout": 0.0}
    model = untrained({"decoder": part}, seed)
    assert isinstance(model, DecoderOnly)
    target = random_batch(8, 1, LENGTH, seed).target
    assert target is not None
    last = torch.zeros_like(target.mask)
    last[:, -1] = True
    captured = _Captured(model.decoder.embedding)  # type: ignore[arg-type]
    objective(model, Batch(target=target, loss_mask=Padded(last, target.mask))).total.backward()
    return captured.norms()


def first_letters(seed: int) -> Iterator[Example]:
    """Sources of 56 letters; the target is the first of them."""
    chance = random.Random(seed)
    while True:
        words = chance.choices(EIGHT_LETTERS, k=LENGTH)
        yield Example(" ".join(words), words[0])


def measure_gradient(budget: Budget) -> Measurement:
    batch = random_batch(16, LENGTH, 1, budget.seed)
    fresh = {
        name: by_distance(source_gradients(untrained(spec, budget.seed), batch)) for name, spec in models().items()
    }
    trained, right = _trained(budget)
    whole, cut = (truncated_gradients(one, budget.seed) for one in (CrossEntropy(), TruncatedBPTT(window=WINDOW)))
    # The input of the last step is at distance 0; the windows begin at multiples of WINDOW.
    first_kept = (LENGTH // WINDOW) * WINDOW
    beyond, within = float(cut[:first_kept].max()), float(cut[first_kept:].min())
    shares = {
        kind: found["plain RNN"][FAR - 1] / found["Transformer"][FAR - 1] for kind, found in _both(fresh, trained)
    }
    checks = [
        Check(
            f"{kind}: at distance {FAR} the plain RNN has less than 1 % of the gradient of the Transformer",
            share < 0.01,
            {"share": share, "limit": 0.01},
        )
        for kind, share in shares.items()
    ]
    checks.append(
        Check(
            f"truncated back-propagation (window {WINDOW}) cuts the gradient to exactly 0 before its window",
            beyond == 0 and within > 0 and float(whole[first_kept - 1]) > 0,
            {"largest before": beyond, "smallest within": within, "untruncated, before": float(whole[first_kept - 1])},
        )
    )
    checks.append(
        Check(
            "attention learns what the plain RNN cannot: the letter 56 positions back",
            right["GRU with attention"] > right["plain RNN"] + 0.3,
            {"GRU with attention": right["GRU with attention"], "plain RNN": right["plain RNN"]},
        )
    )
    return Measurement([_table(fresh, trained, right)], _panels(fresh, trained, whole, cut), checks)


Curves = dict[str, list[float]]


def _both(fresh: Curves, trained: Curves) -> list[tuple[str, Curves]]:
    return [("untrained", fresh), ("trained", trained)]


def _trained(budget: Budget) -> tuple[Curves, dict[str, float]]:
    """The gradients of trained models on test sources, and the share of them that they answer."""
    data = {"train": budget.write_pairs("first-letter-train", islice(first_letters(1), 4000))}
    data |= {"dev": budget.write_pairs("first-letter-dev", islice(first_letters(2), 100))}
    data["cache"] = str(budget.folder / "cache")
    test = list(islice(first_letters(3), 64))
    found, right = {}, {}
    for name, spec in models().items():
        settings = recipe(data, spec, budget.pick(150, 600))
        model = budget.train(f"gradient-{name.lower().replace(' ', '-')}", settings)
        found[name] = by_distance(source_gradients(model.network, encode_pairs(model, test)))
        right[name] = exact_match(model, test)
    return found, right


def _table(fresh: Curves, trained: Curves, right: dict[str, float]) -> ClaimTable:
    columns = ["model", "untrained, distance 1", f"distance {FAR}", "trained, distance 1", f"distance {FAR}", "right"]
    rows = [
        (name, fresh[name][0], fresh[name][FAR - 1], trained[name][0], trained[name][FAR - 1], right[name])
        for name in fresh
    ]
    return ClaimTable("Gradient norm at a source position, and share of first letters that are recalled", columns, rows)


def _panels(fresh: Curves, trained: Curves, whole: Tensor, cut: Tensor) -> list[Panel]:
    panels = []
    for kind, curves in _both(fresh, trained):
        series = [
            Series(name, list(range(1, len(norms) + 1)), [max(norm, 1e-20) for norm in norms])
            for name, norms in curves.items()
        ]
        panels.append(Panel(f"{kind.capitalize()}", "distance", "gradient norm", series, log_y=True))
    inputs = list(range(len(whole)))
    series = [Series("whole", inputs, whole.tolist()), Series(f"window of {WINDOW}", inputs, cut.tolist())]
    return [*panels, Panel("Truncated back-propagation", "input position", "gradient norm", series)]


GRADIENT = Claim(
    "gradient",
    "The gradient that reaches a distant source position vanishes in a plain RNN, less in GRU and LSTM, and not with "
    "attention or in a Transformer.",
    "Bengio et al. 1994, Learning Long-Term Dependencies with Gradient Descent is Difficult; Vaswani et al. 2017",
    "The logit of the first output, after a source of 56 letters, is differentiated with respect to the embedding of "
    "every source position: for untrained models, and for models that learned to recall the first of the letters. "
    "Recurrent encoders read from left to right. Truncated back-propagation is measured on a recurrent language model.",
    measure_gradient,
)


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


TEN_LETTERS = tuple("abcdefghij")


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
    data, _ = letters(budget, symbols=TEN_LETTERS)
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
    sets = {count: letters(budget, length=(3, 8), symbols=TEN_LETTERS, count=count)[0] for count in DATA}
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
