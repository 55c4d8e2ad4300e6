"""Contract of a claim: statement, measurement, result; its budget; and the small networks that claims share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.flow import BOS, EOS, SPECIALS, Batch, Example, Padded
from transduce.inference import Model, load
from transduce.model import Transducer
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.run import Run
from transduce.storage import make_folder, replace_file
from transduce.synthetic.algorithmic import LETTERS, split
from transduce.training.experiment import train

Choice = TypeVar("Choice")
Cell = str | int | float | bool | None
PanelKind = Literal["line", "bar", "points", "heat"]
GRU: dict[str, Any] = {"kind": "recurrent", "cell": "gru", "width": 128, "dropout": 0.0}
ONE_VECTOR = {"encoder": GRU, "decoder": {**GRU, "context": "initial"}}
ATTENTION = {"encoder": GRU, "decoder": {**GRU, "context": {"kind": "luong", "input_feeding": False}}}
LAYERS: dict[str, Any] = {
    "kind": "transformer",
    "layers": 2,
    "width": 64,
    "heads": 4,
    "ff_width": 256,
    "dropout": 0.0,
}
TRANSFORMER = {"encoder": LAYERS, "decoder": LAYERS}
LETTER_LENGTHS = (3, 12)


@dataclass(frozen=True)
class Series:
    """One curve, one group of bars, one cloud of points, or one row of a heat map."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] = ()  # ends of the confidence intervals, where there are any
    high: Sequence[float] = ()
    names: Sequence[str] = ()  # text beside points
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram of a figure."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: PanelKind = "line"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class ClaimTable:
    """A table of measured values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Check:
    """One measured direction: what was expected, whether it was found, and the numbers that it rests on."""

    statement: str
    holds: bool
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Measurement:
    """What a claim measured. `holds`: every check found the direction that the claim states."""

    tables: Sequence[ClaimTable]
    panels: Sequence[Panel]
    checks: Sequence[Check]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        panels = [
            Panel(**{**panel, "series": [Series(**one) for one in panel["series"]]}) for panel in content["panels"]
        ]
        tables = [ClaimTable(**table) for table in content["tables"]]
        return cls(tables, panels, [Check(**check) for check in content["checks"]])


@dataclass(frozen=True)
class Budget:
    """How much a measurement may cost, and where its data and trained models are kept."""

    folder: Path
    quick: bool = True  # False: more updates, lengths and seeds
    seed: int = 1
    device: str = "cpu"
    data: Path | None = None  # pairs of the user, measured beside the generated ones
    model: str | None = None  # a trained or imported run, measured beside the one that is trained here
    report: Callable[[str], None] = field(default=lambda text: None, compare=False)

    def pick(self, quick: Choice, full: Choice) -> Choice:
        return quick if self.quick else full

    @property
    def size(self) -> str:
        return self.pick("quick", "full")

    def write_pairs(self, name: str, examples: Iterable[Example]) -> str:
        """Writes pairs as TSV; returns the path."""
        path = make_folder(self.folder / "data") / f"{name}.tsv"
        replace_file(path, "".join(f"{one.source}\t{one.target}\n" for one in examples))
        return str(path)

    def train(self, name: str, recipe: Mapping[str, Any]) -> Model:
        """The model of a recipe, from the folder if it was trained before."""
        folder = self.folder / "models" / f"{name}-{self.size}-{self.seed}"
        if not Run(folder).metrics():
            self.report(f"training {name}")
            training = {"seed": self.seed, "device": self.device, **recipe["training"]}
            outcome = train({**recipe, "training": training}, folder, resume=True).outcome
            if outcome.reason == "interrupted":
                raise KeyboardInterrupt(name)
        return load(folder, device=self.device, trust_user_code=True)

    def run(self, name: str) -> Run:
        """The run directory of a model that was trained under this name."""
        return Run(self.folder / "models" / f"{name}-{self.size}-{self.seed}")

    def with_seed(self, seed: int) -> Budget:
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Claim:
    """A claim of the literature, and the function that measures it."""

    name: str
    statement: str  # one sentence
    source: str  # the paper that makes it
    method: str  # what is measured, and how
    measure: Callable[[Budget], Measurement]
    takes: frozenset[str] = frozenset()  # which of `data` and `model` of the budget it uses


def power_law(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """a and b of values = a * sizes ** b: least squares of the logarithms."""
    if len(sizes) < 2 or min(values) <= 0:
        raise InputError("a power law needs two or more positive values")
    slope, offset = np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)
    return float(np.exp(offset)), float(slope)


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent of the power law that fits best."""
    return power_law(sizes, values)[1]


def untrained(model: Mapping[str, Any], seed: int, vocabulary: int = 30) -> Transducer:
    """A network with initial weights, in evaluation mode."""
    torch.manual_seed(seed)
    recipe = complete_recipe(parse({"model": model, "tokens": {"shared": True}}))
    return build_model(recipe.model, vocabulary, vocabulary).eval()


