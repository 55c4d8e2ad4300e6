"""Algorithmic tasks with known targets and alignments: copy, reverse, sort."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from string import ascii_lowercase

from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

LETTERS = tuple(ascii_lowercase)
LENGTH = (3, 12)

# A task is a permutation: for each target word, the position of its source word. Target and alignment follow from this
# one definition, so they cannot disagree. `sort` is stable: equal words keep their order.
TASKS: dict[str, Callable[[Sequence[str]], list[int]]] = {
    "copy": lambda words: list(range(len(words))),
    "reverse": lambda words: list(reversed(range(len(words)))),
    "sort": lambda words: sorted(range(len(words)), key=words.__getitem__),
}


def generate(
    task: str,
    count: int,
    seed: int = 1,
    *,
    length: tuple[int, int] = LENGTH,
    symbols: Sequence[str] = LETTERS,
) -> Iterator[Example]:
    """`count` examples; words uniform from `symbols`, their number uniform from `length` (low, high)."""
    permutation = _permutation(task)
    _check(length, symbols)
    return islice(_sample(permutation, random.Random(seed), length, symbols), count)


def generator(task: str, length: tuple[int, int] = LENGTH) -> Callable[[random.Random, bool], Iterator[Example]]:
    """The generator of a task for the registry of synthetic data sets: whole sources are held out."""
    _check(length, LETTERS)

    def generate_split(rng: random.Random, held_out: bool) -> Iterator[Example]:
        examples = _sample(_permutation(task), rng, length, LETTERS)
        return (example for example in examples if is_held_out(example.source) == held_out)

    return generate_split


def _sample(
    permutation: Callable[[Sequence[str]], list[int]],
    rng: random.Random,
    length: tuple[int, int],
    symbols: Sequence[str],
) -> Iterator[Example]:
    while True:
        words = rng.choices(symbols, k=rng.randint(*length))
        yield Example(" ".join(words), " ".join(words[position] for position in permutation(words)))


def gold_alignment(task: str, example: Example) -> set[tuple[int, int]]:
    """The alignment links (source word, target word), counted from 0."""
    return {(source, target) for target, source in enumerate(_permutation(task)(example.source.split()))}


def split(
    task: str,
    train: int,
    dev: int,
    test: int,
    seed: int = 1,
    *,
    length: tuple[int, int] = LENGTH,
    symbols: Sequence[str] = LETTERS,
) -> tuple[list[Example], list[Example], list[Example]]:
    """Train, development and test examples; no source occurs twice, within a list or across lists."""
    permutation, total = _permutation(task), train + dev + test
    _check(length, symbols)
    require_distinct(total, length, symbols)
    distinct: dict[str, Example] = {}
    for example in _sample(permutation, random.Random(seed), length, symbols):
        if len(distinct) == total:
            break
        distinct.setdefault(example.source, example)
    examples = list(distinct.values())
    # Short sequences are sampled early and soon all taken: without shuffling, the test set would lack them.
    random.Random(seed).shuffle(examples)
    return examples[:train], examples[train : train + dev], examples[train + dev :]


def require_distinct(
    total: int, length: tuple[int, int], symbols: Sequence[str] = LETTERS, *, share: float = 1.0
) -> None:
    """Refuses more sources than half of all sequences, or of a `share` of them.

    With at most half of them taken, about every second sample is new (short sequences run out earlier).
    """
    possible = sum(len(symbols) ** size for size in range(length[0], length[1] + 1))
    if 2 * total > share * possible:
        raise InputError(
            f"{total} distinct sources requested, but there are only {int(share * possible)}",
            remedy="allow longer sequences or more symbols, so that at most half of all sequences are used",
        )


def invent_words(count: int, seed: int = 1) -> tuple[str, ...]:
    """Distinct pronounceable words of two or three syllables, to use as `symbols`."""
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    rng, words = random.Random(seed), dict[str, None]()
    if count > len(syllables) ** 2:
        raise InputError(f"cannot invent {count} words", remedy=f"request at most {len(syllables) ** 2}")
    while len(words) < count:
        words.setdefault("".join(rng.choices(syllables, k=rng.randint(2, 3))))
    return tuple(words)


def _permutation(task: str) -> Callable[[Sequence[str]], list[int]]:
    if task not in TASKS:
        raise InputError(f"unknown task {task!r}", remedy=nearest(task, TASKS))
    return TASKS[task]


def _check(length: tuple[int, int], symbols: Sequence[str]) -> None:
    if not 1 <= length[0] <= length[1]:
        raise InputError(f"length {length} is not a range", remedy="give (low, high) with 1 <= low <= high")
    broken = next((symbol for symbol in symbols if symbol.split() != [symbol]), None)
    if not symbols or broken is not None:
        raise InputError(f"{broken!r} cannot be a symbol", remedy="symbols are words without spaces, at least one")
