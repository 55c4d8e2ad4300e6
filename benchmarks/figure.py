"""Figure of all benchmark results: speed ratios against each peer, setting by setting.

`python -m benchmarks figure` writes docs/performance.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import OURS

PANELS = {  # prefix of result names: title of the panel
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
OWN = (OURS, "ours")  # prefixes of our own implementations, which are no peers


@dataclass(frozen=True)
class Bar:
    panel: str
    label: str
    peer: str
    ratio: float


def bars(folder: Path) -> list[Bar]:
    """Every peer in every setting, panel by panel in the order of PANELS."""
    found = []
    for path in sorted(folder.glob("*.json")):
        kind = f"{path.stem.split('-')[0]}-{'cuda' if '-cuda' in path.stem else 'cpu'}"
        if kind not in PANELS:
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
            found.append(Bar(PANELS[kind], label, row["name"], row["ratio"]))
    return sorted(found, key=lambda bar: list(PANELS.values()).index(bar.panel))


def draw(found: list[Bar], path: Path) -> None:
    """A panel for each kind of benchmark, a row for each setting, a mark for each peer, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(bar.panel for bar in found))
    peers = sorted({bar.peer for bar in found})
    colours = {peer: pyplot.get_cmap("tab20")(number % 20) for number, peer in enumerate(peers)}
    labels = {name: list(dict.fromkeys(bar.label for bar in found if bar.panel == name)) for name in names}
    heights = [len(labels[name]) + 1.6 for name in names]
    figure, panels = pyplot.subplots(
        len(names), 1, figsize=(9, 0.19 * sum(heights) + 0.9), height_ratios=heights, sharex=True, squeeze=False
    )
    for name, panel in zip(names, panels[:, 0], strict=True):
        for bar in (one for one in found if one.panel == name):
            panel.plot(bar.ratio, labels[name].index(bar.label), "o", ms=5, color=colours[bar.peer])
        panel.axvline(1, color="grey", lw=0.8)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_yticks(range(len(labels[name])), labels[name], fontsize=7)
        panel.set_ylim(len(labels[name]) - 0.4, -0.6)
        panel.set_title(name, fontsize=8, loc="left", pad=2)
        panel.grid(axis="x", lw=0.3)
    panels[-1, 0].set_xlabel("speed-up over the peer (above 1: Transduce is faster)", fontsize=8)
    marks = [pyplot.Line2D([], [], marker="o", ls="", color=colours[peer], label=peer) for peer in peers]
    figure.legend(handles=marks, fontsize=7, ncols=4, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.02 + 0.013 * -(-len(peers) // 4), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def run(folder: Path, path: Path) -> None:
    draw(bars(folder), path)
