"""Scaling of time and memory with model size, batch size and number of lines.

The exponent p of cost ~ size ** p is the slope of a line through the upper half of the points on logarithmic axes.
Memory of a model is the peak that torch allocates during one pass, without weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from benchmarks.pipeline import Stage, measure_lines, measure_search
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {"kind": "transformer", "heads": 4},
    "recurrent": {"kind": "recurrent", "cell": "gru"},
}
LARGEST = 10_000_000  # lines, for which the stages of preparation are extrapolated


@dataclass(frozen=True)
class Shape:
    source: int = 32
    target: int = 32
    batch: int = 8
    vocabulary: int = 2000
    width: int = 128
    depth: int = 2


AXES = {
    "source": [64, 128, 256],
    "target": [16, 32, 64],
    "batch": [4, 8, 16],
    "vocabulary": [2000, 4000, 8000],
    "width": [64, 128, 256],
    "depth": [1, 2, 4],
}


@dataclass(frozen=True)
class Growth:
    """The cost of one thing against one size."""

    what: str
    axis: str
    sizes: list[int]
    seconds: list[float]
    memory: list[int]  # bytes

    @property
    def time_power(self) -> float:
        return power(self.sizes, self.seconds)

    @property
    def memory_power(self) -> float:
        return power(self.sizes, self.memory)


def power(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log size, by least squares through the upper half of the points."""
    half = max(2, (len(sizes) + 1) // 2)
    xs = [math.log(size) for size in sizes[-half:]]
    ys = [math.log(max(cost, 1e-12)) for cost in costs[-half:]]
    x, y = sum(xs) / half, sum(ys) / half
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that torch had allocated at most, on top of what there was before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def works(kind: str, shape: Shape) -> dict[str, Callable[[], object]]:
    """One pass of training, forward and back, and one greedy search of forced length."""
    part = {**MODELS[kind], "layers": shape.depth, "width": shape.width}
    if kind == "Transformer":
        part["ff_width"] = 4 * shape.width
    recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))
    torch.manual_seed(1)
    model = build_model(recipe.model, shape.vocabulary, shape.vocabulary)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sources = torch.randint(4, shape.vocabulary, (shape.batch, shape.source - 1)).tolist()
    targets = torch.randint(4, shape.vocabulary, (shape.batch, shape.target - 1)).tolist()
    source = Padded.from_rows([[*row, EOS] for row in sources])
    batch = Batch(source, Padded.from_rows([[BOS, *row, EOS] for row in targets]))
    objective, longest = CrossEntropy(), torch.full((shape.batch,), shape.target)

    def train() -> None:
        model.train()
        objective(model, batch).total.backward()

    def generate() -> None:
        model.eval()
        search(model, Batch(source), Greedy(), max_lengths=longest, processors=(MinLength(length=shape.target),))

    return {"training": train, "generation": generate}


