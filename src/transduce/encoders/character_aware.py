"""Character-aware encoder: words composed from their pieces, and a recurrent network over the words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, Encoder, FrontEnd, Rate
from transduce.errors import InputError
from transduce.flow import SPECIALS, Batch, Memory, Padded
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, RecurrentStack

POSITIONS = 64  # of the pieces of a word that the hash tells apart
PRIME, MULTIPLIER = 0x100000001B3, 0x7F4A7C15  # of the hash: the first is that of FNV


class WordPieceEmbedding(FrontEnd):
    """[e_i ; E_hash(w)]: the vector of a piece, and that of the word w that it is a piece of

    The vector of a word is selected by a hash of the ids of its pieces (Bojanowski 2017).
    """

    word_starts: Tensor

    def __init__(self, pieces: FrontEnd, buckets: int, word_width: int) -> None:
        super().__init__()
        self.pieces, self.words = pieces, nn.Embedding(buckets, word_width)
        self.width = pieces.width + word_width
        nn.init.normal_(self.words.weight, std=0.1)
        # Which ids begin a word, set by `build_model`; empty: all.
        self.register_buffer("word_starts", torch.ones(0, dtype=torch.bool), persistent=False)

    def forward(self, source: Padded) -> Padded:
        assert source.ids is not None, "words are composed from the pieces of a text"
        rows = self.pieces.rows(source)
        vectors = self.words(self._buckets(source.ids, rows.mask))
        return Padded(torch.cat((rows.values, vectors), -1), rows.mask)  # B S E+D

    def word_index(self, ids: Tensor, mask: Tensor) -> Tensor:
        """B S: the number of the word of each piece, from 0; </s> is a word."""
        begins = self.word_starts[ids] if len(self.word_starts) else torch.ones_like(mask)
        begins = (begins | (ids < len(SPECIALS))) & mask
        return (begins.long().cumsum(1) - 1).clamp(min=0)

    def _buckets(self, ids: Tensor, mask: Tensor) -> Tensor:
        """B S: the bucket of the word of each piece."""
        index, rows = self.word_index(ids, mask), torch.arange(ids.size(1), device=ids.device).expand_as(ids)
        first = torch.full_like(ids, ids.size(1)).scatter_reduce(1, index, rows, "amin")
        place = (rows - first.gather(1, index)) % POSITIONS
        powers = torch.full((POSITIONS,), PRIME, device=ids.device).cumprod(0)  # integers wrap around
        hashes = torch.zeros_like(ids).scatter_add(1, index, (ids + 1) * powers[place] * mask)
        hashes = (hashes ^ (hashes >> 29)) * MULTIPLIER
        return ((hashes ^ (hashes >> 31)) % self.words.num_embeddings).gather(1, index)


class CharacterAwareEncoder(Encoder):
    """w = [max_i relu(W e_{i-k..i+k}) ; E_hash(w)], h = BiRNN(w): a row is the state of its word (Kim 2016)

    A convolution over the pieces of a word finds prefixes, suffixes and stems. `word_buckets` vectors stand for whole
    words; with `word_dropout` they are 0 at random, so that the spelling is learnt as well. The memory has a row for
    every piece.
    """

    capturable = True
    embedding: WordPieceEmbedding

    def __init__(
        self,
        embedding: FrontEnd,
        *,
        cell: Cell = "lstm",
        layers: Count = 1,
        width: Count = 256,
        embedding_width: Count | None = None,
        kernel: Count = 5,
        word_buckets: Count = 30_000,
        word_dropout: Rate = 0.2,
        dropout: Rate = 0.1,
    ) -> None:
        """`embedding_width`: of the pieces; by default the width of the encoder."""
        super().__init__()
        if kernel % 2 == 0:
            raise InputError(f"a kernel of {kernel} has no middle row", remedy="set an odd kernel")
        self.width, self.kernel, self.piece_width = width, kernel, embedding.width
        self.embedding = WordPieceEmbedding(embedding, word_buckets, width)
        self.word_dropout, self.dropout = word_dropout, Dropout(dropout)
        self.convolution = dense(kernel * embedding.width, width)
        self.rnn = RecurrentStack(2 * width, width, cell, layers, bidirectional=True, dropout=dropout)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        ids, source = batch.source.ids, self.embedding.rows(batch.source)
        assert ids is not None, "words are composed from the pieces of a text"
        mask, index = source.mask, self.embedding.word_index(ids, source.mask)
        pieces, vectors = source.values.split((self.piece_width, self.width), -1)
        # As many rows for words as for pieces, so that shapes do not depend on the values; the last ones are padding.
        real = torch.arange(mask.size(1), device=mask.device) <= index[:, -1:]  # B S
        words = torch.cat((self._spelling(pieces, mask, index), self._word_vectors(vectors, mask, index)), -1)
        values, state = self.rnn(self.dropout(words), self.rnn.zeros(len(mask), words), real, with_cells=False)
        rows = values.gather(1, index[..., None].expand(-1, -1, self.width))  # B S D
        return Memory(self.dropout(rows), mask, state[-1][0], tokens=ids)

    def _spelling(self, values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
        """B S D: the maximum over the pieces of a word of a convolution that does not leave the word."""
        half, length = self.kernel // 2, values.size(1)
        owner = F.pad(torch.where(mask, index, -1), (half, half), value=-1)
        padded = F.pad(values, (0, 0, half, half))
        windows = [
            padded[:, begin : begin + length] * (owner[:, begin : begin + length] == index)[..., None]
            for begin in range(self.kernel)
        ]
        features = torch.relu(self.convolution(self.dropout(torch.cat(windows, -1)))) * mask[..., None]
        return torch.zeros_like(features).scatter_reduce(1, index[..., None].expand_as(features), features, "amax")

    def _word_vectors(self, vectors: Tensor, mask: Tensor, index: Tensor) -> Tensor:
        """B S D: the vector of each word, which is the mean over its pieces."""
        real = mask[..., None].to(vectors)
        counts = torch.zeros_like(real).scatter_add(1, index[..., None], real)
        totals = torch.zeros_like(vectors).scatter_add(1, index[..., None].expand_as(vectors), vectors * real)
        means = totals / counts.clamp(min=1)
        if self.training and self.word_dropout:
            means = means * (torch.rand_like(counts) >= self.word_dropout)
        return means
