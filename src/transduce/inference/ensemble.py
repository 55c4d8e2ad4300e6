"""Ensembles: several models that search as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import Attention, Batch, Padded, State, Step
from transduce.inference.model import Model
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.modalities.source_encoding import EnsembleSourceEncoding, SourceEncoding, member_batch
from transduce.model import EmbeddingModel, Transducer

Combination = Literal["mean", "log_linear"]
COMBINATIONS = ("mean", "log_linear")


class Ensemble(Transducer):
    """p(y_t | y_<t, x) of several models with the same target tokens: a weighted mean of their probabilities

    `mean` is the arithmetic mean; `log_linear` is the geometric mean, renormalised. All members read the same
    hypotheses, so there is one search with one beam; each member keeps its own state. `reads` gives the source encoding
    of each member, where a batch has several (see `EnsembleSourceEncoding`); None: all members read the batch itself.
    """

    weights: Tensor

    def __init__(
        self,
        members: Sequence[Transducer],
        combination: Combination = "mean",
        *,
        weights: Sequence[float] | None = None,  # None: equal ones
        reads: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.members, self.combination, self.reads = nn.ModuleList(members), combination, reads
        shares = torch.tensor([1.0] * len(members) if weights is None else weights, dtype=torch.float64)
        shares = (shares / shares.sum()).float().to(next(members[0].parameters()).device)
        self.register_buffer("weights", shares, persistent=False)  # M: they sum to 1
        self.capturable = all(member.capturable for member in members)

    @property
    def encoder(self) -> nn.Module | None:
        """The encoder of the first member, whose source the explanations label."""
        return getattr(self.members[0], "encoder", None)

    def start(self, batch: Batch) -> State:
        if self.reads is None:
            return _joined([member.start(batch) for member in self._each()])
        read = zip(self._each(), self.reads, strict=True)
        return _joined([member.start(member_batch(batch, number)) for member, number in read])

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        steps = [
            member.advance(tokens, own, mask, with_attention=with_attention)
            for member, own in zip(self._each(), _separate(state), strict=True)
        ]
        log_probs = torch.stack([step.logits.float().log_softmax(-1) for step in steps])  # M R T V
        weights = self.weights[:, None, None, None]
        if self.combination == "mean":
            logits = (log_probs + weights.log()).logsumexp(0)
        else:
            logits = (log_probs * weights).sum(0).log_softmax(-1)
        attention = self._attention(steps) if with_attention else None
        return Step(logits, _joined([step.state for step in steps]), attention)

    def reserve(self, state: State, more: int, beams: int) -> State:
        states = zip(self._each(), _separate(state), strict=True)
        return _joined([member.reserve(own, more, beams) for member, own in states])

    def memory_mask(self, state: State) -> Tensor | None:
        return self._each()[0].memory_mask(_separate(state)[0])

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        raise InputError("an ensemble has no sentence embedding", remedy="embed with one of its runs")

    def _each(self) -> list[Transducer]:
        return list(self.members)  # type: ignore[arg-type]

    def _attention(self, steps: Sequence[Step]) -> Attention:
        """The mean over the layers, heads and members (R 1 1 T S) of all members that read the source of the first."""
        reads = self.reads or [0] * len(steps)
        alike = [number for number, read in enumerate(reads) if read == reads[0]]
        weights = [(number, _cross(steps[number])) for number in alike]
        found = [(self.weights[number], one) for number, one in weights if one is not None]
        if len(found) < len(alike) or len({one.size(-1) for _, one in found}) > 1:
            return Attention()
        total = torch.stack([share * one.float().mean((1, 2)) for share, one in found]).sum(0)
        return Attention((total / torch.stack([share for share, _ in found]).sum())[:, None, None])


def _cross(step: Step) -> Tensor | None:
    return None if step.attention is None else step.attention.cross


def _joined(states: Sequence[State]) -> State:
    return State(
        {str(number): state.fixed for number, state in enumerate(states)},
        {str(number): state.past for number, state in enumerate(states)},
        states[0].beams,
    )


def _separate(state: State) -> list[State]:
    return [State(state.fixed[number], state.past[number], state.beams) for number in state.fixed]


def build_ensemble(
    models: Sequence[Model], names: Sequence[str], combination: Combination, weights: Sequence[float] | None
) -> Model:
    """Several loaded models as one. Settings are those of the first; each member reads the source with its own tokens.

    `names` are the runs, for messages.
    """
    _check_options(combination, weights, len(models))
    _check_members(models, names)
    readers: dict[str, SourceEncoding] = {}
    keys = [_reader_key(model) for model in models]
    for key, model in zip(keys, models, strict=True):
        readers.setdefault(key, model.source_encoding)
    several = len(readers) > 1
    reads = [list(readers).index(key) for key in keys] if several else None
    network = Ensemble([model.network for model in models], combination, weights=weights, reads=reads)
    first = models[0]
    return Model(
        network,
        first.source,
        first.target,
        first.recipe,
        parameters=sum(model.parameters for model in models),
        graphs=SearchGraphs() if next(network.parameters()).is_cuda else None,
        source_encoding=EnsembleSourceEncoding(list(readers.values())) if several else None,
    )


def _reader_key(model: Model) -> str:
    """Equal for models that make the same batch of a source."""
    data = model.recipe.data
    columns = max((corpus.source_parts for corpus in data.train), default=1)
    return repr((model.source.fingerprint, data.sources, data.noise is not None, model.source.separates(columns)))


def _check_options(combination: str, weights: Sequence[float] | None, members: int) -> None:
    if combination not in COMBINATIONS:
        raise InputError(
            f"unknown combination {combination!r}", where="--combination", remedy=f"one of {', '.join(COMBINATIONS)}"
        )
    if weights is None:
        return
    if len(weights) != members:
        raise InputError(
            f"{len(weights)} weights for {members} runs", where="--weights", remedy="give one number per run: 1,1,2"
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise InputError(
            f"weights must be positive: {list(weights)}", where="--weights", remedy="leave out a run that has no weight"
        )


def _check_members(models: Sequence[Model], names: Sequence[str]) -> None:
    """All members generate the tokens of the first one, from the same kind of input."""
    first = models[0]
    for name, model in zip(names, models, strict=True):
        if isinstance(model.network, EmbeddingModel):
            raise InputError("sentence embeddings have no ensemble", where=name, remedy="give models that generate")
        if model.sourceless != first.sourceless:
            raise InputError(
                f"{_kind(model)}, but {names[0]} is {_kind(first)}", where=name, remedy="combine runs of the same task"
            )
        if model.target.fingerprint != first.target.fingerprint:
            raise InputError(
                f"its target vocabulary ({_vocabulary(model)}) is not that of {names[0]} ({_vocabulary(first)})",
                where=name,
                remedy="the models of an ensemble generate the same tokens: train them on the same targets with the "
                "same `tokens.target`; their sources may have different tokens",
            )


def _kind(model: Model) -> str:
    return "a language model" if model.sourceless else "a model that reads a source"


def _vocabulary(model: Model) -> str:
    return f"{model.target.size:,} {model.target.kind}"
