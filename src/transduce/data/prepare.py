"""Data preparation: tokenizers and stored, filtered, split pairs of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from transduce.contracts import Noise
from transduce.data.augmentation import ArtificialCorpus, augmented
from transduce.data.batching import (
    AlignedBatches,
    Batches,
    GradedBatches,
    Packing,
    TransformedBatches,
    batch_by_length,
    gather,
    with_similarities,
)
from transduce.data.filters import Filters
from transduce.data.languages import split_language, temperature_weights
from transduce.data.lm_blocks import BlockBatches, consecutive_blocks, hold_out_end, token_streams
from transduce.data.noise import NoisyBatches, add_noise
from transduce.data.readers.corpus import by_language, read_corpus, text_parts
from transduce.data.readers.files import TAGS, TEXT_KINDS
from transduce.data.row_selection import RowSubset, chunks, corpus_sizes, split
from transduce.data.store import Store, build_store
from transduce.data.streaming import CorpusStream, StreamedBatches, WindowStores
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, nearest
from transduce.flow import Batch, Example
from transduce.recipe import Corpus, DataRecipe, Recipe, TextRecipe
from transduce.recipe.build import build_augmentation, build_modality_source, build_noise
from transduce.recipe.compatibility import labels_per, uses_similarities
from transduce.storage import cache_directory

Tokenizers = tuple[Tokenizer, Tokenizer]  # source, target
# Held-out pairs are never dropped for their lengths, and running text is never filtered.
KEEP_ALL = Filters(min_length=0, max_length=2**31 - 1)


@dataclass(frozen=True)
class PreparedData:
    """The stored pairs of a run: training and development data."""

    train: Store
    rows: RowSubset | np.ndarray
    dev: Store
    dev_rows: np.ndarray
    noise: Noise | None = None  # creates sources for text without sources
    corpora: Sequence[Corpus | ArtificialCorpus] = ()  # of the training data, in the order of the store
    stream: WindowStores | None = None  # then `train` is its first window

    def batches(
        self, recipe: Recipe, tokenizers: Tokenizers
    ) -> Batches | BlockBatches | TransformedBatches | StreamedBatches:
        training, packing = recipe.training, None
        if recipe.data.block_size is not None:
            return BlockBatches(
                token_streams(self.train, self.rows),
                recipe.data.block_size,
                batch_tokens=training.budget,
                seed=training.seed,
                weights=[corpus.weight for corpus in recipe.data.train],
            )
        if training.packing is True:
            packing = self.packing(recipe)
        if self.stream is None:
            return self._row_batches(recipe, tokenizers, packing)

        def of_window(store: Store) -> Batches | TransformedBatches:
            window = replace(self, train=store, rows=RowSubset(len(store)), corpora=(), stream=None)
            return window._row_batches(recipe, tokenizers, packing)

        return StreamedBatches(self.stream, of_window)

    def _row_batches(
        self, recipe: Recipe, tokenizers: Tokenizers, packing: Packing | None
    ) -> Batches | TransformedBatches:
        training, tokens = recipe.training, recipe.tokens
        clean = Batches(
            self.train,
            self.rows,
            # The noised source will be about as long as the target.
            batch_tokens=training.budget if self.noise is None else -(-training.budget // 2),
            bucket_batches=training.bucket_batches,
            seed=training.seed,
            weights=self._weights(recipe.data.language_temperature) if self.corpora else None,
            dropout=(tokens.source.dropout, tokens.target.dropout),
            tokenizers=tokenizers,
            packing=packing,
            curriculum=recipe.data.curriculum,
        )
        if training.objective.get("kind") == "guided_alignment":
            return AlignedBatches(clean, tokenizers)
        if uses_similarities(recipe):
            return GradedBatches(clean)
        return clean if self.noise is None else NoisyBatches(clean, self.noise, training.seed)

    def _weights(self, temperature: float) -> list[float]:
        """The weight of each corpus."""
        weights = [corpus.weight for corpus in self.corpora]
        if temperature == 1:
            return weights
        sizes = corpus_sizes(self.rows, self.train.corpus_of, len(weights))
        groups = [(corpus.language, corpus.group) for corpus in self.corpora]
        return temperature_weights(groups, sizes, weights, temperature)

    def packing(self, recipe: Recipe) -> Packing | None:
        """The shape of packed batches, by the lengths of the first pairs; None: the budget is too small."""
        rows = next(chunks(self.rows))
        return Packing.for_budget(recipe.training.budget, self.train.lengths[rows] + 1)

    def dev_batches(self, recipe: Recipe) -> Iterator[Batch]:
        """All development data, once."""
        budget = recipe.training.budget
        if recipe.data.block_size is not None:
            yield from consecutive_blocks(token_streams(self.dev, self.dev_rows), recipe.data.block_size, budget)
            return
        for rows in batch_by_length(self.dev.lengths[self.dev_rows], budget):
            batch = gather(self.dev, self.dev_rows[rows])
            if uses_similarities(recipe):
                batch = with_similarities(batch, self.dev)
            yield batch if self.noise is None else add_noise(batch, self.noise, recipe.training.seed)

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the training data, and of the development data if they are a set of their own."""
        train = {"data.train": self.train.content_hash if self.stream is None else self.stream.stream.content_hash}
        return train if self.dev is self.train else {**train, "data.dev": self.dev.content_hash}

    def dev_examples(self, limit: int | None = None) -> list[Example]:
        return [self.dev.example(int(row)) for row in self.dev_rows[:limit]]


