"""Clean ids and a source of chance enter; damaged ids leave, for a model that learns to restore what was there."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt, Le

from transduce.data.batching import Batches, DataPosition
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, UNK, Batch, Padded

Part = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]
HELD_OUT = -1  # the epoch of held-out text: its damage is always the same, so its loss can be compared


@dataclass(frozen=True)
class NoisedText:
    """What a model reads in place of the clean ids."""

    ids: list[int]
    asked: list[bool] | None = None  # one for each clean id: which of them it is asked for; None: all


class Noise(ABC):
    """How a text is damaged, never beyond its own length. Built as `Noise(tokenizer)`.

    <unk> stands for what is gone. No text of bytes, bpe or unigram has it, and in others it is rare.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText: ...

    def apply(self, ids: Sequence[int], seed: int, epoch: int, row: int) -> NoisedText:
        """The same damage for the same line in the same epoch, whatever else is in the batch."""
        return self(ids, random.Random(f"noise {seed} {epoch} {row}"))


class TokenMasking(Noise):
    """tokens to be found again, most of them masked, some replaced, some left as they are (Devlin 2019)

    A share `rate` of the tokens is chosen, at least one; with `whole_words` all tokens of a word or none. Of the
    chosen ones 80 % become <unk>, 10 % a random token, 10 % stay: the model cannot know which rows are right, so it
    must read them all. Only the chosen ones are asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rate: Part = 0.15,
        masked: Share = 0.8,
        replaced: Share = 0.1,
        whole_words: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        if masked + replaced > 1 + 1e-9:
            raise InputError(f"{masked:.0%} masked and {replaced:.0%} replaced are more than all", where="data.noise")
        self.rate, self.masked, self.replaced, self.whole_words = rate, masked, replaced, whole_words
        self.first = len(SPECIALS) + tokenizer.oov_placeholders  # of the tokens that a text can spell

    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText:
        # What the vocabulary does not know cannot be foretold, so it is never asked for.
        groups = [group for group in self._groups(ids) if all(ids[place] >= self.first for place in group)]
        chance.shuffle(groups)
        wanted = max(1, math.floor(self.rate * len(ids) + chance.random()))  # on average the share, in short lines too
        chosen: set[int] = set()
        for group in groups:
            if len(chosen) >= wanted:
                break
            chosen.update(group)
        damaged = [self._instead(token, chance) if place in chosen else token for place, token in enumerate(ids)]
        return NoisedText(damaged, [place in chosen for place in range(len(ids))])

    def _groups(self, ids: Sequence[int]) -> list[list[int]]:
        """Places that are chosen together."""
        groups: list[list[int]] = []
        for place, token in enumerate(ids):
            if groups and self.whole_words and not self.tokenizer.word_starts[token]:
                groups[-1].append(place)
            else:
                groups.append([place])
        return groups

    def _instead(self, token: int, chance: random.Random) -> int:
        draw = chance.random()
        if draw < self.masked:
            return UNK
        return chance.randrange(self.first, self.tokenizer.size) if draw < self.masked + self.replaced else token


class NoNoise(Noise):
    """no damage: for a head that never sees the token it foretells; what the vocabulary lacks is not asked for"""

    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText:
        first = len(SPECIALS) + self.tokenizer.oov_placeholders
        return NoisedText(list(ids), [token >= first for token in ids])


class TextInfilling(Noise):
    """stretches of tokens, each for one mask: the model must also find out how many are missing (Lewis 2020)"""

    def __init__(self, tokenizer: Tokenizer, *, rate: Part = 0.3, mean: Annotated[float, Gt(0), Le(100)] = 3.0) -> None:
        super().__init__(tokenizer)
        self.rate, self.mean = rate, mean

    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText:
        return NoisedText(mask_spans(ids, rate=self.rate, mask=UNK, chance=chance, mean=self.mean))


class TokenDeletion(Noise):
    """tokens left out: the model must also find out where (Lewis 2020)"""

    def __init__(self, tokenizer: Tokenizer, *, rate: Part = 0.15) -> None:
        super().__init__(tokenizer)
        self.rate = rate

    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText:
        return NoisedText(delete_tokens(ids, rate=self.rate, chance=chance))


class SentencePermutation(Noise):
    """parts of a line in another order; a part ends where a token ends in one of the characters `ends` (Lewis 2020)"""

    def __init__(self, tokenizer: Tokenizer, *, ends: str = ".!?;") -> None:
        super().__init__(tokenizer)
        pieces = map(tokenizer.piece, range(len(SPECIALS), tokenizer.size))
        self.ends = {number for number, piece in enumerate(pieces, len(SPECIALS)) if piece.endswith(tuple(ends))}

    def __call__(self, ids: Sequence[int], chance: random.Random) -> NoisedText:
        return NoisedText(permute_parts(ids, ends=self.ends, chance=chance))


class NoisyBatches:
    """Batches of text whose source is their own target, damaged anew in every epoch."""

    def __init__(self, clean: Batches, noise: Noise, seed: int) -> None:
        self.clean, self.noise, self.seed = clean, noise, seed

    def at(self, position: DataPosition) -> Batch:
        return add_noise(self.clean.at(position), self.noise, self.seed, position.epoch)

    def after(self, position: DataPosition) -> DataPosition:
        return self.clean.after(position)

    def batches_in(self, epoch: int) -> int:
        return self.clean.batches_in(epoch)

    def padding(self, epoch: int) -> float:
        return self.clean.padding(epoch)


def add_noise(batch: Batch, noise: Noise, seed: int, epoch: int = HELD_OUT) -> Batch:
    """The batch with its damaged target as the source. What happens to a line depends on no other one."""
    assert batch.target is not None, "there is nothing to damage"
    clean = [row[real][1:-1].tolist() for row, real in zip(batch.target.values, batch.target.mask, strict=True)]
    found = [noise.apply(ids, seed, epoch, number) for ids, number in zip(clean, batch.rows, strict=True)]
    asked = [[0, *one.asked, 0] for one in found if one.asked is not None]  # neither <s> nor </s> is asked for
    marks = Padded.from_rows(asked) if asked else None
    return replace(
        batch,
        source=Padded.from_rows([[*one.ids, EOS] for one in found]),
        loss_mask=None if marks is None else Padded(marks.values.bool(), marks.mask),
    )


NOISES: dict[str, type[Noise]] = {
    "mask_tokens": TokenMasking,
    "mask_spans": TextInfilling,
    "delete": TokenDeletion,
    "permute": SentencePermutation,
    "nothing": NoNoise,
}


def delete_tokens(ids: Sequence[int], *, rate: float, chance: random.Random) -> list[int]:
    """Each token is left out with probability `rate`."""
    return [token for token in ids if chance.random() >= rate]


def mask_spans(ids: Sequence[int], *, rate: float, mask: int, chance: random.Random, mean: float = 3.0) -> list[int]:
    """A share `rate` of the tokens goes, in spans of Poisson(`mean`) tokens, each span for one `mask`.

    A span of no token puts a mask between two, as long as there are no more masks than tokens gone. Two masks never
    stand side by side.
    """
    gone = math.floor(rate * len(ids) + chance.random())
    spans = _lengths(gone, mean, chance)
    kept = len(ids) - gone
    starts = sorted(chance.sample(range(kept + 1), min(len(spans), kept + 1)))  # a span before the n-th kept token
    if len(spans) > len(starts):  # more spans than places between the kept tokens: the last one is made longer
        spans = [*spans[: len(starts) - 1], sum(spans[len(starts) - 1 :])]
    result: list[int] = []
    read, before = 0, 0
    for start, length in zip(starts, spans, strict=True):
        result += [*ids[read : read + start - before], mask]
        read, before = read + start - before + length, start
    return [*result, *ids[read:]]


def permute_parts(ids: Sequence[int], *, ends: Collection[int], chance: random.Random) -> list[int]:
    """Parts (sentences, clauses), each closed by one of the tokens `ends`, in random order."""
    parts: list[list[int]] = [[]]
    for token in ids:
        parts[-1].append(token)
        if token in ends:
            parts.append([])
    chance.shuffle(parts)
    return [token for part in parts for token in part]


def _lengths(total: int, mean: float, chance: random.Random) -> list[int]:
    """Draws that add up to the total, no more of them than it is; the last one is cut to fit. The mean is above 0."""
    lengths: list[int] = []
    left = total
    while left:
        lengths.append(min(left, _poisson(mean, chance)))
        left -= lengths[-1]
    while len(lengths) > total:  # a text must not grow: positions end somewhere
        lengths.remove(0)
    return lengths


def _poisson(mean: float, chance: random.Random) -> int:
    """Events until the waiting times (exponential, a product of uniform draws) pass 1 (Knuth)."""
    events, product, end = 0, chance.random(), math.exp(-mean)
    while product > end:
        events, product = events + 1, product * chance.random()
    return events
