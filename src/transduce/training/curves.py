"""A log enters; a picture of its curves leaves."""

from __future__ import annotations

from pathlib import Path

from transduce.training.report import read_log

LOSSES = ("loss", "nll", "perplexity")


def draw_curves(log_path: str | Path, png_path: str | Path) -> None:
    """Losses above, the metrics of the development set in the middle where there are any, the rate below."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    log = read_log(log_path)
    updates = [line for line in log if line.get("kind") == "update" and line["loss"] is not None]
    checks = [line for line in log if line.get("kind") == "validation"]
    metrics = sorted({name for line in checks for name in line} - {"kind", "step", *LOSSES})
    rows = 3 if metrics else 2
    figure = Figure(figsize=(8, 2.6 * rows), layout="constrained")
    loss, *middle, rate = figure.subplots(rows, 1, sharex=True)
    steps = [line["step"] for line in updates]
    loss.plot(steps, [line["loss"] for line in updates], color="0.6", linewidth=1, label="training")
    told = [line for line in checks if line.get("loss") is not None]
    loss.plot([line["step"] for line in told], [line["loss"] for line in told], "o-", label="development")
    loss.set_ylabel("loss a token")
    loss.legend()
    for name in metrics:
        seen = [line for line in checks if line.get(name) is not None]
        middle[0].plot([line["step"] for line in seen], [line[name] for line in seen], "o-", label=name)
    if middle:
        middle[0].set_ylabel("development")
        middle[0].legend()
    rate.plot(steps, [line["learning_rate"] for line in updates], color="tab:green")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("update")
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=120, format="png")
