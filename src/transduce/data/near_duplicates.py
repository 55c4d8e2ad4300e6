"""Near duplicates: MinHash signatures of character n-grams, and locality-sensitive hashing (Broder 1997).

The Jaccard similarity of two texts is |A & B| / |A | B| for the sets A, B of their character n-grams. The smallest
value of a random hash function over A equals that over B with this probability, so the share of equal values among many
functions estimates it. Texts with equal values in one band of functions are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

NGRAM = 5  # characters
HASHES, BANDS = 64, 16  # hash functions; bands of 4: of pairs with a similarity of 0.8, 99.98 % share a band
TILE = 1 << 15  # n-grams or rows at a time: their hashes stay in the cache of the processor
_RNG = np.random.Generator(np.random.PCG64(2026))
_XOR = _RNG.integers(0, 1 << 32, HASHES, np.uint32)
_FACTOR = _RNG.integers(0, 1 << 31, HASHES, np.uint32) * np.uint32(2) + np.uint32(1)


def character_windows(texts: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint32) of the character n-grams of all texts, end to end, and where each text begins.

    An n-gram ends at each character of a text; before the text it has NUL characters. An empty text has one n-gram.
    """
    padding = "\0" * (size - 1)
    codes = np.frombuffer("".join(padding + (text or "\0") for text in texts).encode("utf-32-le"), "<u4")
    hashed = codes[size - 1 :].astype(np.uint64)
    for back in range(1, size):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + codes[size - 1 - back : len(codes) - back]
    hashed ^= hashed >> np.uint64(29)
    hashed = (hashed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(32)
    lengths = np.fromiter((len(text) or 1 for text in texts), np.int64, len(texts))
    begins = np.cumsum(lengths) - lengths
    places = np.repeat(np.arange(len(texts)) * (size - 1), lengths) + np.arange(lengths.sum())
    return hashed[places].astype(np.uint32), begins


def signatures(texts: Sequence[str]) -> np.ndarray:
    """(n, HASHES) uint32: the MinHash signature of each text, without regard to case and white space."""
    plain = [" ".join(text.lower().split()) for text in texts]
    found = np.empty((len(plain), HASHES), np.uint32)
    if not plain:
        return found
    ngrams, begins = character_windows(plain, NGRAM)
    edges = [*np.unique(np.searchsorted(begins, np.arange(0, len(ngrams), TILE))), len(plain)]
    for first, last in pairwise(edges):
        if first == last:
            continue
        begin, end = begins[first], begins[last] if last < len(plain) else len(ngrams)
        tile, own = ngrams[begin:end], begins[first:last] - begin
        for number in range(HASHES):
            values = (tile ^ _XOR[number]) * _FACTOR[number]
            found[first:last, number] = np.minimum.reduceat(values, own)
    return found


def similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The estimated Jaccard similarity of signatures, row by row."""
    return (first == second).mean(-1)


def near_duplicates(signed: np.ndarray, threshold: float) -> np.ndarray:
    """(n) bool: the rows whose estimated similarity with an earlier row is at least the threshold.

    In each band, a row is compared with the first row that has the same values. The result is a function of the rows
    and their order alone. Memory: 40 bytes a row; `signed` may be a file that is mapped.
    """
    found = np.zeros(len(signed), bool)
    width = HASHES // BANDS
    for band in range(BANDS):
        keys = _band_keys(signed[:, band * width : (band + 1) * width])
        firsts = first_rows(keys)
        candidates = np.flatnonzero((firsts < np.arange(len(signed))) & ~found)
        for begin in range(0, len(candidates), TILE):
            rows = candidates[begin : begin + TILE]
            found[rows] = similarity(signed[rows], signed[firsts[rows]]) >= threshold
    return found


def _band_keys(values: np.ndarray) -> np.ndarray:
    """One number for the values of a band."""
    keys = np.zeros(len(values), np.uint64)
    for begin in range(0, len(values), TILE):
        part = values[begin : begin + TILE].astype(np.uint64)
        for column in part.T:
            keys[begin : begin + TILE] = (keys[begin : begin + TILE] ^ column) * np.uint64(0x9E3779B97F4A7C15)
            keys[begin : begin + TILE] ^= keys[begin : begin + TILE] >> np.uint64(32)
    return keys


def first_rows(keys: np.ndarray) -> np.ndarray:
    """(n): the first row with the same key. Keys are numbers, or bytes of one length."""
    order = np.argsort(keys, kind="stable")
    begins = np.ones(len(keys), bool)
    begins[1:] = keys[order[1:]] != keys[order[:-1]]
    groups = np.cumsum(begins) - 1
    found = np.empty(len(keys), np.int64)
    found[order] = order[np.flatnonzero(begins)[groups]]
    return found
