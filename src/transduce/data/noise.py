"""Noise for denoising objectives: token masking, text infilling, deletion, permutation."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Gt, Le

from transduce.contracts import Noise, NoisedText
from transduce.data.batching import Batches, DataPosition, TransformedBatches
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, UNK, Batch, Padded

Rate = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]
HELD_OUT = -1  # the epoch of held-out text: its noise is always the same, so losses are comparable


class TokenMasking(Noise):
    """BERT's masking: selected tokens are masked, replaced or left unchanged (Devlin et al. 2019)

    A share `rate` of the tokens is selected, at least one; with `whole_words` all tokens of a word or none. Of the
    selected tokens 80 % become <unk>, 10 % a random token, and 10 % are unchanged, so the model cannot know which
    inputs are correct. Only selected tokens count in the loss.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rate: Rate = 0.15,
        masked: Share = 0.8,
        replaced: Share = 0.1,
        whole_words: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        if masked + replaced > 1 + 1e-9:
            raise InputError(f"{masked:.0%} masked and {replaced:.0%} replaced exceed 100 %", where="data.noise")
        self.rate, self.masked, self.replaced, self.whole_words = rate, masked, replaced, whole_words
        self.first = len(SPECIALS) + tokenizer.oov_placeholders  # id of the first ordinary token

    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText:
        # Unknown tokens cannot be predicted, so they are never selected.
        groups = [group for group in self._groups(ids) if all(ids[position] >= self.first for position in group)]
        rng.shuffle(groups)
        count = max(1, math.floor(self.rate * len(ids) + rng.random()))  # the expected share, in short lines too
        chosen: set[int] = set()
        for group in groups:
            if len(chosen) >= count:
                break
            chosen.update(group)
        noised = [self._replacement(token, rng) if position in chosen else token for position, token in enumerate(ids)]
        return NoisedText(noised, [position in chosen for position in range(len(ids))])

    def _groups(self, ids: Sequence[int]) -> list[list[int]]:
        """Positions that are selected together."""
        groups: list[list[int]] = []
        for position, token in enumerate(ids):
            if groups and self.whole_words and not self.tokenizer.word_starts[token]:
                groups[-1].append(position)
            else:
                groups.append([position])
        return groups

    def _replacement(self, token: int, rng: random.Random) -> int:
        number = rng.random()
        if number < self.masked:
            return UNK
        return rng.randrange(self.first, self.tokenizer.size) if number < self.masked + self.replaced else token


class NoNoise(Noise):
    """no corruption: for heads that never see the token they predict; unknown tokens do not count in the loss"""

    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText:
        first = len(SPECIALS) + self.tokenizer.oov_placeholders
        return NoisedText(list(ids), [token >= first for token in ids])


class TextInfilling(Noise):
    """text infilling: one mask replaces a span of tokens, whose length must be predicted (Lewis et al. 2020)"""

    def __init__(
        self, tokenizer: Tokenizer, *, rate: Rate = 0.3, mean_length: Annotated[float, Gt(0), Le(100)] = 3.0
    ) -> None:
        super().__init__(tokenizer)
        self.rate, self.mean_length = rate, mean_length

    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText:
        return NoisedText(mask_spans(ids, rate=self.rate, mask=UNK, rng=rng, mean=self.mean_length))


class TokenDeletion(Noise):
    """token deletion: the positions of missing tokens must be predicted too (Lewis et al. 2020)"""

    def __init__(self, tokenizer: Tokenizer, *, rate: Rate = 0.15) -> None:
        super().__init__(tokenizer)
        self.rate = rate

    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText:
        return NoisedText(delete_tokens(ids, rate=self.rate, rng=rng))


class SentencePermutation(Noise):
    """sentence permutation; a token that ends with one of `sentence_ends` ends a sentence (Lewis et al. 2020)"""

    def __init__(self, tokenizer: Tokenizer, *, sentence_ends: str = ".!?;") -> None:
        super().__init__(tokenizer)
        pieces = map(tokenizer.piece, range(len(SPECIALS), tokenizer.size))
        self.ends = {
            number for number, piece in enumerate(pieces, len(SPECIALS)) if piece.endswith(tuple(sentence_ends))
        }

    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText:
        return NoisedText(permute_sentences(ids, ends=self.ends, rng=rng))