def timed(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def grow_models(axes: dict[str, list[int]], repeats: int) -> list[Growth]:
    found = []
    for kind in MODELS:
        for axis, sizes in axes.items():
            costs: dict[str, list[tuple[float, int]]] = {"training": [], "generation": []}
            for size in sizes:
                for name, work in works(kind, replace(Shape(), **{axis: size})).items():
                    costs[name].append((timed(work, repeats), peak_of(work)))
            for name, rows in costs.items():
                times, peaks = zip(*rows, strict=True)
                found.append(Growth(f"{kind} {name}", axis, sizes, list(times), list(peaks)))
    return found


def by_stage(stages: list[Stage]) -> list[Growth]:
    found = []
    for name in dict.fromkeys(stage.name for stage in stages):
        own = [stage for stage in stages if stage.name == name]
        sizes, seconds = [stage.lines for stage in own], [stage.seconds for stage in own]
        found.append(Growth(name, "lines", sizes, seconds, [stage.peak for stage in own]))
    return found


def show(growths: list[Growth], console: Console) -> None:
    table = Table("what", "against", "sizes", "seconds", "time ~ size^", "MB", "memory ~ size^", title="growth")
    for one in growths:
        ends = (f"{one.sizes[0]:,} - {one.sizes[-1]:,}", f"{one.seconds[0]:.3f} - {one.seconds[-1]:.3f}")
        room = f"{one.memory[0] / 1e6:.1f} - {one.memory[-1] / 1e6:.1f}"
        table.add_row(one.what, one.axis, *ends, f"{one.time_power:.2f}", room, f"{one.memory_power:.2f}")
    console.print(table)
    longest = Table("stage", "us a line", "bytes a line", f"{LARGEST:,} lines", "MB", title="corpus, extrapolated")
    for one in growths:
        if one.axis == "lines" and one.sizes[-1] >= 10**5:
            lines = one.sizes[-1]
            # From the growth between the last two sizes, so that what is there from the start is not multiplied.
            more = max(0, one.memory[-1] - one.memory[-2]) / (lines - one.sizes[-2])
            rate, room = one.seconds[-1] / lines, one.memory[-1] + more * (LARGEST - lines)
            longest.add_row(
                one.what, f"{1e6 * rate:.1f}", f"{more:.0f}", f"{rate * LARGEST:,.0f} s", f"{room / 1e6:,.0f}"
            )
    console.print(longest)


def draw(growths: list[Growth], path: Path) -> None:
    """One picture: a field for each axis, time above and memory below, everything relative to its first point."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator

    axes = list(dict.fromkeys(one.axis for one in growths))
    figure, fields = pyplot.subplots(2, len(axes), figsize=(3.4 * len(axes), 7), squeeze=False)
    for column, axis in enumerate(axes):
        for one in (growth for growth in growths if growth.axis == axis):
            for row, costs, slope in ((0, one.seconds, one.time_power), (1, one.memory, one.memory_power)):
                if min(costs) > 0:
                    relative = [cost / costs[0] for cost in costs]
                    sizes = [size / one.sizes[0] for size in one.sizes]
                    fields[row][column].loglog(sizes, relative, marker="o", ms=3, label=f"{one.what}: {slope:.2f}")
        for row, name in ((0, "time"), (1, "memory")):
            field = fields[row][column]
            field.set_title(f"{name} ~ {axis}", fontsize=9)
            field.tick_params(labelsize=7)
            for one in (field.xaxis, field.yaxis):
                one.set_major_locator(LogLocator(base=2))
                one.set_major_formatter("{x:g}")
                one.set_minor_locator(NullLocator())
            field.legend(fontsize=6)
            field.plot([1, 4], [1, 4], color="grey", lw=0.7, ls=":")  # growth in proportion
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def run(
    lines: list[int], repeats: int, tiny: bool, output: Path, console: Console, corpus: bool = False
) -> list[Growth]:
    """`corpus`: only what happens to a corpus is measured; the rest is taken from what was written before."""
    axes = {name: sizes[:2] for name, sizes in AXES.items()} if tiny else AXES
    growths = []
    if not corpus:
        growths = grow_models(axes, repeats) + by_stage(measure_search([50, 100] if tiny else [500, 1000, 2000]))
    prepared = by_stage(measure_lines([500, 1000] if tiny else lines))
    show([*growths, *prepared], console)
    if corpus and (output / "scale-cpu.json").exists():
        known = json.loads((output / "scale-cpu.json").read_text(encoding="utf-8"))["rows"]
        fields = [{name: row[name] for name in ("what", "axis", "sizes", "seconds", "memory")} for row in known]
        measured = {one.what for one in prepared}
        growths = [Growth(**row) for row in fields if row["what"] not in measured]
    growths += prepared
    rows = [{**asdict(one), "time_power": one.time_power, "memory_power": one.memory_power} for one in growths]
    content = {"benchmark": "scale", "machine": machine(torch.device("cpu")), "rows": rows}
    output.mkdir(parents=True, exist_ok=True)
    (output / "scale-cpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(growths, output / "scale-cpu.png")
    return growths