def train_tokenizers(recipe: Recipe, reused: Mapping[int, Tokenizer] | None = None) -> Tokenizers:
    """Trains the tokenizers of both sides; they are one object where the sides share a vocabulary.

    `reused`: sides (0: source, 1: target) with vocabularies of their own that have one already.
    """

    def texts(*sides: str) -> Iterator[str]:
        for corpus, examples in _training_examples(recipe):
            for example in examples:
                for side in sides:  # tabs separate the parts of a source, so no token may span one
                    text = getattr(example, side) or ""
                    if side == "source" and recipe.data.multilingual:
                        text = split_language(text)[1]
                    yield from text_parts(text, corpus.modalities) if side == "source" else [text]

    if not recipe.data.train:
        raise InputError("no training data", remedy="set data.train to a file of pairs")
    tokens = recipe.tokens
    first, second = tokens.source, tokens.target
    sourceless = recipe.data.sources and not {*TEXT_KINDS}.intersection(recipe.data.train[0].modalities)
    if recipe.data.format == "text" or sourceless:  # the target is the only text
        if recipe.data.format == "text" and second.normalisation:
            raise InputError("a language model reads text as it is", remedy="leave out tokens.target.normalisation")
        only = _train(texts("target"), second)
        return only, only
    if tokens.shared:
        both = _with_tags(_train(texts("source", "target"), first, tokens.oov_placeholders), recipe)
        return both, both
    ready = reused or {}
    source = ready[0] if 0 in ready else _with_tags(_train(texts("source"), first), recipe)
    return source, ready[1] if 1 in ready else _train(texts("target"), second)


def _training_examples(recipe: Recipe) -> Iterator[tuple[Corpus, Iterator[Example]]]:
    """The corpora with their examples; of a stream those of its first window."""
    if recipe.data.streaming:
        yield recipe.data.train[0], _stream(recipe).sample()
        return
    for corpus in recipe.data.train:
        yield corpus, read_corpus(corpus, recipe.data.invalid)


def _stream(recipe: Recipe) -> CorpusStream:
    data = recipe.data
    return CorpusStream(data.train, data.invalid, recipe.training.seed, data.language_temperature)


def _train(texts: Iterator[str], side: TextRecipe, oov_placeholders: int = 0) -> Tokenizer:
    return Tokenizer.train(texts, side.kind, side.size, side.min_count, oov_placeholders, side.normalisation)


