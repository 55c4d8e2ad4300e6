"""Heads of encoder-only models: classifier, tagger, masked and bidirectional LM, CBOW, CTC, embedding."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor, nn

from transduce.contracts import Count, Head, Rate
from transduce.errors import InputError
from transduce.flow import masked_mean
from transduce.layers.embedding import Embedding, Output, output_transform
from transduce.layers.feed_forward import Activation, dense

Pooling = Literal["first", "last", "mean", "max"]


def pool(values: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """B S D -> B D, without padding."""
    if how == "first":
        return values[:, 0]
    if how == "last":
        last = mask.sum(1) - 1
        return values[torch.arange(len(values), device=values.device), last]
    if how == "max":
        return values.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return masked_mean(values, mask)


HeadActivation = Literal["tanh", "relu", "gelu", "none"]
Epsilon = Annotated[float, Gt(0)]


def hidden_layer(width: int, activation: HeadActivation, norm_eps: float | None) -> list[nn.Module]:
    """f(W x + b), and its norm where there is an epsilon; empty for `none`."""
    if activation == "none":
        return []
    middle = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}[activation]()
    return [dense(width, width), middle, *([] if norm_eps is None else [nn.LayerNorm(width, norm_eps)])]


class Classifier(Head):
    """one label per source, from its pooled rows"""

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        pooling: Pooling = "mean",
        activation: HeadActivation = "tanh",
        norm_eps: Epsilon | None = None,
        dropout: Rate = 0.1,
    ) -> None:
        """`activation: none`: one linear layer, without a hidden layer. `norm_eps`: a norm after the hidden layer."""
        super().__init__()
        self.pooling: Pooling = pooling
        before = hidden_layer(width, activation, norm_eps)
        self.layers = nn.Sequential(nn.Dropout(dropout), *before, dense(width, labels))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.layers(pool(values, mask, self.pooling))
        return logits  # B V


class TokenHead(Head):
    """Logits of the labels of each row, independently."""

    def __init__(self, width: int, labels: int, *, dropout: Rate = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(dropout), dense(width, labels))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.layers(values)
        return logits  # B S V


class Tagger(TokenHead):
    """one label per word, from its first row"""

    label_unit = "word"

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        activation: HeadActivation = "none",
        norm_eps: Epsilon | None = None,
        dropout: Rate = 0.1,
    ) -> None:
        """`activation`: that of a hidden layer; none: there is no hidden layer. `norm_eps`: a norm after it."""
        super().__init__(width, labels, dropout=dropout)
        self.layers = nn.Sequential(self.layers[0], *hidden_layer(width, activation, norm_eps), self.layers[-1])


class MaskedLMHead(Head):
    """masked language model: the original token at each position (Devlin 2019)

    logits_t = W LayerNorm(f(W_1 h_t)) + b; with `model.tie: target`, W is the source embedding.
    """

    label_unit = "token"
    input_noise = "mask_tokens"

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        dropout: Rate = 0.1,
        norm_eps: Epsilon = 1e-5,
        activation: Activation = "gelu",
        output_width: Count | None = None,
    ) -> None:
        """`output_width`: the number of rows of W_1, as wide as a tied embedding; by default that of the encoder."""
        super().__init__()
        transform = output_transform(width, norm_eps, output_width=output_width, activation=activation)
        self.layers = nn.Sequential(nn.Dropout(dropout), *transform)
        self.output = Output(output_width or width, labels)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layers(values))
        return logits  # B S V

    def tie(self, embedding: Embedding) -> None:
        if self.output.projection.in_features != embedding.width:
            raise InputError(
                f"a tied output is as wide as the embedding, {embedding.width}",
                remedy=f"set head.output_width: {embedding.width}, or tie: none",
            )
        self.output.projection.weight = embedding.weight


class BiLMHead(Head):
    """bidirectional language model: each token from its left and its right context (Peters 2018)

    p(x_t | others) = softmax(W_f forward_{t-1} + W_b backward_{t+1} + b): the two predictions are multiplied and
    normalised, so one distribution over tokens leaves, as from every head. The paper adds the losses of the two
    directions; there each must predict the token alone, here they share the work.
    """

    label_unit = "token"
    input_noise = "nothing"
    needs_separate_directions = True

    def __init__(self, width: int, labels: int, *, dropout: Rate = 0.1) -> None:
        super().__init__()
        self.middle, self.dropout = width // 2, nn.Dropout(dropout)
        self.begin = nn.Parameter(torch.zeros(self.middle))
        self.output = Output(width, labels)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        shown = values * mask[..., None]
        first = self.begin.expand(len(values), 1, -1)
        before = torch.cat((first, shown[:, :-1, : self.middle]), 1)
        # There is no right context after </s>, the last row, and it has no label.
        after = torch.cat((shown[:, 1:, self.middle :], torch.zeros_like(shown[:, :1, self.middle :])), 1)
        logits: Tensor = self.output(self.dropout(torch.cat((before, after), -1)))
        return logits  # B S V


class CBOWHead(Head):
    """continuous bag of words: each token from the mean of the vectors around it (Mikolov 2013)

    logits_t = V mean of u_{t+o}, 0 < |o| <= window. With cross-entropy this is CBOW; the objective `skip_gram` trains
    u and V on single neighbours.
    """

    label_unit = "token"
    input_noise = "nothing"
    needs_independent_rows = True

    def __init__(self, width: int, labels: int, *, window: Count = 5) -> None:
        super().__init__()
        self.window, self.output = window, nn.Linear(width, labels, bias=False)
        nn.init.normal_(self.output.weight, std=width**-0.5)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        shown = values * mask[..., None]
        rows = torch.arange(values.size(1), device=values.device)
        near = ((rows[:, None] - rows).abs() <= self.window) & (rows[:, None] != rows)  # S S
        weights = (near & mask[:, None]).to(shown)  # B S S
        logits: Tensor = self.output(weights @ shown / weights.sum(-1, keepdim=True).clamp(min=1))
        return logits  # B S V


class CTCHead(TokenHead):
    """the token or blank of each row; the paths of a text are summed (CTC, Graves 2006)"""

    label_unit = "path"


class EmbeddingHead(Head):
    """one vector per source, from its pooled rows: close where meanings are close"""

    is_embedding = True

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        pooling: Pooling = "mean",
        projection: Count | None = None,
        normalise: bool = True,
    ) -> None:
        """`projection`: the width of the vector; by default that of the encoder. `labels` is not used."""
        super().__init__()
        self.pooling: Pooling = pooling
        self.normalise = normalise
        self.projection = nn.Identity() if projection is None else dense(width, projection)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        vectors: Tensor = self.projection(pool(values, mask, self.pooling))
        return F.normalize(vectors, dim=-1) if self.normalise else vectors  # B D


HEADS: dict[str, type[Head]] = {
    "classifier": Classifier,
    "tagger": Tagger,
    "mlm": MaskedLMHead,
    "bilm": BiLMHead,
    "cbow": CBOWHead,
    "ctc": CTCHead,
    "embedder": EmbeddingHead,
}
