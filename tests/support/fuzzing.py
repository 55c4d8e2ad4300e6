"""Seeded fuzzing: damaged inputs, the property that each must have, and a record of the outcomes.

A fuzzer is one call of `fuzz` in `tests/fuzz`: an `attempt` draws an input from a seeded generator, gives it to the
program and compares. What may come of it:

- `refused`: an InputError, in words;
- the name that the attempt returns: `equal` (the same output as without damage), `warned` (another output, announced by
  a warning), `accepted` (a valid input, whose output holds the property of the fuzzer).

What may not: `difference` (an AssertionError of the attempt: another output without a word), `crash` (any other
exception), `hang` (more than `seconds`; memory beyond `memory` is a crash). The same seed draws the same input.

    def attempt(draw: random.Random) -> Outcome:
        path.write_bytes(mutate_bytes(draw, CONTENT))
        assert read(path) == EXPECTED
        return "equal"

    def test_damaged_files() -> None:
        fuzz("files", "truncated and flipped files", attempt, cases=100)

FUZZ_FACTOR multiplies the number of cases, FUZZ_SEED is the first seed (0), FUZZ_RECORD is a folder for one JSON record
per fuzzer.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import os
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transduce.errors import InputError

Outcome = Literal["equal", "warned", "accepted"]
Attempt = Callable[[random.Random], Outcome]
FAILURES = ("difference", "crash", "hang")
GIGABYTE = 2**30


class HangError(BaseException):
    """A case took too long. Not an Exception, so that no `except Exception` of the program hides it."""


@dataclass(frozen=True)
class Failure:
    seed: int
    outcome: str
    detail: str


def fuzz(
    name: str, subject: str, attempt: Attempt, *, cases: int, seconds: float = 120.0, memory: int = 2 * GIGABYTE
) -> Counter[str]:
    """Runs the attempt with `cases` seeds, and fails with the seeds that broke the property.

    `cases` is for continuous integration; FUZZ_FACTOR multiplies it. `seconds` and `memory` (bytes beyond what the
    process has) limit one case.
    """
    first, count = int(os.environ.get("FUZZ_SEED", "0")), number_of(cases)
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    began = time.monotonic()
    for seed in range(first, first + count):
        outcome, detail = run_case(attempt, f"{name} {seed}", seconds, memory)
        outcomes[outcome] += 1
        if outcome in FAILURES:
            failures.append(Failure(seed, outcome, detail))
    write_record(
        {
            "name": name,
            "subject": subject,
            "cases": count,
            "first_seed": first,
            "outcomes": dict(sorted(outcomes.items())),
            "seconds": round(time.monotonic() - began, 1),
            "failures": [{"seed": one.seed, "outcome": one.outcome, "detail": one.detail[-2000:]} for one in failures],
        }
    )
    shown = "\n".join(f"seed {one.seed}: {one.outcome}\n{one.detail}" for one in failures[:5])
    assert not failures, f"{len(failures)} of {count} cases of {name!r}: {dict(outcomes)}\n{shown}"
    return outcomes


def number_of(cases: int) -> int:
    """The number of cases of a fuzzer, which has `cases` in continuous integration."""
    return math.ceil(cases * float(os.environ.get("FUZZ_FACTOR", "1")))


def write_record(content: dict[str, Any]) -> None:
    """Stores the counts of one fuzzer, where they are asked for."""
    if folder := os.environ.get("FUZZ_RECORD"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{content['name'].replace(' ', '-').replace(',', '')}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_case(attempt: Attempt, seed: str, seconds: float, memory: int) -> tuple[str, str]:
    """The outcome of one case, with the traceback of a failure."""
    try:
        with _time_limit(seconds), _memory_limit(memory):
            return attempt(random.Random(seed)), ""
    except InputError as error:
        return ("refused", "") if str(error).strip() else ("crash", "an InputError without a word")
    except AssertionError:
        return "difference", traceback.format_exc()
    except HangError:
        return "hang", traceback.format_exc()
    except Exception:
        return "crash", traceback.format_exc()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises HangError in the main thread. Code that never returns to Python ends the process a little later."""

    def interrupt(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds + 10, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """The address space may grow by `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


DAMAGES = ("cut", "cut", "flip", "flip", "letter", "letter", "zero", "repeat", "remove", "insert", "empty")


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """The content with one kind of damage: cut, flipped, zeroed, replaced, repeated, removed, inserted or emptied."""
    kind = draw.choice(DAMAGES)
    if kind == "empty" or not content:
        return b""
    where = draw.randrange(len(content))
    length = draw.choice((1, 1, 2, 8, 64, 512))
    if kind == "cut":
        return content[:where]
    if kind == "flip":
        return content[:where] + bytes([content[where] ^ (1 << draw.randrange(8))]) + content[where + 1 :]
    if kind == "letter":
        return content[:where] + draw.choice(LETTERS).encode() + content[where + 1 :]
    block = content[where : where + length]
    rest = content[where + length :]
    if kind == "zero":
        return content[:where] + bytes(len(block)) + rest
    if kind == "repeat":
        return content[:where] + block * draw.choice((2, 3, 50)) + rest
    if kind == "remove":
        return content[:where] + rest
    return content[:where] + draw.randbytes(length) + content[where:]


LETTERS = "aeiouxz0123456789 -_.,:;{}[]()\"'\n\t&*!|>%#@`\\/éß語🙂"

# Values that a file may hold where another is expected.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 10**9, -(10**9), 2**31, 2**63, 10**40, 1e308, math.inf,
    -math.inf, math.nan, "", " ", "x", "0", "1", "null", "nan", "../../etc/passwd", "/dev/zero", "a:B", "\0", "é語🙂",
    "x" * 10_000, [], {}, [1], ["x"], [None], [[]], {"": 1}, {"kind": "x"}, {"x": {"x": {}}}, [0] * 1000,
)  # fmt: skip


def mutate_tree(draw: random.Random, value: Any) -> Any:
    """A copy of nested dicts and lists with one to three changes: odd values, missing, misspelt, swapped entries."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _mutate_place(draw, value)
    return value


def _mutate_place(draw: random.Random, value: Any) -> Any:
    """One change somewhere in a tree; deeper places are as likely as shallow ones."""
    places = list(_places(value))
    if not places:
        return _odd(draw)
    container, key = draw.choice(places)
    kind = draw.choice(("odd", "odd", "odd", "remove", "misspell", "swap", "number"))
    if kind == "remove":
        del container[key]
    elif kind == "misspell" and isinstance(container, dict):
        container[_misspelt(draw, key)] = container.pop(key)
    elif kind == "swap":
        other, place = draw.choice(places)
        container[key], other[place] = json.loads(json.dumps([other[place], container[key]]))
    elif kind == "number" and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] = draw.choice((-1, 0, 2, 10, 1000, 0.5)) * container[key] + draw.choice((0, 0, 1, -1))
    else:
        container[key] = _odd(draw)
    return value


def _odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD_VALUES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner)


def _misspelt(draw: random.Random, word: str) -> str:
    where = draw.randrange(len(word) + 1)
    return word[:where] + draw.choice(LETTERS) + word[where + draw.randrange(2) :]
