"""Streaming: batches of corpora that are read part by part, without a pass over all of them before the first update.

A part is a range of bytes of a local text file, or a whole file where a file cannot be divided; the parts are known
from the names and sizes of the files alone. Every epoch has all parts in another random order. A window, some
consecutive parts of that order, is tokenised into a temporary store, and its pairs are shuffled and batched by length;
a thread tokenises the next window meanwhile. All of it is a function of the seed, so a resumed run seeks.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from transduce.data.batching import Batches, DataPosition, TransformedBatches
from transduce.data.filters import Filters
from transduce.data.languages import temperature_weights
from transduce.data.readers.corpus import ByteRange, Invalid, can_divide, corpus_files, read_corpus
from transduce.data.readers.remote import file_state
from transduce.data.row_selection import SeededRandom, repeat_counts
from transduce.data.store import UNFINISHED, Store, StoreWriter, store_facts
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import Batch, Example
from transduce.recipe import Corpus
from transduce.storage import make_folder

PART_BYTES = 1 << 23  # of a text file
WINDOW_PARTS = 16
INDICES = 1 << 32  # batches of a window have indices from its number times this
WINDOWS_KEPT = 3  # readers in several threads are never far apart
Window = tuple[int, int]  # epoch, number in the epoch
WindowBatches = Batches | TransformedBatches


@dataclass(frozen=True)
class StreamPart:
    """A part of a corpus, which takes the place of a corpus in a store."""

    corpus: Corpus
    invalid: Invalid
    span: ByteRange | None = None  # None: all of the corpus

    @property
    def examples(self) -> Iterator[Example]:
        if self.span is None:
            return read_corpus(self.corpus, self.invalid)
        return self._of_span(self.span)

    def _of_span(self, span: ByteRange) -> Iterator[Example]:
        try:
            yield from read_corpus(self.corpus, self.invalid, None, span)
        except InputError as error:  # a line is counted from the beginning of the part
            where = f"{error.where}, counted from byte {span.begin:,}" if span.begin else error.where
            raise InputError(error.problem, where=where, remedy=error.remedy) from None

    @property
    def format(self) -> str:
        return self.corpus.format

    @property
    def source_parts(self) -> int:
        return self.corpus.source_parts


class CorpusStream:
    """The parts of some corpora, and the windows of an epoch."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        invalid: Invalid,
        seed: int,
        temperature: float = 1.0,
        part_bytes: int = PART_BYTES,
        window_parts: int = WINDOW_PARTS,
    ) -> None:
        self.corpora, self._invalid, self._seed, self._window_parts = corpora, invalid, seed, window_parts
        self._states = [[file_state(file) for file in corpus_files(corpus)] for corpus in corpora]
        sizes = [sum(int(state.get("size", 0)) for state in states) for states in self._states]
        self.parts: list[StreamPart] = []
        self._corpus_of: list[int] = []
        for number, (corpus, size) in enumerate(zip(corpora, sizes, strict=True)):
            found = _parts(corpus, invalid, size, part_bytes)
            self.parts += found
            self._corpus_of += [number] * len(found)
        self._weights = [corpus.weight for corpus in corpora]
        if temperature != 1:
            groups = [(corpus.language, corpus.group) for corpus in corpora]
            self._weights = temperature_weights(groups, sizes, self._weights, temperature)

    @cached_property
    def content_hash(self) -> str:
        """Of the sizes of all files: their content is not read. The first batch tells most other changes."""
        facts = [[state.get("size") for state in states] for states in self._states]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @lru_cache(2)  # noqa: B019 (there is one stream in a run)
    def windows(self, epoch: int) -> list[list[int]]:
        """The numbers of the parts in each window of an epoch; of a corpus with weight 0.5, of half of its parts."""
        rng = SeededRandom("stream", self._seed, epoch)
        counts = repeat_counts(np.array(self._corpus_of), self._weights, rng)
        parts = np.repeat(np.arange(len(self.parts)), counts)
        order = parts[rng.permutation(len(parts))].tolist()
        return [order[begin : begin + self._window_parts] for begin in range(0, len(order), self._window_parts)]

    def sample(self) -> Iterator[Example]:
        """The examples of the first window: what tokenizers are trained on."""
        for number in dict.fromkeys(self.windows(0)[0]):
            yield from self.parts[number].examples


