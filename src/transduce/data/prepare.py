"""A recipe in; the tokenizers and the stored, filtered, split pairs that training needs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transduce.build import build_modality_source, build_noise
from transduce.data.batching import AlignedBatches, Batches, batch_by_length, gather
from transduce.data.epoch_plan import RowSubset, chunks
from transduce.data.filters import Filters
from transduce.data.lm_blocks import BlockBatches, consecutive_blocks, hold_out_end, token_streams
from transduce.data.noise import Noise, NoisyBatches, add_noise
from transduce.data.packing import Packing
from transduce.data.readers.corpus import TEXT, read_corpus, text_parts
from transduce.data.store import Store, build_store, split
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import Batch, Example
from transduce.recipe import DataRecipe, Recipe
from transduce.recipe.compatibility import labels_per

Tokenizers = tuple[Tokenizer, Tokenizer]  # source, target
# Held-out lines are never thrown away for their length or shape, and of a running text nothing is.
KEEP = Filters(min_length=0, max_length=2**31 - 1)


@dataclass(frozen=True)
class PreparedData:
    """The stored pairs of a run: what is trained on, and what is held out to watch it."""

    train: Store
    rows: RowSubset | np.ndarray
    dev: Store
    dev_rows: np.ndarray
    noise: Noise | None = None  # what makes a source of a text

    def batches(self, recipe: Recipe, tokenizers: Tokenizers) -> Batches | BlockBatches | NoisyBatches | AlignedBatches:
        training, tokens = recipe.training, recipe.tokens
        if recipe.data.block_size is not None:
            return BlockBatches(
                token_streams(self.train, self.rows),
                recipe.data.block_size,
                batch_tokens=training.budget,
                seed=training.seed,
                weights=[corpus.weight for corpus in recipe.data.train],
            )
        clean = Batches(
            self.train,
            self.rows,
            # The damaged source will be about as long as the target.
            batch_tokens=training.budget if self.noise is None else -(-training.budget // 2),
            pool=training.bucket_batches,
            seed=training.seed,
            weights=[corpus.weight for corpus in recipe.data.train],
            dropout=(tokens.source.dropout, tokens.target.dropout),
            tokenizers=tokenizers,
            packing=self.packing(recipe) if training.packing is True else None,
        )
        if training.objective.get("kind") == "guided_alignment":
            return AlignedBatches(clean, tokenizers)
        return clean if self.noise is None else NoisyBatches(clean, self.noise, training.seed)

    def packing(self, recipe: Recipe) -> Packing | None:
        """How packed batches of these pairs look, by the lengths of some of them; None: their budget is too small."""
        rows = next(chunks(self.rows))
        return Packing.within(recipe.training.budget, self.train.lengths[rows] + 1)

    def dev_batches(self, recipe: Recipe) -> Iterator[Batch]:
        """All that is held out, once."""
        budget = recipe.training.budget
        if recipe.data.block_size is not None:
            yield from consecutive_blocks(token_streams(self.dev, self.dev_rows), recipe.data.block_size, budget)
            return
        for rows in batch_by_length(self.dev.lengths[self.dev_rows], budget):
            batch = gather(self.dev, self.dev_rows[rows])
            yield batch if self.noise is None else add_noise(batch, self.noise, recipe.training.seed)

    def dev_examples(self, most: int | None = None) -> list[Example]:
        return [self.dev.example(int(row)) for row in self.dev_rows[:most]]


def train_tokenizers(recipe: Recipe) -> Tokenizers:
    """Tokenizers of both sides from the training pairs; one object where they share a vocabulary."""

    def texts(*sides: str) -> Iterator[str]:
        for corpus in recipe.data.train:
            for example in read_corpus(corpus, recipe.data.invalid):
                for side in sides:  # a tab in a source parts it, so no token may reach over it
                    text = getattr(example, side) or ""
                    yield from text_parts(text, corpus.modalities) if side == "source" else [text]

    if not recipe.data.train:
        raise InputError("there is nothing to train on", remedy="set data.train to a file of pairs")
    tokens = recipe.tokens
    first, second = tokens.source, tokens.target
    sourceless = recipe.data.sources and TEXT not in recipe.data.train[0].modalities
    if recipe.data.format == "text" or sourceless:  # there is no other side of text
        only = Tokenizer.train(texts("target"), second.kind, second.size, second.min_count)
        return only, only
    if tokens.shared:
        both = Tokenizer.train(
            texts("source", "target"), first.kind, first.size, first.min_count, tokens.oov_placeholders
        )
        return both, both
    source = Tokenizer.train(texts("source"), first.kind, first.size, first.min_count)
    return source, Tokenizer.train(texts("target"), second.kind, second.size, second.min_count)


def cache_folder(data: DataRecipe) -> Path:
    """Where tokenised corpora are kept between runs."""
    if data.cache is not None:
        return Path(data.cache)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transduce" / "stores"


def train_store(recipe: Recipe, tokenizers: Tokenizers, progress: Callable[[int], None] | None = None) -> Store:
    """The training pairs of a recipe as ids on disk, found in the cache or built there."""
    data = recipe.data
    filters = Filters(data.min_length, data.max_length, data.max_ratio, data.duplicates == "drop")
    sides = build_modality_source(recipe, tokenizers[0]) or tokenizers[0], tokenizers[1]
    kept = filters if data.block_size is None else KEEP
    return build_store(data.train, *sides, kept, data.invalid, cache_folder(data), progress=progress)


def prepare_data(recipe: Recipe, tokenizers: Tokenizers, progress: Callable[[int], None] | None = None) -> PreparedData:
    """The pairs of a recipe as ids on disk, found in the cache or built there."""
    data, noise = recipe.data, build_noise(recipe.data.noise, tokenizers[1])
    train = train_store(recipe, tokenizers, progress)
    if labels_per(recipe.model) == "word":
        _check_tags(train, tokenizers[0])
    if len(train) == 0:
        raise InputError(
            "no pair is left to train on", where=", ".join(train.names), remedy="\n  ".join(train.describe())
        )
    if data.dev:
        sides = build_modality_source(recipe, tokenizers[0]) or tokenizers[0], tokenizers[1]
        dev = build_store(data.dev, *sides, KEEP, data.invalid, cache_folder(data), progress=progress)
        return PreparedData(train, RowSubset(len(train)), dev, np.arange(len(dev)), noise)
    rows: RowSubset | np.ndarray
    if data.block_size is not None:
        rows, dev_rows = hold_out_end(train, data.dev_size)
    else:
        rows, dev_rows = split(len(train), _dev_size(data, len(train)), recipe.training.seed, train.groups())
    return PreparedData(train, rows, train, dev_rows, noise)


def _check_tags(store: Store, source: Tokenizer, chunk: int = 10_000) -> None:
    """A label for each word: both sides of every pair must have as many."""
    starts = np.array(source.word_starts)
    for begin in range(0, len(store), chunk):
        rows = np.arange(begin, min(begin + chunk, len(store)))
        ids, lengths = store.side("source", rows)
        ends = np.cumsum(lengths)
        sums = np.concatenate(([0], np.cumsum(starts[ids])))
        words = sums[ends] - sums[ends - lengths]
        wrong = np.flatnonzero(words != store.lengths[rows, 1])
        if len(wrong):
            example = store.example(int(rows[wrong[0]]))
            raise InputError(
                f"{words[wrong[0]]} words but {store.lengths[rows[wrong[0]], 1]} labels",
                where=f"{example.file}:{example.line}",
                remedy="give every word of the source one label, with single spaces between them",
            )


def _dev_size(data: DataRecipe, pairs: int) -> int:
    """2 % of the pairs, 100 to 2,000, yet never more than a fifth of a small corpus."""
    if pairs < 2:
        raise InputError(
            f"{pairs} pair is too few to hold one out", remedy="give more pairs, or a file of held-out ones: data.dev"
        )
    if data.dev_size is not None:
        return data.dev_size
    return max(1, min(2000, max(100, pairs // 50), pairs // 5))