class NoisyBatches(TransformedBatches):
    """Batches of text whose source is the noised target, with new noise in every epoch."""

    def __init__(self, batches: Batches, noise: Noise, seed: int) -> None:
        super().__init__(batches)
        self.noise, self.seed = noise, seed

    def at(self, position: DataPosition) -> Batch:
        return add_noise(self.batches.at(position), self.noise, self.seed, position.epoch)


def add_noise(batch: Batch, noise: Noise, seed: int, epoch: int = HELD_OUT) -> Batch:
    """The batch with its noised target as the source. The noise of a row does not depend on other rows."""
    assert batch.target is not None, "noise needs a target"
    clean = [row[real][1:-1].tolist() for row, real in zip(batch.target.values, batch.target.mask, strict=True)]
    noised = [noise.apply(ids, seed, epoch, number) for ids, number in zip(clean, batch.rows, strict=True)]
    masks = [[0, *one.loss_mask, 0] for one in noised if one.loss_mask is not None]  # neither <s> nor </s> counts
    loss_mask = Padded.from_rows(masks) if masks else None
    return replace(
        batch,
        source=Padded.from_rows([[*one.ids, EOS] for one in noised]),
        loss_mask=None if loss_mask is None else Padded(loss_mask.values.bool(), loss_mask.mask),
    )


NOISES: dict[str, type[Noise]] = {
    "mask_tokens": TokenMasking,
    "mask_spans": TextInfilling,
    "delete": TokenDeletion,
    "permute": SentencePermutation,
    "nothing": NoNoise,
}


def delete_tokens(ids: Sequence[int], *, rate: float, rng: random.Random) -> list[int]:
    """Deletes each token with probability `rate`."""
    return [token for token in ids if rng.random() >= rate]


def mask_spans(ids: Sequence[int], *, rate: float, mask: int, rng: random.Random, mean: float = 3.0) -> list[int]:
    """Replaces a share `rate` of the tokens, in spans of Poisson(`mean`) tokens, each span by one `mask`.

    An empty span inserts a mask, as long as there are no more masks than removed tokens. Two masks are never adjacent.
    """
    removed = math.floor(rate * len(ids) + rng.random())
    spans = _span_lengths(removed, mean, rng)
    kept = len(ids) - removed
    starts = sorted(rng.sample(range(kept + 1), min(len(spans), kept + 1)))  # a span before the n-th kept token
    if len(spans) > len(starts):  # more spans than gaps between kept tokens: the last one absorbs the rest
        spans = [*spans[: len(starts) - 1], sum(spans[len(starts) - 1 :])]
    result: list[int] = []
    read, before = 0, 0
    for start, length in zip(starts, spans, strict=True):
        result += [*ids[read : read + start - before], mask]
        read, before = read + start - before + length, start
    return [*result, *ids[read:]]


def permute_sentences(ids: Sequence[int], *, ends: Collection[int], rng: random.Random) -> list[int]:
    """Shuffles sentences, each of which ends with one of the tokens `ends`."""
    sentences: list[list[int]] = [[]]
    for token in ids:
        sentences[-1].append(token)
        if token in ends:
            sentences.append([])
    rng.shuffle(sentences)
    return [token for sentence in sentences for token in sentence]


def _span_lengths(total: int, mean: float, rng: random.Random) -> list[int]:
    """Poisson samples that sum to `total`, at most `total` of them; the last one is cut to fit. `mean` is positive."""
    lengths: list[int] = []
    left = total
    while left:
        lengths.append(min(left, _poisson(mean, rng)))
        left -= lengths[-1]
    while len(lengths) > total:  # a text must not become longer than the position table
        lengths.remove(0)
    return lengths


def _poisson(mean: float, rng: random.Random) -> int:
    """A Poisson sample: the number of events until the product of uniform samples falls below exp(-mean) (Knuth)."""
    events, product, end = 0, rng.random(), math.exp(-mean)
    while product > end:
        events, product = events + 1, product * rng.random()
    return events
