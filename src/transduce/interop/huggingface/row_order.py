"""Our tokenizer and weights in; their number for each of our ids out, and rows of tokens in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.tokenizers import NONE
from transduce.interop.huggingface.weights import OF_TOKENS

EMBEDDING = ".embedding.table.weight"


@dataclass(frozen=True)
class Order:
    """Their number for each of our ids; NONE where they have no such token."""

    numbers: tuple[int, ...]
    size: int  # rows there
    new_start: bool = False  # True: the token that outputs begin with has a row that it did not have before

    def theirs(self, ours: int) -> int:
        return self.numbers[ours]

    def special(self, ours: int) -> int | None:
        return None if self.numbers[ours] == NONE else self.numbers[ours]

    @property
    def _writers(self) -> list[int]:
        """Which of our ids each row is taken from. The start of outputs comes last but one where it shares its row:
        <pad>, which nobody reads, gives way to it; </s>, which is the same row, does not."""
        special = [UNK, PAD, BOS, EOS]
        return [*special, *range(len(SPECIALS), len(self.numbers))]

    def place(self, weight: Tensor, *, spoken: bool) -> Tensor:
        """V ... -> V' ...; `spoken`: what is said rather than read, and a start is never said."""
        result = weight.new_zeros(self.size, *weight.shape[1:])
        shared = self.numbers[BOS] in (self.numbers[PAD], self.numbers[EOS])
        for ours in self._writers:
            if self.numbers[ours] != NONE and not (spoken and ours == BOS and shared):
                result[self.numbers[ours]] = weight[ours]
        return result


def order_of(tokenizer: Tokenizer, weights: Mapping[str, Tensor]) -> Order:
    """Tokens that were imported get the numbers of their library back; ours keep the ones they have."""
    vocabulary = tokenizer.vocabulary
    if vocabulary.kind != GIVEN:
        return Order(tuple(range(tokenizer.size)), tokenizer.size)
    numbers = list(vocabulary.rows)
    after = max(numbers) + 1
    decodes = any(name.startswith("decoder.") for name in weights)
    apart = decodes and (numbers[BOS] == NONE or (numbers[BOS] == numbers[EOS] and _differ(weights)))
    if apart:
        numbers[BOS] = after
    taken = set(numbers)
    free = (number for number in range(2 * len(numbers)) if number not in taken)
    for ours in range(len(SPECIALS), len(numbers)):
        if numbers[ours] == NONE:  # a row without a piece
            numbers[ours] = next(free)
    return Order(tuple(numbers), max(numbers) + 1, new_start=apart)


def _differ(weights: Mapping[str, Tensor]) -> bool:
    """Whether the start of outputs, once a copy of </s>, has learned to be something else."""
    tables = [tensor for name, tensor in weights.items() if name.endswith(EMBEDDING)]
    return any(not torch.equal(table[BOS], table[EOS]) for table in tables)


def place_all(weights: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """Every weight with a row for each token in their order, the others as they are."""
    return {
        name: order.place(tensor, spoken=name.endswith("bias")) if name.endswith(OF_TOKENS) else tensor
        for name, tensor in weights.items()
    }
