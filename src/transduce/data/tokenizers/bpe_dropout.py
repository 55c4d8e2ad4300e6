"""The letters of a word and the learnt merges in, its pieces out, each merge left out with some probability."""

from __future__ import annotations

import heapq
import random

from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.flow import SPECIALS


class BPEDropout:
    """The merges of one BPE vocabulary, in the order they were learnt."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = enumerate(vocabulary.pieces)
        self._id_of = {piece: number for number, piece in pieces if number >= len(SPECIALS)}
        ids, merges = self._id_of, enumerate(vocabulary.merges)
        # Pair of ids -> (rank of the merge, id of the result).
        self._ranks = {(ids[left], ids[right]): (rank, ids[left + right]) for rank, (left, right) in merges}

    def __call__(self, part: str, rate: float, generator: random.Random) -> list[int]:
        tokens: list[int | None] = [self._id_of[letter] for letter in part]
        following = [*range(1, len(tokens)), -1]
        before = list(range(-1, len(tokens) - 1))
        queue: list[tuple[int, int, int, int]] = []  # rank, place, the pair: the best and leftmost comes first

        def offer(place: int) -> None:
            if place >= 0 and following[place] >= 0:
                pair = (tokens[place], tokens[following[place]])
                if pair in self._ranks:
                    heapq.heappush(queue, (self._ranks[pair][0], place, *pair))

        for place in range(len(tokens)):
            offer(place)
        left_out: list[tuple[int, int, int, int]] = []
        while queue:
            entry = heapq.heappop(queue)
            _, place, left, right = entry
            after = following[place]
            if tokens[place] != left or after < 0 or tokens[after] != right:
                continue  # a neighbour was merged meanwhile
            if rate and generator.random() < rate:
                left_out.append(entry)
                continue
            tokens[place], tokens[after] = self._ranks[left, right][1], None
            following[place] = following[after]
            if following[place] >= 0:
                before[following[place]] = place
            for skipped in left_out:  # a merge left out now may still come after another one
                heapq.heappush(queue, skipped)
            left_out.clear()
            offer(place)
            offer(before[place])
        return [token for token in tokens if token is not None]
