"""Figures of the server under load, from the records of `benchmarks.serve` and `make fuzz-api`, beside their goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    goal: str
    measured: str
    met: bool


class Record:
    """The rows of a record by setting and name."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        self.machine, self.rows = str(content["machine"]), content["rows"]

    def row(self, setting: str, name: str = "transduce") -> Row:
        return next(one for one in self.rows if one["setting"] == setting and one["name"] == name)


def load_figures(record: Record) -> Iterator[Figure]:
    """Figures of the record of the load."""
    steady, overload, drain = (record.row(name) for name in ("steady", "overload", "SIGTERM under load"))
    wrong = steady["wrong"] + steady["lost"]
    name = f"64 clients, {steady['requests']:,} requests"
    yield Figure(name, "none lost or wrong", f"{wrong} lost or wrong", not wrong)
    yield _milliseconds(f"{name}: median", 150, steady["p50_ms"])
    yield _milliseconds(f"{name}: 99th percentile", 1500, steady["p99_ms"])
    equal = steady["metrics_equal_tally"]
    yield Figure("counters of `/metrics`", "equal the clients' tally", "equal" if equal else "different", equal)
    gain = record.row("batching gain")["ratio"]
    yield Figure("throughput of batches of 32 against batches of 1", "at least 4 times", f"{gain:.2f} times", gain >= 4)
    yield _milliseconds(
        f"four times the load: {overload['refused']:,} refusals, 99th percentile", 50, overload["refusal_p99_ms"]
    )
    without = overload["without_retry_after"]
    yield Figure("refusals without `Retry-After`", "0", f"{without}", not without)
    most = round(2 * steady["p99_ms"], 1)
    yield _milliseconds(
        "four times the load: answers, 99th percentile (goal: twice that of 64 clients)", most, overload["p99_ms"]
    )
    depth, limit = overload["queue_most"], overload["queue_limit"]
    yield Figure("four times the load: sources in the queue", f"at most {limit}", f"{depth:.0f}", depth <= limit)
    left, late = record.row("client left"), record.row("deadline of 0.1 s")
    yield _seconds("a client leaves: its work ends after", 1, left["seconds"])
    measured = f"{late['status']} after {late['seconds']:g} s, {late['active_after']:.0f} sources searched"
    met = late["status"] == 504 and not late["active_after"]
    yield Figure("a deadline of 0.1 s passes", "504, slots free", measured, met)
    slow = record.row("unfinished header")
    measured = f"closed after {slow['seconds']:g} s" if slow["closed"] else "left open"
    yield Figure("a header that never ends", "closed after 10 s", measured, slow["closed"] and slow["seconds"] <= 11)
    lost = drain["lost"] + drain["wrong"]
    yield Figure("SIGTERM under load: accepted requests lost", "0", f"{lost}", not lost)
    yield _seconds("SIGTERM under load: exit after", 30, drain["exit_after"])
    yield _seconds("cold start: first decode after", 5, record.row("cold start")["seconds"])
    limits = record.row("limits")["status_and_named"]
    good = sum(400 <= status < 500 and named for status, named in limits.values())
    yield Figure("limits that are refused with a 4xx and their name", f"{len(limits)}", f"{good}", good == len(limits))


PEERS = {
    "CTranslate2": "CTranslate2 as it comes",
    "CTranslate2, one thread a call": "CTranslate2 with `intra_threads=1` and `inter_threads` of all cores",
}


def peer_figures(record: Record) -> Iterator[Figure]:
    """Beside CTranslate2 behind a plain FastAPI endpoint."""
    for peer, description in PEERS.items():
        for count in (1, 16, 64):
            ours, other = (record.row(f"{count} clients", name) for name in ("transduce", peer))
            speeds = [one["requests_per_second"] for one in (ours, other)]
            ratio = speeds[0] / speeds[1]
            work = [one["processor_ms"] for one in (ours, other)]
            measured = f"{ratio:.2f} times: {speeds[0]:,.0f} and {speeds[1]:,.0f} requests a second"
            measured += f", {work[0]:.2f} and {work[1]:.2f} ms of processor time each"
            name = f"{count} clients, beside {description}"
            yield Figure(f"{name}: throughput", "at least 1.5 times", measured, ratio >= 1.5)
            late = [one["p99_ms"] for one in (ours, other)]
            yield Figure(f"{name}: 99th percentile", f"at most {late[1]:g} ms", f"{late[0]:g} ms", late[0] <= late[1])


