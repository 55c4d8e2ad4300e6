"""Time and memory of data preparation and search by number of lines, stage by stage.

Each size runs in a process of its own. Memory is the anonymous memory of the process: pages of memory-mapped files,
which the system can reclaim at any time, are not counted.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WORDS = 5000  # vocabulary of the generated lines


@dataclass(frozen=True)
class Stage:
    """Time and additional memory of one stage."""

    name: str
    lines: int
    seconds: float  # processor time
    peak: int  # bytes
    kept: int  # bytes still in use afterwards


def write_lines(path: Path, lines: int, seed: int = 1) -> None:
    """Writes pairs of 3 to 9 words of 2 to 9 letters each, with a skewed word distribution."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(WORDS)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            count = chance.randint(3, 9)
            chosen = [words[int(WORDS * chance.random() ** 3)] for _ in range(2 * count)]
            file.write(f"{' '.join(chosen[:count])}\t{' '.join(chosen[count:])}\n")


def anonymous_memory() -> int:
    """Anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def staged(name: str, lines: int, stages: list[Stage]) -> Iterator[None]:
    """Measures the block; memory is sampled every 20 ms."""
    before, peak, done = anonymous_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.process_time()
    yield
    seconds = time.process_time() - begin
    done.set()
    watcher.join()
    after = anonymous_memory()
    stages.append(Stage(name, lines, seconds, max(peak, after) - before, after - before))


def prepare_lines(file: str, folder: str, lines: int) -> list[Stage]:
    """Data preparation and the batches of the first epoch, without the network."""
    from transduce.data.batching import Batches, DataPosition
    from transduce.data.filters import Filters
    from transduce.data.readers.corpus import read_corpus
    from transduce.data.row_selection import split
    from transduce.data.store import build_store
    from transduce.data.tokenizers.tokenizer import Tokenizer
    from transduce.recipe import Corpus

    corpus, stages = Corpus(path=file), list[Stage]()
    # Warm-up: libraries are loaded before the measurement.
    Tokenizer.train(["a first line"], "bpe", 300).encode_batch(["a line"])
    with staged("train tokenizers (bpe)", lines, stages):
        sides = (example.source for example in read_corpus(corpus))
        tokenizer = Tokenizer.train(sides, "bpe", 2000)
    with staged("tokenise and store", lines, stages):
        store = build_store([corpus], tokenizer, tokenizer, Filters(drop_duplicates=True), "error", folder)
    with staged("hold out pairs", lines, stages):
        rows, _ = split(len(store), min(1000, len(store) // 5), 1, store.groups())
    with staged("plan an epoch", lines, stages):
        batches = Batches(store, rows, batch_tokens=4096, bucket_batches=100, seed=1)
        count = batches.batches_in(0)
    with staged("gather its batches", lines, stages):
        for index in range(count):
            batches.at(DataPosition(0, index))
    with staged("plan the next epoch", lines, stages):
        batches.batches_in(1)
    return stages


def search_lines(lines: int) -> list[Stage]:
    """Search and recomputation of attention, with a network so small that the bookkeeping dominates."""
    import torch

    from transduce.data.tokenizers.tokenizer import Tokenizer
    from transduce.inference import Model
    from transduce.recipe import parse
    from transduce.recipe.build import build_model, complete_recipe

    chance, stages = random.Random(2), list[Stage]()
    tokenizer = Tokenizer.train(["abcdefghijklmnopqrstuvwxyz"], "chars", 100)
    texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(4, 16))) for _ in range(lines)]
    part = {"kind": "transformer", "layers": 1, "width": 16, "heads": 1, "ff_width": 16}
    recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))
    torch.manual_seed(1)
    network = build_model(recipe.model, tokenizer.size, tokenizer.size).eval()
    model = Model(network, tokenizer, tokenizer, recipe)
    settings = {"max_length": 12, "min_length": 12}
    model.generate(texts[:20], strategy="beam", beam=4, **settings)
    with staged("search, beam 4", lines, stages):
        found = model.generate(texts, strategy="beam", beam=4, **settings)
    with staged("recompute attention", lines, stages):
        model.explain_predictions(found)
    return stages


def in_new_process(stages: Callable[..., list[Stage]], *args: object) -> list[Stage]:
    """Runs the stages in a new process; its errors are raised here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(stages, *args).result()


def measure_lines(sizes: list[int]) -> list[Stage]:
    """Data preparation for each number of lines."""
    stages = []
    for lines in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pairs.tsv"
            write_lines(file, lines)
            stages += in_new_process(prepare_lines, str(file), folder, lines)
    return stages


def measure_search(sizes: list[int]) -> list[Stage]:
    """Search and recomputed attention for each number of lines."""
    return [stage for lines in sizes for stage in in_new_process(search_lines, lines)]
