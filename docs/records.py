"""Records of the numbers in the documentation: the command that makes each, its scores, and what has changed since.

A number on a page is followed by its place in a record: `96.4<!-- gru.exact -->`. The record `gru` is that of the
command on a page that writes `runs/gru`, or `gru.json`. `97.3<!-- scoreboard/fsdd.accuracy -->` is the mean of a row of
the scoreboard. `docs/generate.py` writes the numbers of the records into the pages.

    python docs/records.py            runs all recorded commands again, and reports what has changed
    python docs/records.py gru lstm   the same for some of them
    python docs/records.py --missing  runs commands that have no record, and writes it
    python docs/records.py --write    writes new records in place of the old ones
    python docs/records.py --data DIR also runs commands on data that cannot be published: DIR has a folder for each set
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RECORDS = FOLDER / "records"
SCOREBOARD = FOLDER.parent / "scoreboard"  # the records of `transduce reproduce`
SHARED = ("docs", "recipes", "examples")  # what commands name relative to the repository
# A dash stands for a number whose command has not been run yet.
NAME = r"(?P<name>(?:scoreboard/)?[a-z][\w-]*)"
MARK = re.compile(rf"(?P<shown>(?:(?<!\w)-)?[\d.,]*\d|–)<!-- {NAME}\.(?P<key>[a-z_][\w@]*(?:\.(?:low|high))?) -->")
COUNTS = ("parameters", "seconds", "updates", "seeds", "leaked_pairs", "shapes", "words", "removals", "lines")
MEASURED = ("removed", "random", "swap", "occlusion")  # of attention
DECIMALS = {
    **dict.fromkeys(COUNTS, 0),
    **dict.fromkeys(MEASURED, 2),
    "perplexity": 2,
    "per": 2,
    "bits_per_character": 3,
    "nats_per_character": 3,
}
WRITES = re.compile(r"(?:--run runs/|--json )(?P<name>[a-z][\w-]*)(?:\.json)?(?:\s|$)")
# Data sets that commands name and no command makes; the folder of the user has them (--data).
GIVEN = re.compile(r"(?<![\w/])(flickr8k)/")
MEASURES = ("transduce ", "python examples/")
PREPARES = ("transduce data ", "transduce demo --task dates --write", "transduce encode-images ", "head ", "mkdir ")


@dataclass(frozen=True)
class Command:
    """A command on a page. The name is that of the run or the JSON file that it writes; others only prepare files."""

    page: str
    line: str
    name: str | None = None
    python: bool = False

    @property
    def needs(self) -> list[str]:
        """The runs that the command reads."""
        read = re.sub(r"--run runs/\S+", "", self.line)
        return re.findall(r"\bruns/([a-z][\w-]*)", read)

    @property
    def given(self) -> set[str]:
        """The data sets that the command reads and that no command makes."""
        return set(GIVEN.findall(self.line))


def pages() -> list[Path]:
    return sorted(path for room in ("ladder", "tasks") for path in (FOLDER / room).glob("*.md"))


def page_commands(path: Path) -> Iterator[Command]:
    """What a page runs, in order: Python that writes files, commands that prepare files, commands with a result."""
    page = str(path.relative_to(FOLDER))
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        if language == "python":
            if "write_text(" in block:
                yield Command(page, block, python=True)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = line.partition(" #")[0].strip()
            found = WRITES.search(line) if line.startswith(MEASURES) else None
            if found:
                yield Command(page, line, found["name"])
            elif line.startswith(PREPARES):
                yield Command(page, line)


def commands() -> list[Command]:
    return [command for page in pages() for command in page_commands(page)]


def named() -> dict[str, Command]:
    return {command.name: command for command in commands() if command.name is not None}


def marks() -> dict[str, set[str]]:
    """The names of the records that pages state numbers of, with the keys; those of the scoreboard have a prefix."""
    found: dict[str, set[str]] = {}
    for path in sorted(FOLDER.rglob("*.md")):
        for mark in MARK.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(mark["name"], set()).add(mark["key"])
    return found


def read_record(name: str) -> dict[str, Any] | None:
    room, _, row = name.rpartition("/")
    path = (SCOREBOARD if room else RECORDS) / f"{row}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return _row_record(content) if room else content


def _row_record(content: dict[str, Any]) -> dict[str, Any]:
    """A record of the scoreboard in the form of those of the pages: means over the seeds, intervals of a single one."""
    results = [result for parts in content["seeds"].values() for result in parts.values()]
    scores = {name: {"value": score["mean"]} for name, score in content["scores"].items()}
    if len(results) == 1:
        scores = results[0]["scores"]
    first = results[0]
    return {
        "scores": scores,
        "seeds": len(content["seeds"]),
        "parameters": first["parameters"],
        "updates": max(first["updates"]),
    }


def number(record: dict[str, Any], key: str) -> float:
    """`parameters`, `seconds`, `leaked_pairs`, `exact`, or a limit of an interval: `exact.low`."""
    metric, _, limit = key.partition(".")
    if metric == "leaked_pairs":
        return record["leakage"]["pairs"]
    return record[metric] if metric in record else record["scores"][metric][limit or "value"]


def with_numbers(text: str) -> str:
    """A page with the numbers of the records, and a dash where there is no record."""

    def shown(mark: re.Match[str]) -> str:
        record, key = read_record(mark["name"]), mark["key"]
        text = "–" if record is None else f"{number(record, key):,.{DECIMALS.get(key, 1)}f}"
        return f"{text}<!-- {mark['name']}.{key} -->"

    return MARK.sub(shown, text)


class Workplace:
    """A temporary folder in which the commands of the pages run, each of them once."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self.folder, self.data = folder, data
        self.done: set[Command] = set()
        self.made: dict[Command, dict[str, Any]] = {}
        self.known = named()

    def place(self, page: str) -> Path:
        """The pages of the ladder share their data and runs; a page of a task has a folder of its own."""
        place = self.folder / (page.split("/")[0] if page.startswith("ladder/") else page.removesuffix(".md"))
        if not place.exists():
            place.mkdir(parents=True)
            for name in SHARED:
                (place / name).symlink_to(FOLDER.parent / name)
            for given in self.data.iterdir() if self.data else ():
                (place / given.name).symlink_to(given.absolute())
        return place

    def lacks(self, command: Command) -> set[str]:
        """The data sets that a command, or one that it needs, reads and that are not here."""
        needed = [command, *(self.known[name] for name in command.needs if name in self.known)]
        given = set().union(*(one.given for one in needed))
        return {name for name in given if self.data is None or not (self.data / name).exists()}

    def run(self, command: Command) -> dict[str, Any]:
        """Runs what the command needs, then the command; returns its record."""
        if command not in self.made:
            for name in command.needs:
                if name in self.known:
                    self.run(self.known[name])
            self._prepare(command.page)
            seconds = self._process(command)
            self.made[command] = make_record(command, self.place(command.page), seconds)
        return self.made[command]

    def _prepare(self, page: str) -> None:
        map_ = f"{page.split('/')[0]}/README.md"
        for path in dict.fromkeys((map_, page)):
            for command in page_commands(FOLDER / path):
                if command.name is None and command not in self.done:
                    self._process(Command(page, command.line, python=command.python))
                    self.done.add(command)

    def _process(self, command: Command) -> float:
        """Runs one command in a process of its own; returns its processor time in seconds."""
        place, words = self.place(command.page), shlex.split(command.line) if not command.python else []
        if command.python:
            words = [sys.executable, "-c", command.line]
        elif words[0] == "python":
            words[0] = sys.executable
        elif words[0] == "transduce":
            words = [sys.executable, "-m", "transduce", *words[1:]]
        else:
            words = ["sh", "-c", command.line]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "NO_COLOR": "1"}
        before = os.times()
        done = subprocess.run(words, cwd=place, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{command.page}: {command.line}\n{done.stdout}{done.stderr}")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system


def make_record(command: Command, place: Path, seconds: float) -> dict[str, Any]:
    """The record of a command that has run."""
    import transduce
    from transduce.data.filters import recipe_leakage
    from transduce.run import Run

    record: dict[str, Any] = {"page": command.page, "command": command.line, "version": transduce.__version__}
    file = place / f"{command.name}.json"
    if f"--json {command.name}.json" in command.line:
        content = json.loads(file.read_text(encoding="utf-8"))
        count = content.pop("count")
        numbers = {name: {"value": value} for name, value in content.items() if isinstance(value, int | float)}
        scores = content.get("scores") or numbers
        return {**record, "lines": count, "scores": scores, "seconds": seconds}
    run = Run(place / "runs" / str(command.name))
    metrics = run.metrics()
    evaluated = metrics.get("test") or metrics["dev"]
    leakage = recipe_leakage(run.recipe().data)
    return {
        **record,
        "lines": evaluated["count"],
        "scores": {name: {**score} for name, score in evaluated["scores"].items()},
        "parameters": metrics["parameters"],
        "updates": metrics["training"]["step"],
        "seconds": seconds,
        "leakage": None if leakage is None else leakage.to_json(),
    }


def drift(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What differs between two records: the command, parameters, and scores outside of the recorded interval."""
    for key in ("command", "parameters", "lines"):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} -> {new.get(key)}"
    for name, score in old["scores"].items():
        value = new["scores"].get(name, {}).get("value")
        low, high = score.get("low", score["value"]), score.get("high", score["value"])
        if value is None or not low - 0.05 <= value <= high + 0.05:
            yield f"{name}: {score['value']:.2f} ({low:.2f} to {high:.2f}) -> {value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="records; default: all")
    parser.add_argument("--missing", action="store_true", help="only commands without a record")
    parser.add_argument("--write", action="store_true", help="write the new records")
    parser.add_argument("--keep", type=Path, help="folder to run in, kept afterwards")
    parser.add_argument("--data", type=Path, help="folder of data sets that cannot be published, such as flickr8k")
    given = parser.parse_args()
    known, stated = named(), marks()
    names = given.names or [name for name in known if name in stated]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no page has a command for {', '.join(unknown)}")
    names = [name for name in names if not given.missing or read_record(name) is None]
    RECORDS.mkdir(exist_ok=True)
    changed = 0
    with tempfile.TemporaryDirectory() as temporary:
        workplace = Workplace((given.keep or Path(temporary)).absolute(), given.data)
        for name in names:
            if lacking := workplace.lacks(known[name]):
                print(f"{name}: not run, it needs --data with {', '.join(sorted(lacking))}")
                continue
            old, new = read_record(name), workplace.run(known[name])
            lines = [] if old is None else list(drift(old, new))
            changed += bool(lines)
            scores = ", ".join(f"{key} {score['value']:.2f}" for key, score in new["scores"].items())
            print(
                f"{name}: {scores}, {new['seconds']:.0f} s",
                *(f"  DRIFT {line}" for line in lines),
                sep="\n",
                flush=True,
            )
            if old is None or given.write:
                text = json.dumps(new, indent=1, ensure_ascii=False) + "\n"
                (RECORDS / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{len(names)} commands, {changed} with drift")
    return int(changed > 0 and not given.write)


if __name__ == "__main__":
    sys.exit(main())