def _with_tags(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The source tokenizer with the languages of the training data, and the tags of sources of kind `tags`."""
    data = recipe.data
    languages = [one.language for one in by_language(data.train, data.invalid) if one.language]
    tokenizer = tokenizer.with_languages(languages) if languages else tokenizer
    corpora = [corpus for corpus in data.train if TAGS in corpus.modalities]
    if not corpora:
        return tokenizer
    return tokenizer.with_tags(
        text
        for corpus in corpora
        for example in read_corpus(corpus, data.invalid)
        for text in text_parts(example.source, corpus.modalities, TAGS)
    )


def cache_folder(data: DataRecipe, kind: str = "stores") -> Path:
    """The cache folder of tokenised corpora; of another kind, such as `vectors`, beside them."""
    if data.cache is None:
        return cache_directory(kind)
    return Path(data.cache) if kind == "stores" else Path(data.cache) / kind


def train_store(
    recipe: Recipe,
    tokenizers: Tokenizers,
    progress: Callable[[int], None] | None = None,
    artificial: Sequence[ArtificialCorpus] = (),
) -> Store:
    """The store of the training pairs of a recipe and of artificial pairs, from the cache or built there."""
    data = recipe.data
    filters = Filters(data.min_length, data.max_length, data.max_ratio, data.duplicates == "drop")
    sides = build_modality_source(recipe, tokenizers[0]) or tokenizers[0], tokenizers[1]
    active = filters if data.block_size is None else KEEP_ALL
    corpora: list[Corpus | ArtificialCorpus] = [*by_language(data.train, data.invalid), *artificial]
    return build_store(corpora, *sides, active, data.invalid, cache_folder(data), progress=progress)


def prepare_data(recipe: Recipe, tokenizers: Tokenizers, progress: Callable[[int], None] | None = None) -> PreparedData:
    """The stored training and development data of a recipe."""
    prepared, augmentation = _given_data(recipe, tokenizers, progress), build_augmentation(recipe.data.augmentation)
    if augmentation is None:
        return prepared
    examples = [prepared.train.example(int(row)) for part in chunks(prepared.rows) for row in part]
    made = augmented(augmentation, examples, recipe.training.seed, recipe.data.train[0].source_parts)
    if not any(one.examples for one in made):
        warnings.warn("no artificial pair can be made from these: training goes on without", stacklevel=2)
    train = train_store(recipe, tokenizers, progress, made)
    held_out = prepared.dev_rows if prepared.dev is prepared.train else ()  # the given pairs come first
    return replace(prepared, train=train, rows=RowSubset(len(train), held_out), corpora=[*prepared.corpora, *made])


def _given_data(recipe: Recipe, tokenizers: Tokenizers, progress: Callable[[int], None] | None) -> PreparedData:
    """The stored data of a recipe without artificial pairs."""
    data, noise = recipe.data, build_noise(recipe.data.noise, tokenizers[1])
    corpora = by_language(data.train, data.invalid)
    _check_languages(corpora, tokenizers[0])
    stream = None
    if data.streaming:
        filters = Filters(data.min_length, data.max_length, data.max_ratio)
        stream = WindowStores(_stream(recipe), tokenizers, filters, data.invalid, cache_folder(data))
    train = train_store(recipe, tokenizers, progress) if stream is None else stream.store((0, 0))
    if labels_per(recipe.model) == "word":
        _check_tags(train, tokenizers[0])
    if len(train) == 0:
        raise InputError("no training pair is left", where=", ".join(train.names), remedy="\n  ".join(train.describe()))
    if data.dev:
        sides = build_modality_source(recipe, tokenizers[0]) or tokenizers[0], tokenizers[1]
        dev = build_store(data.dev, *sides, KEEP_ALL, data.invalid, cache_folder(data), progress=progress)
        return PreparedData(train, RowSubset(len(train)), dev, np.arange(len(dev)), noise, corpora, stream)
    rows: RowSubset | np.ndarray
    if data.block_size is not None:
        rows, dev_rows = hold_out_end(train, data.dev_size)
    else:
        seed = recipe.training.seed if data.dev_seed is None else data.dev_seed
        rows, dev_rows = split(len(train), _dev_size(data, len(train)), seed, train.groups())
    return PreparedData(train, rows, train, dev_rows, noise, corpora)


def _check_languages(corpora: Sequence[Corpus], source: Tokenizer) -> None:
    """Checks that the vocabulary, which may be that of another run, has a tag for every language."""
    for corpus in corpora:
        if corpus.language is not None and corpus.language not in source.languages:
            raise InputError(
                f"the source vocabulary has no tag for the language {corpus.language!r}",
                where=str(corpus.path or corpus.source),
                remedy=nearest(corpus.language, source.languages) if source.languages else "train without init",
            )


def _check_tags(store: Store, source: Tokenizer, chunk: int = 10_000) -> None:
    """Checks that every pair has as many labels as words."""
    starts = np.array(source.word_starts)
    for begin in range(0, len(store), chunk):
        rows = np.arange(begin, min(begin + chunk, len(store)))
        ids, lengths = store.token_ids("source", rows)
        ends = np.cumsum(lengths)
        words_before = np.concatenate(([0], np.cumsum(starts[ids])))
        words = words_before[ends] - words_before[ends - lengths]
        wrong = np.flatnonzero(words != store.lengths[rows, 1])
        if len(wrong):
            example = store.example(int(rows[wrong[0]]))
            raise InputError(
                f"{words[wrong[0]]} words but {store.lengths[rows[wrong[0]], 1]} labels",
                where=f"{example.file}:{example.line}",
                remedy="give every word of the source one label, with single spaces between them",
            )


def _dev_size(data: DataRecipe, pairs: int) -> int:
    """2 % of the pairs, 100 to 2,000, but at most a fifth of a small corpus."""
    if pairs < 2:
        raise InputError(
            f"{pairs} pair is too few to hold one out", remedy="give more pairs, or a development file: data.dev"
        )
    if data.dev_size is not None:
        return data.dev_size
    return max(1, min(2000, max(100, pairs // 50), pairs // 5))
