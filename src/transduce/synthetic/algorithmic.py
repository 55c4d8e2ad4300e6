"""Nothing enters; examples leave whose right answer and right alignment are both known: copy, reverse, sort."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from string import ascii_lowercase

from transduce.errors import InputError, nearest
from transduce.flow import Example

LETTERS = tuple(ascii_lowercase)
LENGTH = (3, 12)

# A task is an order: for each target word, the position of the source word it comes from. So the target and its
# alignment have one definition and cannot disagree. `sort` is stable: equal words keep their order.
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
    """`count` examples of a task; words drawn evenly from `symbols`, their number evenly from `length` (low, high)."""
    order = _order(task)
    _check(length, symbols)
    return islice(_draw(order, seed, length, symbols), count)


def _draw(
    order: Callable[[Sequence[str]], list[int]], seed: int, length: tuple[int, int], symbols: Sequence[str]
) -> Iterator[Example]:
    chance = random.Random(seed)
    while True:
        words = chance.choices(symbols, k=chance.randint(*length))
        yield Example(" ".join(words), " ".join(words[position] for position in order(words)))


def gold_alignment(task: str, example: Example) -> set[tuple[int, int]]:
    """The right links (source word, target word), counted from 0."""
    return {(source, target) for target, source in enumerate(_order(task)(example.source.split()))}


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
    """Three lists of examples; no source occurs twice, within a list or across them."""
    order, total = _order(task), train + dev + test
    _check(length, symbols)
    # With half of all sequences or fewer taken, a draw is new at least every second time (roughly: short ones run out).
    possible = sum(len(symbols) ** size for size in range(length[0], length[1] + 1))
    if 2 * total > possible:
        raise InputError(
            f"{total} different sources asked for, but there are only {possible}",
            remedy="allow longer sequences or more symbols, so that at most half of them are taken",
        )
    distinct: dict[str, Example] = {}
    for example in _draw(order, seed, length, symbols):
        if len(distinct) == total:
            break
        distinct.setdefault(example.source, example)
    examples = list(distinct.values())
    # Short sequences are found early and soon all taken: without shuffling, the test set would lack them.
    random.Random(seed).shuffle(examples)
    return examples[:train], examples[train : train + dev], examples[train + dev :]


def invent_words(count: int, seed: int = 1) -> tuple[str, ...]:
    """Different pronounceable words of two or three syllables, to use as `symbols`."""
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    chance, words = random.Random(seed), dict[str, None]()
    if count > len(syllables) ** 2:
        raise InputError(f"cannot invent {count} words", remedy=f"ask for at most {len(syllables) ** 2}")
    while len(words) < count:
        words.setdefault("".join(chance.choices(syllables, k=chance.randint(2, 3))))
    return tuple(words)


def _order(task: str) -> Callable[[Sequence[str]], list[int]]:
    if task not in TASKS:
        raise InputError(f"unknown task {task!r}", remedy=nearest(task, TASKS))
    return TASKS[task]


def _check(length: tuple[int, int], symbols: Sequence[str]) -> None:
    if not 1 <= length[0] <= length[1]:
        raise InputError(f"length {length} is not a range", remedy="give (low, high) with 1 <= low <= high")
    broken = next((symbol for symbol in symbols if symbol.split() != [symbol]), None)
    if not symbols or broken is not None:
        raise InputError(f"{broken!r} cannot be a symbol", remedy="symbols are words without spaces, at least one")
