"""Ensembles: several models that search as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import Attention, Batch, Padded, State, Step
from transduce.model import Transducer

Combination = Literal["mean", "log_linear"]


class Ensemble(Transducer):
    """p(y_t | y_<t, x) of several models with the same tokens: the mean of their probabilities, or their geometric mean

    `log_linear` renormalises the mean of the log-probabilities. All members read the same hypotheses, so there is one
    search with one beam; each member keeps its own state.
    """

    def __init__(self, members: Sequence[Transducer], combination: Combination = "mean") -> None:
        super().__init__()
        self.members, self.combination = nn.ModuleList(members), combination
        self.capturable = all(member.capturable for member in members)

    def start(self, batch: Batch) -> State:
        return _joined([member.start(batch) for member in self._each()])

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        steps = [
            member.advance(tokens, own, mask, with_attention=with_attention)
            for member, own in zip(self._each(), _separate(state), strict=True)
        ]
        log_probs = torch.stack([step.logits.float().log_softmax(-1) for step in steps])  # M R T V
        if self.combination == "mean":
            logits = log_probs.logsumexp(0) - math.log(len(steps))
        else:
            logits = log_probs.mean(0).log_softmax(-1)
        return Step(logits, _joined([step.state for step in steps]), _mean_attention(steps) if with_attention else None)

    def reserve(self, state: State, more: int, beams: int) -> State:
        states = zip(self._each(), _separate(state), strict=True)
        return _joined([member.reserve(own, more, beams) for member, own in states])

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        raise InputError("an ensemble has no sentence embedding", remedy="embed with one of its runs")

    def _each(self) -> list[Transducer]:
        return list(self.members)  # type: ignore[arg-type]


def _joined(states: Sequence[State]) -> State:
    return State(
        {str(number): state.fixed for number, state in enumerate(states)},
        {str(number): state.past for number, state in enumerate(states)},
        states[0].beams,
    )


def _separate(state: State) -> list[State]:
    return [State(state.fixed[number], state.past[number], state.beams) for number in state.fixed]


def _mean_attention(steps: Sequence[Step]) -> Attention:
    """The mean over members, layers and heads (R 1 1 T S), where all members attend to the same rows."""
    weights = [
        step.attention.cross for step in steps if step.attention is not None and step.attention.cross is not None
    ]
    if len(weights) < len(steps) or len({one.size(-1) for one in weights}) > 1:
        return Attention()
    return Attention(torch.stack([one.float().mean((1, 2)) for one in weights]).mean(0)[:, None, None])


def check_members(tokens: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """All members must have the tokens of the first one, which are given as fingerprints of source and target."""
    for name, own in zip(names, tokens, strict=True):
        if own != tokens[0]:
            side = "source" if own[0] != tokens[0][0] else "target"
            raise InputError(
                f"the {side} tokens are not those of {names[0]}",
                where=name,
                remedy="the models of an ensemble are trained on the same data with the same `tokens`",
            )
