"""Batch feeding: prefetching."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.kernels.cuda_graph import NO_CAPTURE
from transduce.training.update import DeviceCopy, Prefetch


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


def test_batches_are_copied_after_the_capture_of_a_graph() -> None:
    batch = Batch(Padded.from_rows([[4, 5]]))
    copies = (DeviceCopy(torch.device("cpu"))(batch) for _ in range(1))
    with NO_CAPTURE:
        fetched = Prefetch(copies)
        fetched._thread.join(0.05)
        assert fetched._ready.empty()
    copied = next(fetched).source
    assert copied is not None
    assert copied.values.tolist() == [[4, 5]]
    fetched.close()