def _parts(corpus: Corpus, invalid: Invalid, size: int, part_bytes: int) -> list[StreamPart]:
    if not can_divide(corpus):
        return [StreamPart(corpus, invalid)]
    edges = [*range(0, max(size, 1), part_bytes), size]
    return [StreamPart(corpus, invalid, ByteRange(corpus, *span)) for span in pairwise(edges)]


class WindowStores:
    """The stores of windows, the one in use and the next; each is made once, in a thread."""

    def __init__(
        self,
        stream: CorpusStream,
        tokenizers: tuple[Tokenizer, Tokenizer],
        filters: Filters,
        invalid: Invalid,
        folder: Path,
    ) -> None:
        self.stream, self._tokenizers, self._filters, self._invalid = stream, tokenizers, filters, invalid
        self._parent = folder
        self._made: dict[Window, Future[Store]] = {}
        self._folders: dict[Window, TemporaryDirectory[str]] = {}
        self._pool = ThreadPoolExecutor(1, "stream")
        self._lock = threading.Lock()

    def after(self, window: Window) -> Window:
        epoch, number = window
        return (epoch + 1, 0) if number + 1 >= len(self.stream.windows(epoch)) else (epoch, number + 1)

    def store(self, window: Window) -> Store:
        with self._lock:
            wanted = [window, self.after(window)]
            for key in wanted:
                if key not in self._made:
                    self._made[key] = self._pool.submit(self._make, key)
            for key in [*self._made][:-WINDOWS_KEPT]:
                if key not in wanted and self._made[key].done():
                    del self._made[key]
                    self._folders.pop(key).cleanup()
            found = self._made[window]
        return found.result()

    def _make(self, window: Window) -> Store:
        """Tokenises the pairs of a window."""
        parts = [self.stream.parts[number] for number in self.stream.windows(window[0])[window[1]]]
        names = [str(part.corpus.path or part.corpus.source) for part in parts]
        # What a killed process leaves is removed like a store that was not finished.
        self._folders[window] = TemporaryDirectory(prefix=UNFINISHED, dir=make_folder(self._parent))
        folder = Path(self._folders[window].name)
        prints = [f"{self.stream.content_hash} {window} {number}" for number in range(len(parts))]
        facts = store_facts(prints, *self._tokenizers, self._filters, self._invalid, [one.format for one in parts])
        with closing(StoreWriter(folder, *self._tokenizers, self._filters)) as writer:
            writer.add_corpora(parts, self._invalid, None)
            writer.finish(facts, names)
        return Store(folder, names)


class StreamedBatches:
    """Endless batches of a stream; `make_batches` forms those of the store of a window."""

    def __init__(self, stores: WindowStores, make_batches: Callable[[Store], WindowBatches]) -> None:
        self._stores = stores
        self._batches = lru_cache(WINDOWS_KEPT)(lambda window: make_batches(stores.store(window)))

    def at(self, position: DataPosition) -> Batch:
        window, index = divmod(position.index, INDICES)
        return self._batches((position.epoch, window)).at(DataPosition(position.epoch, index))

    def after(self, position: DataPosition) -> DataPosition:
        window, index = divmod(position.index, INDICES)
        if index + 1 < self.batches_in(position.epoch, window):
            return DataPosition(position.epoch, position.index + 1)
        epoch, window = self._stores.after((position.epoch, window))
        return DataPosition(epoch, window * INDICES)

    def batches_in(self, epoch: int, window: int = 0) -> int:
        """The batches of a window."""
        return self._batches((epoch, window)).batches_in(epoch)

    def padding(self, epoch: int) -> float:
        """Share of the slots without a token, in the first window of an epoch."""
        return self._batches((epoch, 0)).padding(epoch)
