"""Batch feeding: prefetching."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from transduce.errors import InputError
from transduce.training.feed import Prefetch


def test_prefetch_keeps_order_and_raises_errors() -> None:
    def items() -> Iterator[int]:
        yield from range(50)
        raise InputError("the file ends here")

    fetched = Prefetch(items())
    assert [next(fetched) for _ in range(50)] == list(range(50))
    with pytest.raises(InputError, match="ends here"):
        next(fetched)
    assert list(Prefetch(iter(range(3)))) == [0, 1, 2]


def test_prefetch_thread_stops_on_close() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    before = threading.active_count()
    with Prefetch(items(), ahead=2) as fetched:
        assert next(fetched) == 0
    assert threading.active_count() == before
    assert len(made) <= 5
