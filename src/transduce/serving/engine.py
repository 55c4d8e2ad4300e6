"""Engine of a served model: one queue, one thread, continuous batching across requests.

The thread owns the model. Between two steps it takes new tasks, drops those whose client left or whose deadline passed,
fills free slots from the queue, and advances every open search. Sources with the same search settings and similar
lengths share a search (`OpenSearch`, on a CPU `NativeSearch` where it can); each finds what it finds in a batch of its
own. A native search takes several steps in one call, until a source ends or somebody waits. While a GPU computes
captured steps, the thread makes the outputs of sources that have ended, and encodes new ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from transduce.attention.positions import max_positions
from transduce.decoding.continuous_batching import (
    GROUPS_PER_SEARCH,
    LAUNCHED_STEPS,
    OpenSearch,
    SearchRequest,
    SearchShape,
)
from transduce.flow import BOS, Batch, Hypothesis, Padded
from transduce.inference.generation import Searcher, num_hypotheses, sample_seeds
from transduce.inference.model import Model
from transduce.inference.native_search import NativeSearch
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.modalities.source_encoding import EncodedSource
from transduce.recipe import GenerationRecipe
from transduce.serving.metrics import Metrics
from transduce.serving.service import DeadlineExceeded, Draining, Overloaded
from transduce.serving.task_queue import Cancelled, FairQueue, Outcome, QueuedRow, SearchKey, SearchRow, Task, report

FIRST_COLUMNS = 32  # of sources; longer ones share a search with those of up to twice, four times, ... the length
FIRST_PREFIX = 8
IDLE_SEARCHES = 8  # searches without sources that are kept
MIN_FINISHED_SHARE = 1 / 4  # of the sources that have ended: outputs made during a step even if it is over sooner
IN_FLIGHT = 2  # launches of a search: a device computes one while the host takes the results of the one before
ENCODED_TOGETHER = 8  # texts from which on the tokenizer is faster with its threads
REPORTED_TOGETHER = 64  # outputs of which the event loop is told at once: each time it takes the interpreter
DEADLINE_SECONDS = 0.005  # between two looks at the deadlines of all tasks
HELD_STEPS = 4  # steps that a source waits at most for others to enter with it
KNOWN_LENGTHS = 4096  # lengths of sources whose maximal output lengths are remembered
KNOWN_KEYS = 256  # settings whose keys are remembered
RATE_WEIGHT = 0.1  # of the newest second in the average throughput, from which Retry-After is estimated


Search = OpenSearch | NativeSearch


def power_of_two(size: int, first: int) -> int:
    """The smallest power of two times `first` that is not smaller."""
    while first < size:
        first *= 2
    return first


class Engine:
    """One model with its queue and its thread."""

    def __init__(
        self, name: str, model: Model, metrics: Metrics, *, max_batch: int = 64, max_queued: int = 512
    ) -> None:
        self.name, self.model, self.max_batch, self.max_queued = name, model, max_batch, max_queued
        self.searcher = model.searcher  # of the weights as they are now
        self._most_columns = max_positions(self.searcher.network) or 2**31
        self.queued = metrics.queued.labels(name)
        self.active = metrics.active.labels(name)
        self.batch_size = metrics.batch_size.labels(name)
        self.cancelled = metrics.cancelled.labels(name)
        self._interrupt = np.zeros(1, np.int64)  # not 0: something is in the inbox, for which a native search ends
        self._inbox: deque[Task | Callable[[], None]] = deque()
        self._new: deque[Task | Callable[[], None]] = deque()  # taken from there, and not yet begun
        self._wake = threading.Condition()
        self._queue, self._tasks = FairQueue(), dict[Task, None]()
        self._searches: OrderedDict[SearchKey, Search] = OrderedDict()
        self._places: dict[int, QueuedRow] = {}  # rows in searches by number
        self._left: list[tuple[Search, dict[int, QueuedRow]]] = []  # rows that have left their searches
        self._found: deque[tuple[QueuedRow, list[Hypothesis]]] = deque()  # those whose hypotheses are here
        self._launched: list[OpenSearch] = []  # searches whose latest steps were computed while this thread worked
        self._outcomes: dict[asyncio.AbstractEventLoop | None, list[Outcome]] = {}  # of ended tasks, not yet reported
        self._keys: dict[int, tuple[GenerationRecipe, tuple[str, GenerationRecipe]]] = {}  # by id of the settings
        self._max_lengths: dict[tuple[int, float, int], int] = {}  # by length of the source, ratio and limit
        self._numbers, self._load, self._rate, self._measured = 0, 0, 0.0, (time.monotonic(), 0)
        self._shown = (0, 0)
        self._next_look = 0.0  # when tasks are looked at again: some may be cancelled, or past their deadlines
        self._streams = 0  # tasks whose tokens are reported
        self._finished, self._held, self._stopping, self._ended = 0, 0, False, False
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    # Called from other threads

    @property
    def load(self) -> int:
        """Sources that wait or are searched."""
        return self._load

    def rows(
        self,
        sources: Sequence[EncodedSource],
        prefixes: Sequence[Sequence[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
    ) -> list[SearchRow]:
        """The rows of encoded sources."""
        lengths = [self._max_length(source, settings) for source in sources]
        forced = prefixes if prefixes is not None else [settings.forced_prefix] * len(sources)
        seeds = sample_seeds(settings, numbers)
        return [SearchRow(*row) for row in zip(sources, map(tuple, forced), lengths, seeds, strict=True)]

    def _max_length(self, source: EncodedSource, settings: GenerationRecipe) -> int:
        """Most tokens of an output, remembered: the tensors of one number take longer than a step of a small model."""
        key = len(source), settings.max_ratio, settings.max_length
        if key not in self._max_lengths:
            if len(self._max_lengths) >= KNOWN_LENGTHS:
                self._max_lengths.clear()
            self._max_lengths[key] = int(self.searcher.max_lengths([source], settings))
        return self._max_lengths[key]

    def submit(self, task: Task) -> None:
        """Puts a task into the queue, or refuses it: Overloaded."""
        with self._wake:
            if self._stopping:
                raise Draining("the server is stopping")
            if self._load + task.count > self.max_queued and self._load:
                raise Overloaded(retry_after=self._retry_after())
            self._load += task.count
            task.times.submitted = time.time_ns()
            self._inbox.append(task)
            self._notify()

    def cancel(self, task: Task) -> None:
        """Stops the work for a task before the next step."""
        with self._wake:
            task.cancelled = True
            self._next_look = 0.0
            self._notify()

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function that runs in the thread of the engine, between two steps. Waits for it."""
        if threading.current_thread() is self._thread:
            return function()
        outcome, done = list[Any](), threading.Event()

        def run() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as error:
                outcome.append((None, error))
            done.set()

        with self._wake:
            if self._ended:
                raise Draining("the server is stopping")
            self._inbox.append(run)
            self._notify()
        done.wait()
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """Ends the thread when all tasks are done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _notify(self) -> None:
        """Wakes the thread, or ends its native search after the present step."""
        self._interrupt[0] = 1
        self._wake.notify()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _retry_after(self) -> int:
        return max(1, min(60, int(self._load / self._rate) + 1)) if self._rate else 1

    # The thread of the engine

    def _run(self) -> None:
        while self._wait():
            overlapped = self._launched and self._places  # sources enter while a device computes the steps of others
            if not overlapped:
                self._take_inbox()
                while self._new:
                    self._begin_next()
            self._close_ended()
            if not overlapped:
                self._fill()
            self._report()
            self._step()

    def _wait(self) -> bool:
        """Waits for work where there is none; False: the engine has stopped."""
        with self._wake:
            while not self._inbox and not self._new and not self._tasks:
                if self._stopping:
                    self._ended = True
                    return False
                self._wake.wait()
        return True

    def _take_inbox(self) -> None:
        """Takes what is new, and encodes its texts where they are many."""
        with self._wake:
            self._new += self._inbox
            self._inbox.clear()
            self._interrupt[0] = 0
        texts = [text for one in self._new if isinstance(one, Task) for text in one.texts]
        if len(texts) >= ENCODED_TOGETHER:
            with suppress(Exception):  # which the task of that text meets again
                self.model.source_encoding.encode_ahead(texts)

    def _begin_next(self) -> None:
        """Begins the task that came first."""
        one = self._new.popleft()
        self._begin(one) if isinstance(one, Task) else one()

    def _begin(self, task: Task) -> None:
        self._tasks[task] = None
        self._streams += task.on_tokens is not None
        try:
            if (problem := task.problem(time.monotonic())) is not None:
                raise problem
            task.rows, settings = task.prepare()
            key, settings = self._search_key(settings)
            for number, row in enumerate(task.rows):
                columns = 0 if row.source is None else self._columns(len(row.source) + 1, FIRST_COLUMNS)  # and </s>
                prefix = self._columns(len(row.prefix), FIRST_PREFIX) if row.prefix else 0
                self._queue.push(QueuedRow(task, number, (key, columns, prefix), settings))
            if not task.rows:
                self._close(task, task.finish([]))
        except BaseException as error:
            self._close(task, error=error)

    def _search_key(self, settings: GenerationRecipe) -> tuple[str, GenerationRecipe]:
        """The key of settings, which requests share: making it takes longer than a step of a small model."""
        known = self._keys.get(id(settings))
        if known is None or known[0] is not settings:
            if len(self._keys) >= KNOWN_KEYS:
                self._keys.clear()
            known = self._keys[id(settings)] = (settings, search_key(settings))
        return known[1]

    def _columns(self, length: int, first: int) -> int:
        return max(min(power_of_two(length, first), self._most_columns), length)

    def _close(self, task: Task, value: Any = None, error: BaseException | None = None) -> None:
        """Ends a task, with all its rows."""
        if task.closed:
            return
        task.closed = True
        del self._tasks[task]
        self._streams -= task.on_tokens is not None
        if error is not None:
            numbers = [number for number, place in self._places.items() if place.task is task]
            for search in self._searches.values():
                search.cancel(numbers)
            for number in numbers:
                del self._places[number]
            if isinstance(error, Cancelled | DeadlineExceeded):
                self.cancelled.inc(task.count)
        with self._wake:
            self._load -= task.count
        self._finished += task.count
        task.times.ended = time.time_ns()
        if task.trace is not None:
            task.trace.task(self.name, task, error)
        self._outcomes.setdefault(task.loop, []).append((task.done, value, error))

    def _report(self) -> None:
        """Tells those who wait which tasks have ended."""
        outcomes, self._outcomes = self._outcomes, {}
        for loop, some in outcomes.items():
            if loop is None:
                report(some)
            else:
                with suppress(RuntimeError):  # the loop was closed: nobody waits
                    loop.call_soon_threadsafe(report, some)

    def _close_ended(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + DEADLINE_SECONDS
        for task in [one for one in self._tasks if one.cancelled or (one.deadline or now) < now]:
            self._close(task, error=task.problem(now))
        since, finished = self._measured
        if now - since > 1:
            rate = (self._finished - finished) / (now - since)
            self._rate = rate if not self._rate else (1 - RATE_WEIGHT) * self._rate + RATE_WEIGHT * rate
            self._measured = now, self._finished

    @property
    def _entering(self) -> int:
        """Rows of the queue for which there are slots."""
        return min(len(self._queue), self.max_batch - len(self._places))

    def _ripe(self) -> bool:
        """Whether sources enter now. Each group costs an encoder pass and a step of its own, so small ones are held."""
        group = self._entering
        return group > 0 and (group * GROUPS_PER_SEARCH >= len(self._places) or self._held >= HELD_STEPS)

    def _fill(self) -> None:
        """Fills free slots from the queue, or holds a small group."""
        if self._ripe():
            self._admit()
        else:
            self._held = self._held + 1 if self._entering else 0
            self._show()

    def _admit(self) -> bool:
        """The first rows of the queue enter their searches; False: none can enter beside the present ones."""
        self._held = 0
        groups: dict[SearchKey, list[QueuedRow]] = {}
        free: dict[SearchKey, int] = {}
        before = len(self._places)
        room = self.max_batch - before

        def accept(place: QueuedRow) -> bool:
            if room and place.key not in free:
                free[place.key] = self._search(place).free
            return room > 0 and free[place.key] > 0

        for place in self._queue.take(accept):
            groups.setdefault(place.key, []).append(place)
            free[place.key] -= 1
            room -= 1
        for key, places in groups.items():
            self._enter(self._searches[key], places)
        self._show()
        return len(self._places) > before

    def _show(self) -> None:
        """The gauges, where they have changed: each costs a lock, and a write to shared memory beside other workers."""
        shown = len(self._queue), len(self._places)
        if shown != self._shown:
            self._shown = shown
            self.queued.set(shown[0])
            self.active.set(shown[1])

    def _search(self, place: QueuedRow) -> Search:
        """The open search of rows like this one."""
        if place.key not in self._searches:
            idle = [key for key, one in self._searches.items() if not one.active]
            for key in idle[: max(0, len(idle) - IDLE_SEARCHES)]:
                del self._searches[key]
            self._searches[place.key] = self._open(place)
        self._searches.move_to_end(place.key)
        return self._searches[place.key]

    def _open(self, place: QueuedRow) -> Search:
        _, columns, prefix = place.key
        searcher, settings = self.searcher, place.settings
        strategy, processors = searcher.options(settings)
        length = min(settings.max_length, searcher.max_target_length) + prefix
        shape = SearchShape(self.max_batch, columns, prefix, min(length, searcher.max_target_length))
        options: dict[str, Any] = {"processors": processors, "nbest": num_hypotheses(strategy, settings)}
        if searcher.native is not None:
            native = NativeSearch.open(
                searcher.native, searcher.network, strategy, shape, interrupt=self._interrupt, **options
            )
            if native is not None:
                return native
        return OpenSearch(searcher.network, strategy, shape, graphs=self._graphs(searcher), **options)

    def _graphs(self, searcher: Searcher) -> SearchGraphs | None:
        return searcher.graphs if searcher.continuous else None

    def _enter(self, search: Search, places: list[QueuedRow]) -> None:
        numbers = list(range(self._numbers, self._numbers + len(places)))
        self._numbers += len(places)
        self._places.update(zip(numbers, places, strict=True))
        begin = time.time_ns()
        try:
            entered = self._add(search, numbers, [one.task.rows[one.number] for one in places])
        except Exception as error:  # e.g. out of memory: only these requests fail
            for task in {place.task for place in places}:
                self._close(task, error=error)
            return
        if not entered:  # they wait until the search is empty
            for number in numbers:
                self._queue.push(self._places.pop(number))
            return
        end = time.time_ns()
        for times in (place.task.times for place in places):
            if not times.entered:
                times.entered, times.prefilled = begin, end

    def _add(self, search: Search, numbers: Sequence[int], rows: Sequence[SearchRow]) -> bool:
        """Rows into a search; False: they have to wait."""
        if isinstance(search, NativeSearch):
            search.add([row.source or () for row in rows], [row.max_length for row in rows], numbers)
            return True
        return search.add(numbers, self._request(rows))

    def _request(self, rows: Sequence[SearchRow]) -> SearchRequest:
        if rows[0].source is None:
            batch = Batch(target=Padded.from_rows([[BOS] for _ in rows]))
        else:
            batch = self.model.source_encoding.batch([row.source for row in rows])
        prefixes = [list(row.prefix) for row in rows]
        prefix = Padded.from_rows(prefixes) if any(prefixes) else None
        return SearchRequest(batch, torch.tensor([row.max_length for row in rows]), prefix, [row.seed for row in rows])

    def _step(self) -> None:
        """Advances every open search: by one step where tokens are streamed, or several searches take turns."""
        running = {key: search for key, search in self._searches.items() if search.active}
        self._launched = self._launch(running)
        self._take_hypotheses()
        if self._launched:
            self._overlap()
        streamed = dict[int, QueuedRow]()
        if self._streams:
            streamed = {number: place for number, place in self._places.items() if place.task.on_tokens is not None}
        if streamed or len(running) > 1:
            self._interrupt[0] = 1
        for key, search in running.items():
            self.batch_size.observe(search.active)
            try:
                ended = search.advance()
            except Exception as error:
                self._fail(key, error)
                continue
            if ended:
                self._left.append((search, {number: self._places.pop(number) for number in ended}))
            for number in ended:
                streamed.pop(number, None)
            self._report_tokens(search, streamed)
        if not self._launched:
            self._take_hypotheses()
            while self._found:
                self._finish(*self._found.popleft())
        self._report()

    def _launch(self, running: dict[SearchKey, Search]) -> list[OpenSearch]:
        """The searches whose steps a device computes from now on."""
        launched = list[OpenSearch]()
        for key, search in list(running.items()):
            try:
                if isinstance(search, OpenSearch):
                    most = 1 if self._streams else IN_FLIGHT
                    while search.launches < most and search.launch():
                        pass
                    if search.launches:
                        launched.append(search)
            except Exception as error:
                self._fail(key, error)
                del running[key]
        return launched

    def _take_hypotheses(self) -> None:
        """The hypotheses of rows that have left. Where steps were launched before, a device computes them meanwhile."""
        left, self._left = self._left, []
        for search, places in left:
            try:
                found = search.take_results()
            except Exception as error:
                for task in {place.task for place in places.values()}:
                    self._close(task, error=error)
                continue
            self._found.extend((place, found[number]) for number, place in places.items())

    def _overlap(self) -> None:
        """Begins new tasks, makes outputs and fills slots while a device computes: between two steps it would wait.

        Clients answer outputs with new tasks. Those that come during these steps enter right after them.
        """
        most_left, entering = len(self._found) * (1 - MIN_FINISHED_SHARE), True
        while any(search.computing for search in self._launched) or len(self._found) > most_left:
            if entering and self._entering * GROUPS_PER_SEARCH >= self.max_batch:
                entering = self._admit()
            elif self._new:
                self._begin_next()
            elif self._inbox:
                self._take_inbox()
            elif self._found:
                self._finish(*self._found.popleft())
                if not self._found or len(self._found) % REPORTED_TOGETHER == 0:
                    self._report()
            elif entering and self._ripe():
                entering = self._admit()
            else:
                time.sleep(0)  # gives other threads the interpreter; a timed wait would end a tenth of a step too late
        self._held = self._held + LAUNCHED_STEPS if self._entering else 0
        self._show()

    def _report_tokens(self, search: Search, streamed: dict[int, QueuedRow]) -> None:
        for number, place in streamed.items():
            if not place.task.closed and (certain := search.certain(number)):
                self._send_tokens(place, certain, ended=False)

    def _send_tokens(self, place: QueuedRow, tokens: list[tuple[int, float]], *, ended: bool) -> None:
        """An error of who receives tokens ends that task alone."""
        assert place.task.on_tokens is not None
        try:
            place.task.on_tokens(place.number, tokens, ended)
        except Exception as error:
            self._close(place.task, error=error)

    def _fail(self, failed: SearchKey, error: Exception) -> None:
        """A search that failed is dropped with all its rows; the others go on."""
        del self._searches[failed]
        for task in {place.task for place in self._places.values() if place.key == failed}:
            self._close(task, error=error)

    def _finish(self, place: QueuedRow, hypotheses: list[Hypothesis]) -> None:
        if place.task.closed:
            return
        task = place.task
        task.results[place.number] = hypotheses
        if task.on_tokens is not None and hypotheses:
            tokens = list(zip(hypotheses[0].ids, hypotheses[0].token_scores, strict=True))
            self._send_tokens(place, tokens, ended=True)
        if len(task.results) == len(task.rows):
            try:
                self._close(task, task.finish([task.results[number] for number in range(len(task.rows))]))
            except Exception as error:
                self._close(task, error=error)


def search_key(settings: GenerationRecipe) -> tuple[str, GenerationRecipe]:
    """What rows need in common to share a search, and its settings: lengths and seeds are those of each row."""
    changes: dict[str, Any] = {"seed": 0, "max_source_length": 1}
    if not settings.forced_eos:  # which ends an output at the maximal length of the search
        changes["max_length"] = power_of_two(settings.max_length, 32)
    common = settings.model_copy(update=changes)
    return common.model_dump_json(), common
