"""A purpose and numbers in, random numbers and orders out: the same in every version of numpy, at every visit."""

from __future__ import annotations

import hashlib

import numpy as np

CHUNK = 1 << 16  # numbers that are looked at together; orders of no more are kept as a list
ROUNDS = 4


class SeededRandom:
    """Random numbers that are the same in every version of numpy: only the raw stream is promised to stay."""

    def __init__(self, purpose: str, *numbers: int) -> None:
        # Hashed, since SeedSequence takes no negative seeds and cannot tell (7,) from (7, 0).
        digest = hashlib.sha256(repr((purpose, *numbers)).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def generator(self) -> np.random.Generator:
        """Any numbers from the same stream, for those who do not need them to outlive a version."""
        return np.random.Generator(self._bits)

    def below(self, n: int) -> int:
        return int(self._bits.random_raw()) % n

    def permutation(self, n: int) -> np.ndarray:
        # The row number in the low bits makes every key unique, and sorting values is faster than sorting indices.
        bits = np.uint64(max(n - 1, 1).bit_length())
        keys: np.ndarray = self._bits.random_raw(n)
        keys >>= bits
        keys <<= bits
        keys |= np.arange(n, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.view(np.int64)


class RandomPermutation:
    """0 .. n - 1 in a random order that is computed, not kept: the number at any place, in constant memory.

    Rounds of x -> a x + c, x -> x ^ (x >> half) in whole numbers of just enough bits, each of which can be undone, so
    together they are a permutation. Numbers beyond n go round again, until they are below it. A short order is drawn
    and kept: of few bits such rounds make too few different orders.
    """

    def __init__(self, n: int, draw: SeededRandom) -> None:
        self._n, self._bits = n, max(n - 1, 1).bit_length()
        self._list = draw.permutation(n) if n <= CHUNK else None
        self._keys = [(draw.below(2**64) | 1, draw.below(2**64)) for _ in range(ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        if self._list is not None:
            return self._list[places]
        numbers = self._mix(places.astype(np.uint64))
        while len(beyond := np.flatnonzero(numbers >= self._n)):
            numbers[beyond] = self._mix(numbers[beyond])
        return numbers.view(np.int64)

    def _mix(self, numbers: np.ndarray) -> np.ndarray:
        mask, half = np.uint64((1 << self._bits) - 1), np.uint64((self._bits + 1) // 2)
        for factor, added in self._keys:
            numbers = (numbers * np.uint64(factor) + np.uint64(added)) & mask
            numbers ^= numbers >> half
        return numbers
