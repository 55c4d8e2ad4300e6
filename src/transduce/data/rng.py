"""Reproducible random numbers and permutations, independent of the numpy version."""

from __future__ import annotations

import hashlib

import numpy as np

CHUNK = 1 << 16  # numbers processed together; permutations up to this size are stored as an array
ROUNDS = 4


class SeededRandom:
    """Random numbers from the raw PCG64 stream, the only part of numpy's generators that is stable across versions."""

    def __init__(self, purpose: str, *seeds: int) -> None:
        # Hashed, since SeedSequence takes no negative seeds and cannot distinguish (7,) from (7, 0).
        digest = hashlib.sha256(repr((purpose, *seeds)).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def generator(self) -> np.random.Generator:
        """A numpy generator on the same stream, for numbers that need not be stable across versions."""
        return np.random.Generator(self._bits)

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1."""
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
    """A permutation of 0 .. n - 1 that is computed on demand, in constant memory.

    Rounds of x -> a x + c and x -> x ^ (x >> half) on integers of just enough bits; each step is invertible, so their
    composition is a permutation. Values of n or more are mapped again until they are below n (cycle walking). A short
    permutation is stored as an array: with few bits such rounds give too few different permutations.
    """

    def __init__(self, n: int, rng: SeededRandom) -> None:
        self._n, self._bits = n, max(n - 1, 1).bit_length()
        self._array = rng.permutation(n) if n <= CHUNK else None
        self._keys = [(rng.below(2**64) | 1, rng.below(2**64)) for _ in range(ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if self._array is not None:
            return self._array[indices]
        numbers = self._mix(indices.astype(np.uint64))
        while len(beyond := np.flatnonzero(numbers >= self._n)):
            numbers[beyond] = self._mix(numbers[beyond])
        return numbers.view(np.int64)

    def _mix(self, numbers: np.ndarray) -> np.ndarray:
        mask, half = np.uint64((1 << self._bits) - 1), np.uint64((self._bits + 1) // 2)
        for factor, constant in self._keys:
            numbers = (numbers * np.uint64(factor) + np.uint64(constant)) & mask
            numbers ^= numbers >> half
        return numbers
