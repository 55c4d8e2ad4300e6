"""Losses of sentence embeddings: contrastive with in-batch negatives, and graded similarity."""

from __future__ import annotations

from typing import Annotated, cast

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from transduce.contracts import Forward, Loss, Objective
from transduce.flow import SIMILARITY, Batch, Padded
from transduce.model import PairEmbeddings
from transduce.objectives.cross_entropy import Sharpness


class Contrastive(Objective):
    """InfoNCE with in-batch negatives: the other embeddings of the batch (van den Oord 2018)

    -log softmax_j(cos(a_i, b_j) / temperature) at j = i; `symmetric`: the mean of both directions. Every other row
    with another text is a negative, so unlike sums over tokens this loss changes when a batch is split.
    """

    uses_embeddings = True
    parts = ("right",)

    def __init__(self, *, temperature: Sharpness = 0.05, symmetric: bool = True) -> None:
        self.temperature, self.symmetric = temperature, symmetric

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        assert batch.source is not None, "contrastive training needs source and target"
        found = cast(PairEmbeddings, model(batch))
        cosines = F.normalize(found.source.float(), dim=-1) @ F.normalize(found.target.float(), dim=-1).T  # B B
        logits = cosines / self.temperature
        total = _info_nce(logits, batch.labels)
        if self.symmetric:
            total = (total + _info_nce(logits.T, batch.source)) / 2
        right = (logits.argmax(-1) == torch.arange(len(logits), device=logits.device)).sum()
        return Loss(total, {"right": right})

    def count(self, batch: Batch) -> int:
        return batch.size


def _info_nce(logits: Tensor, candidates: Padded) -> Tensor:
    """The sum of -log softmax at the positive. Candidates equal to the positive, of any modality, are not negatives."""
    rows = candidates.values.flatten(2) if candidates.ids is None else candidates.values[..., None]  # B S D
    padded = rows.where(candidates.mask[..., None], -1).flatten(1)
    number = torch.unique(padded, dim=0, return_inverse=True)[1]  # B: equal rows have equal numbers
    duplicates = number[:, None] == number  # B B
    duplicates.fill_diagonal_(False)
    positive = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits.masked_fill(duplicates, -torch.inf), positive, reduction="sum")


class GradedSimilarity(Objective):
    """Base of losses of gold similarities: a pair counts once, and `error` is |cos - gold / highest|."""

    uses_embeddings = True
    uses_similarities = True
    parts = ("error",)

    def __init__(self, *, highest: Annotated[float, Gt(0)] = 5.0) -> None:
        """`highest`: the gold similarity of equal sentences."""
        self.highest = highest

    def cosines(self, model: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cosine of each pair and its gold similarity (B)."""
        found = cast(PairEmbeddings, model(batch))
        gold = batch.extra[SIMILARITY].values.view(-1).float()
        return F.cosine_similarity(found.source.float(), found.target.float(), dim=-1), gold

    def loss(self, total: Tensor, cosines: Tensor, gold: Tensor) -> Loss:
        return Loss(total, {"error": (cosines - gold / self.highest).abs().sum().detach()})

    def count(self, batch: Batch) -> int:
        return batch.size


class CosineRegression(GradedSimilarity):
    """squared error of the cosine of a pair (Reimers & Gurevych 2019)

    (cos(a_i, b_i) - gold_i / highest)^2
    """

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        cosines, gold = self.cosines(model, batch)
        return self.loss((cosines - gold / self.highest).square().sum(), cosines, gold)


class CoSENT(GradedSimilarity):
    """ranking of the cosines of a batch by their gold similarities (CoSENT, Su 2022)

    log(1 + sum over gold_i > gold_j of exp(scale (cos_j - cos_i))), times B. Pairs are compared with the others of
    the batch, so unlike sums over pairs this loss changes when a batch is split.
    """

    def __init__(self, *, scale: Annotated[float, Gt(0)] = 20.0, highest: Annotated[float, Gt(0)] = 5.0) -> None:
        super().__init__(highest=highest)
        self.scale = scale

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        cosines, gold = self.cosines(model, batch)
        differences = self.scale * (cosines[None, :] - cosines[:, None])  # B B: cos_j - cos_i
        ordered = differences.masked_fill(gold[:, None] <= gold[None, :], -torch.inf)
        terms = torch.cat((ordered.new_zeros(1), ordered.flatten()))  # exp(0) is the 1 of the formula
        return self.loss(len(gold) * terms.logsumexp(0), cosines, gold)
