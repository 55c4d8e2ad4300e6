"""The JSON of all benchmarks in, one picture of ratios out: how many times as fast as each peer, setting by setting.

`python -m benchmarks picture` writes docs/performance.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import OURS

FIELDS = {  # beginnings of the names of results, and what stands above them
    "generate-cuda": "generation, GPU",
    "natural-cuda": "generation, GPU, a trained model's own lengths",
    "generate-cpu": "generation, CPU, one line",
    "bulk-cpu": "generation, CPU, many lines",
    "natural-cpu": "generation, CPU, a trained model's own lengths",
    "train-cuda": "training, GPU",
    "train-cpu": "training, CPU",
    "recurrent-cuda": "recurrent training, GPU",
    "recurrent-cpu": "recurrent training, CPU",
}
PRECISIONS = {"int8": "int8", "float32": "fp32", "bfloat16": "bf16"}
OWN = (OURS, "ours")  # rows of our own other ways are no peers


@dataclass(frozen=True)
class Bar:
    field: str
    label: str
    peer: str
    ratio: float


def bars(folder: Path) -> list[Bar]:
    """Every peer in every setting, field by field in the order of FIELDS."""
    found = []
    for path in sorted(folder.glob("*.json")):
        kind = f"{path.stem.split('-')[0]}-{'cuda' if '-cuda' in path.stem else 'cpu'}"
        if kind not in FIELDS:
            continue
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        full = next((name for name in PRECISIONS if name in path.stem), "")
        variant = path.stem.partition(full)[2].strip("-").replace("-", " ") if full else ""
        for row in rows:
            if row["ratio"] is None or row.get("failed") or row["name"].startswith(OWN):
                continue
            short = PRECISIONS.get(full, "")
            parts = (row["setting"], "" if short in row["setting"] else short, variant)
            label = " ".join(part for part in parts if part)
            found.append(Bar(FIELDS[kind], label, row["name"], row["ratio"]))
    return sorted(found, key=lambda bar: list(FIELDS.values()).index(bar.field))


def draw(found: list[Bar], path: Path) -> None:
    """A field for each kind of benchmark: a row for each setting, a mark for each peer, in logarithms around 1."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(bar.field for bar in found))
    peers = sorted({bar.peer for bar in found})
    colours = {peer: pyplot.get_cmap("tab20")(number % 20) for number, peer in enumerate(peers)}
    labels = {name: list(dict.fromkeys(bar.label for bar in found if bar.field == name)) for name in names}
    heights = [len(labels[name]) + 1.6 for name in names]
    figure, fields = pyplot.subplots(
        len(names), 1, figsize=(9, 0.19 * sum(heights) + 0.9), height_ratios=heights, sharex=True, squeeze=False
    )
    for name, field in zip(names, fields[:, 0], strict=True):
        for bar in (one for one in found if one.field == name):
            field.plot(bar.ratio, labels[name].index(bar.label), "o", ms=5, color=colours[bar.peer])
        field.axvline(1, color="grey", lw=0.8)
        field.set_xscale("log", base=2)
        field.xaxis.set_major_formatter("{x:g}")
        field.set_yticks(range(len(labels[name])), labels[name], fontsize=7)
        field.set_ylim(len(labels[name]) - 0.4, -0.6)
        field.set_title(name, fontsize=8, loc="left", pad=2)
        field.grid(axis="x", lw=0.3)
    fields[-1, 0].set_xlabel("times as fast as the peer (right of 1: we are faster)", fontsize=8)
    marks = [pyplot.Line2D([], [], marker="o", ls="", color=colours[peer], label=peer) for peer in peers]
    figure.legend(handles=marks, fontsize=7, ncols=4, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.02 + 0.013 * -(-len(peers) // 4), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def run(folder: Path, path: Path) -> None:
    draw(bars(folder), path)
