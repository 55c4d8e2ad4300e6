"""Rows in, rows out: attention in several heads, over the rows themselves or over a memory."""

from __future__ import annotations

from torch import Tensor, nn

from transduce.attention.attend import Attend
from transduce.contracts import Normaliser, Score
from transduce.errors import InputError
from transduce.layers.dense import dense

START = 2**-0.5


class MultiHead(nn.Module):
    """concat_h(attend(W_q x, W_k m, W_v m)) W_o (Vaswani 2017)"""

    def __init__(
        self,
        width: int,
        memory_width: int,
        heads: int,
        score: type[Score],
        normaliser: type[Normaliser],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise InputError(
                f"a width of {width} cannot be divided into {heads} heads",
                remedy="choose heads that divide the width",
            )
        self.heads = heads
        # A smaller start for the three: on Multi30k the cross-attention of a post-norm model begins to look at the
        # source after 1,000 updates with it, after 1,500 without (development loss 2.5 and 2.4 there).
        self.query = dense(width, width, gain=START)
        self.key = dense(memory_width, width, gain=START)
        self.value = dense(memory_width, width, gain=START)
        self.output = dense(width, width)
        self.attend = Attend(score(width // heads, width // heads), normaliser(), dropout)

    def split(self, rows: Tensor) -> Tensor:
        """R T D -> R H T K"""
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory (B S D), computed once a source."""
        return self.attend.keys(self.split(self.key(memory))), self.split(self.value(memory))  # B H S K

    def forward(
        self,
        query: Tensor,  # R H T K: split(query(x)), turned by its positions where it has any
        keys: Tensor,  # R H S K
        values: Tensor,  # R H S K
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        context, weights = self.attend(query, keys, values, mask, bias, causal=causal, with_attention=with_attention)
        return self.output(context.transpose(1, 2).flatten(-2)), weights  # R T D, R H T S

    def read(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, with_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-attention of rows (R T D) to a memory with one row a source (B H S K).

        The beams of a source become further query rows, so that its keys and values are never copied.
        """
        shape = rows.shape
        sources = keys.size(0)
        query = self.split(self.query(rows.reshape(sources, -1, shape[-1])))  # B H N*T K
        context, weights = self(query, keys, values, mask[:, None, None], with_attention=with_attention)
        if weights is not None:
            beams = shape[0] // sources
            weights = weights.unflatten(2, (beams, shape[1])).transpose(1, 2).flatten(0, 1)  # R H T S
        return context.view(shape), weights
