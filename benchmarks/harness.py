"""Benchmark harness: interleaved repeats, medians, spreads and speed ratios, as a table and as JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

OURS = "transduce"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True)
class Implementation:
    """One implementation of the task. `run` does the task once and returns the number of tokens."""

    name: str
    run: Callable[[], int]


@dataclass(frozen=True)
class Measurement:
    """The speed of one implementation in one setting."""

    setting: str
    name: str
    tokens_per_second: float  # median over the repeats
    spread: float  # (slowest - fastest) / median
    ratio: float | None  # our speed / this speed, median over the repeats
    peak_memory: int  # bytes on the device; 0: not measured
    failed: str = ""  # the error, if it could not run


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    setting: str, implementations: list[Implementation], device: torch.device, repeats: int, clock: str = "wall"
) -> list[Measurement]:
    """Each repeat runs all implementations one after the other, so that slow phases of the machine affect all alike.

    The processor clock counts the time of all threads and excludes other programs: for single-threaded
    implementations on a busy machine.
    """
    now = CLOCKS[clock]
    failed = {one.name: reason for one in implementations if (reason := _problem(one))}
    implementations = [one for one in implementations if one.name not in failed]
    speeds: dict[str, list[float]] = {one.name: [] for one in implementations}
    peaks = dict.fromkeys(speeds, 0)
    for _ in range(repeats):
        for one in implementations:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            wait(device)
            start = now()
            tokens = one.run()
            wait(device)
            speeds[one.name].append(tokens / (now() - start))
            if device.type == "cuda":
                peaks[one.name] = max(peaks[one.name], torch.cuda.max_memory_allocated(device))
    ours = speeds.get(OURS)
    return [
        Measurement(
            setting,
            name,
            median(runs),
            (max(runs) - min(runs)) / median(runs),
            None if ours is None or name == OURS else median(a / b for a, b in zip(ours, runs, strict=True)),
            peaks[name],
        )
        for name, runs in speeds.items()
    ] + [Measurement(setting, name, 0.0, 0.0, None, 0, reason) for name, reason in failed.items()]


def _problem(one: Implementation) -> str:
    """Two warm-up runs; an error of one implementation must not stop the others."""
    try:
        for _ in range(2):
            one.run()
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}"


def show(title: str, rows: list[Measurement], console: Console) -> None:
    table = Table("setting", "implementation", "tokens/s", "spread", "speed-up", "peak GB", title=title)
    for row in rows:
        if row.failed:
            table.add_row(row.setting, row.name, row.failed)
            continue
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        peak = f"{row.peak_memory / 1e9:.2f}" if row.peak_memory else ""
        table.add_row(row.setting, row.name, f"{row.tokens_per_second:,.0f}", f"{row.spread:.0%}", ratio, peak)
    console.print(table)


def write(path: Path, title: str, rows: list[Measurement], device: torch.device, clock: str = "wall") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content_rows = [asdict(row) for row in rows]
    content = {"benchmark": title, "machine": machine(device), "clock": clock, "rows": content_rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