def random_batch(sources: int, length: int, target: int, seed: int, vocabulary: int = 30) -> Batch:
    """Random ids: sources `x1 .. xm </s>`, targets `<s> y1 .. yn </s>`."""
    chance = torch.Generator().manual_seed(seed)

    def ids(columns: int) -> list[list[int]]:
        return torch.randint(len(SPECIALS), vocabulary, (sources, columns), generator=chance).tolist()

    source = Padded.from_rows([[*row, EOS] for row in ids(length)])
    return Batch(source, Padded.from_rows([[BOS, *row, EOS] for row in ids(target)]))


def encode_pairs(model: Model, examples: Sequence[Example]) -> Batch:
    """The examples as one batch for the network of a trained model."""
    sources = [[*model.source.encode(one.source).ids, EOS] for one in examples]
    targets = [[BOS, *model.target.encode(one.target or "").ids, EOS] for one in examples]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets)).to(model.device)


@torch.no_grad()
def teacher_forced(model: Model, batch: Batch) -> Tensor:
    """Which tokens are the most probable after the reference prefix (B T)."""
    return model.network(batch).logits.argmax(-1) == batch.labels.values


def exact_match(model: Model, examples: Sequence[Example]) -> float:
    """The share of outputs of greedy search that equal their target."""
    outputs = model.generate([one.source for one in examples])
    return sum(out.text == one.target for out, one in zip(outputs, examples, strict=True)) / len(examples)


def training(steps: int, **changes: Any) -> dict[str, Any]:
    """The section `training` of a short run, validated at its end."""
    return {
        "steps": steps,
        "batch_tokens": 2048,
        "objective": {"label_smoothing": 0.0},
        "optimiser": {"learning_rate": 0.003},
        "schedule": {"kind": "cosine", "warmup": min(50, steps // 4)},
        "validate_every": steps,
        "checkpoint_every": steps,
        "validate_examples": 100,
        "keep": 1,
        "packing": False,
        **changes,
    }


def recipe(data: Mapping[str, str], model: Mapping[str, Any], steps: int, **changes: Any) -> dict[str, Any]:
    """A recipe for pairs of words, with greedy search; `changes` are those of `training`."""
    tokens = {"kind": "words", "size": 2000}
    return {
        "data": dict(data),
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": dict(model),
        "training": training(steps, **changes),
        "generation": {"strategy": "greedy", "max_length": 64},
        "evaluation": {"metrics": ["exact"], "resamples": 200},
    }


def letters(
    budget: Budget,
    task: str = "reverse",
    *,
    count: int = 20_000,
    length: tuple[int, int] = LETTER_LENGTHS,
    symbols: Sequence[str] = LETTERS,
) -> tuple[dict[str, str], list[Example]]:
    """Files with pairs of letters to train on, and the test pairs. Smaller sets are the beginning of larger ones."""
    train, dev, test = split(task, 20_000, 200, budget.pick(500, 1000), seed=1, length=length, symbols=symbols)
    name = f"{task}-{length[0]}-{length[1]}-{len(symbols)}"
    files = {"train": budget.write_pairs(f"{name}-train-{count}", train[:count])}
    files["dev"] = budget.write_pairs(f"{name}-dev", dev)
    return {**files, "cache": str(budget.folder / "cache")}, test


@dataclass(frozen=True)
class Validation:
    """One validation of a run: after how many updates and seconds of training, and its scores."""

    step: int
    seconds: float  # of an undisturbed machine: see `seconds_per_update`
    scores: Mapping[str, float]


def validations(run: Run) -> list[Validation]:
    """The validations in the log of a run."""
    entries = [json.loads(line) for line in run.log.read_text(encoding="utf-8").splitlines()]
    seconds = seconds_per_update(entries)
    return [
        Validation(entry["step"], entry["step"] * seconds, {name: entry[name] for name in ("loss", "exact")})
        for entry in entries
        if entry["kind"] == "validation"
    ]


def seconds_per_update(entries: Sequence[Mapping[str, Any]]) -> float:
    """The lowest tenth of the times between two entries of a log: other programs make the rest of them longer."""
    between = [
        (second["seconds"] - first["seconds"]) / (second["step"] - first["step"])
        for first, second in pairwise(entries)
        if first["kind"] == second["kind"] == "update"  # no validation in between
    ]
    return float(np.quantile(between, 0.1)) if between else math.nan


def scaled(model: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The same model with another width; that of feed-forward layers in proportion."""

    def resize(spec: Mapping[str, Any]) -> dict[str, Any]:
        changed = {**spec, "width": width}
        return changed | ({"ff_width": spec["ff_width"] * width // spec["width"]} if "ff_width" in spec else {})

    return {side: resize(spec) for side, spec in model.items()}
