"""An iterator enters; the same items leave in the same order, made by a thread while the device is busy."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """A few items ahead. What the items are made from must not read the global random generators: the training
    thread seeds those, and the two would race."""

    def __init__(self, items: Iterator[Item], ahead: int = 2) -> None:
        self._items = items
        self._ready: Queue[Item | BaseException] = Queue(ahead)
        self._closed = Event()
        self._thread = Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while True:  # room for a thread that is waiting to put
            try:
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