def demo_figures(record: Record) -> Iterator[Figure]:
    for row in record.rows:
        if row["setting"] == "64 clients, demo model":
            wrong = row["wrong"] + row["lost"]
            name = f"64 clients, demo model, {row['requests']:,} requests"
            yield Figure(name, "none lost or wrong", f"{wrong} lost or wrong", not wrong)


def soak_figures(record: Record) -> Iterator[Figure]:
    soak = record.row("soak")
    name = f"{soak['minutes']:g} minutes, {soak['requests']:,} requests"
    growth, files = soak["rss_growth"], soak["open_files"]
    wrong = soak["wrong"] + soak["lost"]
    yield Figure(f"{name}: lost or wrong", "0", f"{wrong}", not wrong)
    yield Figure(f"{name}: growth of the memory", "at most 5 %", f"{growth:.1%}".replace("%", " %"), growth <= 0.05)
    yield Figure(f"{name}: open files", "flat", f"{files[0]} and {files[1]}", abs(files[1] - files[0]) <= 2)


def engine_figures(record: Record) -> Iterator[Figure]:
    for row in record.rows:
        measured = f"{row['ratio']:.0%}: {row['tokens_per_second']:,.0f} tokens a second; without training, "
        measured = f"{measured}{row['equal_outputs']:.0%} of the outputs are equal".replace("%", " %")
        name = f"{record.machine.split(',')[0]}, {row['setting']}, in one process: speed of offline `generate`"
        yield Figure(name, "at least 80 %", measured, row["ratio"] >= 0.8)


def fuzz_figure(content: Mapping[str, Any]) -> Figure:
    """A 504 is no failure: it is given where a request asked for less time than its answer takes."""
    counts = [(int(status), count) for row in content["statuses"].values() for status, count in row.items()]
    failures = sum(count for status, count in counts if status >= 500 and status != 504)
    name = f"{content['cases']:,} requests drawn from `/openapi.json`: answers 5xx"
    return Figure(name, "0", f"{failures}", not failures)


PARTS: tuple[tuple[str, str, Callable[[Record], Iterator[Figure]]], ...] = (
    ("serve.json", "python -m benchmarks.serve", load_figures),
    ("serve.json", "python -m benchmarks.serve", demo_figures),
    ("serve.json", "python -m benchmarks.serve", peer_figures),
    ("serve-soak.json", "python -m benchmarks.serve --soak 30", soak_figures),
    ("serve-engine.json", "python -m benchmarks.serve --engine", engine_figures),
)


def table(results: Path = RESULTS) -> list[str]:
    """The lines of the generated block. Records that do not exist are named."""
    figures, machines, missing = list[Figure](), list[str](), dict[str, None]()
    for name, command, make in PARTS:
        if not (results / name).exists():
            missing[command] = None
            continue
        record = Record(results / name)
        figures += make(record)
        if name == "serve.json" and record.machine not in machines:
            machines.append(record.machine)
    fuzz = results / "api-fuzz.json"
    if fuzz.exists():
        figures.append(fuzz_figure(json.loads(fuzz.read_text(encoding="utf-8"))))
    else:
        missing["make fuzz-api"] = None
    lines = [""]
    if machines:
        lines += [f"Measured on {'; '.join(machines)}. Clients and server share the machine.", ""]
    if figures:
        lines += ["| figure | goal | measured | |", "|---|---|---|---|"]
        lines += [f"| {one.name} | {one.goal} | {one.measured} | {'' if one.met else 'missed'} |" for one in figures]
        missed = sum(not one.met for one in figures)
        sentence = "All of these goals are met." if not missed else f"{missed} of {len(figures)} goals are missed."
        lines += ["", sentence]
    if missing:
        lines += ["", f"Not recorded yet: {', '.join(f'`{one}`' for one in missing)}."]
    return [*lines, "", ""]


def _milliseconds(name: str, most: float, measured: float) -> Figure:
    return Figure(name, f"at most {most:g} ms", f"{measured:g} ms", measured <= most)


def _seconds(name: str, most: float, measured: float) -> Figure:
    return Figure(name, f"at most {most:g} s", f"{measured:g} s", measured <= most)
