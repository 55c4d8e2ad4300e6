"""Language-model objectives: truncated backpropagation through time, one sequence, skip-gram."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from transduce.contracts import Count, Forward, Loss, Objective, Rate
from transduce.errors import InputError
from transduce.flow import SPECIALS, Batch, Padded, State, map_tensors
from transduce.heads import CBOWHead
from transduce.model import DecoderOnly, EncoderOnly, Transducer
from transduce.objectives.cross_entropy import cross_entropy, likelihood, log_probabilities


class TruncatedBPTT(Objective):
    """cross-entropy over windows; the state is carried over, the gradient is truncated (Williams & Peng 1990)

    The loss is that of plain cross-entropy for any window. The gradient of a token does not pass beyond its window:
    truncated backpropagation through time, with the state carried over (Mikolov 2010). `State.fixed`, the memory of a
    source, is read by every window, and its gradient is not truncated.
    """

    capturable = True

    def __init__(self, *, window: Count = 64, label_smoothing: Rate = 0.0) -> None:
        self.window, self.label_smoothing = window, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        network = cast(Transducer, model)
        inputs, gold = batch.decoder_inputs, batch.labels
        state = network.start(batch)
        total = nll = torch.zeros((), device=batch.device)
        for begin in range(0, inputs.values.size(1), self.window):
            now = slice(begin, begin + self.window)
            step = network.advance(inputs.values[:, now], state)
            labels = Padded(gold.values[:, now], gold.mask[:, now])
            found = cross_entropy(step.logits, labels, self.label_smoothing)
            total, nll = total + found.smoothed, nll + found.nll
            state = cut(step.state)
        return Loss(total, {"nll": nll})


def cut(state: State) -> State:
    """The same state, detached."""
    return replace(state, past={name: map_tensors(lambda x: x.detach(), tree) for name, tree in state.past.items()})


class PrefixLM(Objective):
    """cross-entropy of source and target as one sequence, for decoder-only models

    The stream is x </s> <s> y </s>. Cross-entropy, the default, predicts y </s> only; this objective predicts every
    token after the first, so it learns p(x) too, as in Dai & Le 2015. Inputs and outputs stay the same.
    """

    def __init__(self, *, label_smoothing: Rate = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not isinstance(model, DecoderOnly):
            raise InputError(
                "only a decoder-only model has source and target in one sequence",
                remedy="leave model.encoder out, or set training.objective: {kind: cross_entropy}",
            )

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        whole = joined(batch)
        found = likelihood(log_probabilities(model(whole).logits), whole.labels, self.label_smoothing)
        return Loss(found.smoothed, {"nll": found.nll.detach()})

    def count(self, batch: Batch) -> int:
        return int(joined(batch).labels.mask.sum())


def joined(batch: Batch) -> Batch:
    """The pairs as single sequences x </s> <s> y </s>, right-padded."""
    if batch.source is None:
        return batch
    assert batch.target is not None
    values = torch.cat((batch.source.values, batch.target.values), 1)
    mask = torch.cat((batch.source.mask, batch.target.mask), 1)
    real = mask.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    longest = int(mask.sum(1).max())
    values, mask = values.gather(1, real.indices)[:, :longest], real.values.bool()[:, :longest]
    return Batch(target=Padded(values, mask), rows=batch.rows)


class SkipGram(Objective):
    """word vectors u and context vectors v by skip-gram with negative sampling (Mikolov 2013)

    sum over neighbours c of t of w_c [log s(u_t . v_c) + sum_k log s(-u_t . v_k)], s the logistic function. A neighbour
    at distance o has w = (window - o + 1) / window: the probability that a random window up to `window` reaches it.
    The negatives k are drawn from the words of the batch, by their count to the power `power`; the neighbours of a
    word share them. v are the weights of the head `cbow`, whose own prediction is that of the mean of the neighbours.
    """

    parts = ("positive",)

    def __init__(
        self, *, window: Count = 5, negatives: Count = 5, power: Annotated[float, Ge(0), Le(1)] = 0.75
    ) -> None:
        self.window, self.negatives, self.power = window, negatives, power

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not isinstance(model, EncoderOnly) or not isinstance(model.head, CBOWHead):
            raise InputError(
                "skip_gram trains the vectors of words alone",
                remedy="set model: {encoder: {kind: identity}, head: {kind: cbow}}",
            )

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        network = cast(EncoderOnly, model)
        assert batch.source is not None, "skip_gram reads the source of a batch"
        ids, words = batch.source.values, _words(batch)
        vectors = network.encoder(batch).values.float()  # B S D
        contexts = cast(CBOWHead, network.head).output.weight.float()  # V D
        positive, pairs = _positive_pairs(vectors, F.embedding(ids, contexts), words, self.window)
        drawn = self.draw(ids, words)
        scores = torch.einsum("bsd,bskd->bsk", vectors, F.embedding(drawn, contexts))
        negative = (F.logsigmoid(-scores).sum(-1) * pairs).sum()
        return Loss(-positive - negative, {"positive": -positive.detach()})

    def draw(self, ids: Tensor, words: Tensor) -> Tensor:
        """Negatives of each token: B S K."""
        counts = torch.zeros(int(ids.max()) + 1, device=ids.device)
        counts.index_put_((ids.flatten(),), words.flatten().float(), accumulate=True)
        odds = counts.pow(self.power) * (counts > 0)
        drawn = torch.multinomial(odds if odds.any() else odds + 1, ids.numel() * self.negatives, replacement=True)
        return drawn.view(*ids.shape, self.negatives)

    def count(self, batch: Batch) -> int:
        return int(_words(batch).sum())


def _words(batch: Batch) -> Tensor:
    """B S: the tokens that are words, without special tokens."""
    assert batch.source is not None
    return batch.source.mask & (batch.source.values >= len(SPECIALS))


def _positive_pairs(vectors: Tensor, contexts: Tensor, words: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The weighted sum of log s(u . v) over all pairs of neighbours, and the weighted number of pairs of each token."""
    total, pairs = vectors.new_zeros(()), torch.zeros(words.shape, device=words.device)
    for distance in range(1, min(window, words.size(1) - 1) + 1):
        weight = (window - distance + 1) / window
        both = words[:, distance:] & words[:, :-distance]
        left, right = slice(None, -distance), slice(distance, None)
        for centre, neighbour in ((left, right), (right, left)):
            scores = (vectors[:, centre] * contexts[:, neighbour]).sum(-1)
            total = total + weight * (F.logsigmoid(scores) * both).sum()
            pairs[:, centre] += weight * both
    return total, pairs
