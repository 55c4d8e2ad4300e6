"""Contract of a claim: statement, measurement, result; and the budget of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from transduce.errors import InputError
from transduce.flow import Example
from transduce.inference import Model, load
from transduce.run import Run
from transduce.storage import make_folder, replace_file
from transduce.training.experiment import train

Choice = TypeVar("Choice")
Cell = str | int | float | bool | None
PanelKind = Literal["line", "bar", "points", "heat"]


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
