"""SIGINT and SIGTERM enter; a flag leaves, to be read when the update at hand is finished."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interruption:
    """While it is open the first signal is noted; a second one acts at once, as it would have without us."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *error: object) -> None:
        self._restore()
