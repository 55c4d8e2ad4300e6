"""Tasks of an engine, and their queue: priorities, within which clients take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transduce.flow import Hypothesis
from transduce.modalities.source_encoding import EncodedSource
from transduce.recipe import GenerationRecipe
from transduce.serving.service import DeadlineExceeded

if TYPE_CHECKING:
    from transduce.serving.telemetry import RequestTrace

SearchKey = tuple[str, int, int]  # settings, columns of sources, columns of prefixes: rows of equal ones share a search


class Cancelled(Exception):  # noqa: N818
    """The client left."""


@dataclass(frozen=True)
class SearchRow:
    """One source of an open search, with its options."""

    source: EncodedSource | None  # None: of a language model
    prefix: tuple[int, ...]
    max_length: int
    seed: int


@dataclass
class TaskTimes:
    """When a task came and went, in nanoseconds since 1970. 0: not yet."""

    submitted: int = 0
    entered: int = 0  # its first source left the queue
    prefilled: int = 0  # that source was encoded
    ended: int = 0


@dataclass(eq=False)
class Task:
    """Sources that are searched for one request. `prepare` and `finish` run in the thread of the engine.

    `done` receives what `finish` returns, or an exception; it must not block. It is called in the thread of `loop`:
    an event loop is woken once for all tasks that end in a step.
    """

    prepare: Callable[[], tuple[list[SearchRow], GenerationRecipe]]
    finish: Callable[[list[list[Hypothesis]]], Any]
    done: Callable[[Any, BaseException | None], None]
    loop: asyncio.AbstractEventLoop | None = None  # None: in the thread of the engine
    count: int = 1  # sources, as the limit of the queue counts them
    client: str = ""
    priority: int = 0
    deadline: float | None = None  # time.monotonic()
    on_tokens: Callable[[int, list[tuple[int, float]], bool], None] | None = None  # certain tokens of a row; its end
    texts: Sequence[str] = ()  # the sources that `prepare` encodes, which are encoded together with those of others
    cancelled: bool = False
    closed: bool = False
    results: dict[int, list[Hypothesis]] = field(default_factory=dict)
    rows: list[SearchRow] = field(default_factory=list)
    times: TaskTimes = field(default_factory=TaskTimes)
    trace: RequestTrace | None = None  # receives the times

    def problem(self, now: float) -> BaseException | None:
        """Why the task goes no further."""
        if self.cancelled:
            return Cancelled()
        return DeadlineExceeded() if self.deadline is not None and now > self.deadline else None


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """One row of a task in the queue."""

    task: Task
    number: int
    key: SearchKey
    settings: GenerationRecipe


Outcome = tuple[Callable[[Any, BaseException | None], None], Any, BaseException | None]  # `done`, and its arguments


def report(outcomes: Sequence[Outcome]) -> None:
    """Tells those who wait for tasks how they ended."""
    for done, value, error in outcomes:
        done(value, error)


class FairQueue:
    """Rows by priority; within a priority clients take turns, and each has its rows in order."""

    def __init__(self) -> None:
        self._clients: dict[int, OrderedDict[str, deque[QueuedRow]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, place: QueuedRow) -> None:
        clients = self._clients.setdefault(place.task.priority, OrderedDict())
        clients.setdefault(place.task.client, deque()).append(place)
        self._size += 1

    def take(self, accept: Callable[[QueuedRow], bool]) -> Iterator[QueuedRow]:
        """The accepted rows in order. Rows of closed tasks are dropped."""
        for priority in sorted(self._clients, reverse=True):
            clients = self._clients[priority]
            refused = set[str]()
            while len(refused) < len(clients):
                client = next(name for name in clients if name not in refused)
                place = self._next(clients[client])
                if place is None:
                    del clients[client]
                elif accept(place):
                    clients[client].popleft()
                    self._size -= 1
                    clients.move_to_end(client)
                    yield place
                else:
                    refused.add(client)
            if not clients:
                del self._clients[priority]

    def _next(self, places: deque[QueuedRow]) -> QueuedRow | None:
        while places and places[0].task.closed:
            places.popleft()
            self._size -= 1
        return places[0] if places else None
