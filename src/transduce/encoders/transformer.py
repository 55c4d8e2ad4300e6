"""Source ids in, a memory out: every row has looked at every other, in each of several layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHead
from transduce.attention.normalisers import Softmax
from transduce.attention.positions import Sinusoidal
from transduce.attention.scores import ScaledDot
from transduce.contracts import Count, Encoder, Normaliser, Position, Rate, Score
from transduce.flow import Batch, Memory
from transduce.layers.dense import Activation, FeedForward
from transduce.layers.embedding import Embedding
from transduce.layers.residual import Place, Residual


class TransformerEncoder(Encoder):
    """self-attention and feed-forward blocks, all positions at once (Vaswani 2017)"""

    def __init__(
        self,
        embedding: Embedding,
        *,
        layers: Count = 3,
        width: Count = 256,
        heads: Count = 4,
        hidden: Count = 1024,
        activation: Activation = "relu",
        norm: Place = "before",
        position: type[Position] = Sinusoidal,
        score: type[Score] = ScaledDot,
        normaliser: type[Normaliser] = Softmax,
        dropout: Rate = 0.1,
        attention_dropout: Rate = 0.0,
        hidden_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.embedding = width, embedding
        self.position = position(width, heads, False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                MultiHead(width, width, heads, score, normaliser, attention_dropout),
                FeedForward(width, hidden, activation, hidden_dropout),
                Residual(width, norm, dropout),
                Residual(width, norm, dropout),
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if norm == "before" else nn.Identity()

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        mask = batch.source.mask
        places = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        values = self.dropout(self.position.add(self.embedding(batch.source.values), places))
        weights: list[Tensor] = []
        for block in self.blocks:
            values, seen = block(values, mask, self.position, places, with_attention)
            weights += [seen] if seen is not None else []
        values = self.norm(values)
        shown = mask[..., None]
        summary = (values * shown).sum(1) / shown.sum(1)  # the mean of the real rows
        return Memory(values, mask, summary, torch.stack(weights, 1) if weights else None)


class EncoderBlock(nn.Module):
    """x + self-attention(x), then x + feed-forward(x)"""

    def __init__(self, attention: MultiHead, feed_forward: FeedForward, first: Residual, second: Residual) -> None:
        super().__init__()
        self.attention, self.feed_forward, self.first, self.second = attention, feed_forward, first, second

    def forward(
        self, values: Tensor, mask: Tensor, position: Position, places: Tensor, with_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        weights: Tensor | None = None

        def look(rows: Tensor) -> Tensor:
            nonlocal weights
            query = position.turn(self.attention.split(self.attention.query(rows)), places)
            keys, content = self.attention.project(rows)
            keys, bias = position.turn(keys, places), position.bias(query, places, places)
            context, weights = self.attention(
                query, keys, content, mask[:, None, None], bias, with_attention=with_attention
            )
            result: Tensor = context
            return result

        values = self.second(self.first(values, look), self.feed_forward)
        return values, weights
