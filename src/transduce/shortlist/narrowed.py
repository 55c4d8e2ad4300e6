"""A network and the tokens that the lines of a batch may need in, the same network out, which speaks those alone.

What a line may not use has no chance: its scores are those of its own list, whatever lines stand beside it. A decoder
that can be asked about lists keeps its own ids. For any other an output layer is made of the rows that are needed, and
ids are places in the list of all lines; the special tokens come first in both, so they keep their numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from transduce.contracts import Asked, Lists
from transduce.errors import InputError
from transduce.flow import Batch, Hypothesis, Proposal, State, Step
from transduce.layers.embedding import Output
from transduce.layers.traits import attached
from transduce.model import Transducer
from transduce.precision.matrices import Packed

LARGE = 2.0**60  # beside which a bias vanishes: LARGE w + b = LARGE w
LINE = "line"  # in a state: the number of each source in the batch


class OutputRows:
    """The output layer of a network as plain rows, taken apart once: any choice of them is a layer again."""

    def __init__(self, network: Transducer) -> None:
        output = getattr(getattr(network, "decoder", None), "output", None)
        if not isinstance(output, Output):
            raise InputError(
                "a shortlist needs scores that are those of one output layer",
                remedy="leave it out: this model copies, listens to paths, or has no decoder",
            )
        self.network: Any = network  # of any kind that has a decoder with an output
        self.layer: nn.Module = output.layer
        self.weight, self.bias = _taken_apart(output.layer)
        self._blank = nn.Linear(self.weight.size(1), 1, device="meta")

    def chosen(self, ids: Tensor) -> nn.Module:
        """The layer with these rows alone, packed as it was."""
        chosen = copy.copy(self._blank)  # a new one would draw weights first
        chosen.out_features = len(ids)
        numbers = {"weight": self.weight[ids], "bias": self.bias[ids]}
        chosen._parameters = {name: nn.Parameter(one, requires_grad=False) for name, one in numbers.items()}
        return type(self.layer)(chosen) if isinstance(self.layer, Packed) else chosen

    def network_of(self, ids: Tensor) -> Transducer:
        """The network with such a layer in place of its own; all other parts are shared."""
        made: nn.Module = self.chosen(ids)
        decoder = self.network.decoder
        for part, name in ((decoder.output, "layer"), (decoder, "output"), (self.network, "decoder")):
            twin = copy.copy(part)
            twin._modules = {**part._modules, name: made}
            made = twin
        assert isinstance(made, Transducer)
        return made


def _taken_apart(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W (V D) and b (V) of what computes W x + b, whatever order it keeps them in: W is what it makes of unit vectors.

    Whole numbers of 8 bits come out as their scales times them, and are rounded to the same ones again.
    """
    if type(layer) is nn.Linear and not attached(layer):
        assert layer.bias is not None
        return layer.weight.detach(), layer.bias.detach()
    first = next(layer.parameters(), None)
    like = torch.zeros(0) if first is None else first
    width = int(layer.in_features)  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.no_grad():
        units = torch.eye(width, dtype=like.dtype, device=like.device) * LARGE
        bias = layer(torch.zeros_like(units[:1]))[0]
        return (layer(units).t() / LARGE).contiguous(), bias


class Narrowed(Transducer):
    """A network that speaks the tokens of a list, by their places in it."""

    def __init__(self, rows: OutputRows, allowed: Tensor) -> None:
        super().__init__()
        self.ids = allowed.any(0).nonzero().flatten().to(rows.weight.device)
        self.inner = rows.network_of(self.ids)
        several = len(allowed) > 1 and bool((allowed != allowed[:1]).any())
        # B V: where the lines of a batch have different lists
        self.forbidden = ~allowed.to(self.ids.device)[:, self.ids] if several else None

    def start(self, batch: Batch) -> State:
        return _numbered(self.inner.start(batch), batch)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.read(self.ids[tokens], state, mask, with_attention=with_attention)

    def read(self, named: Tensor, state: State, mask: Tensor | None, *, with_attention: bool) -> Step:
        """As `advance`, from ids of the whole vocabulary to scores by place."""
        step = self.inner.advance(named, state, mask, with_attention=with_attention)
        if self.forbidden is None:
            return step
        forbidden = self.forbidden[state.fixed[LINE]].repeat_interleave(state.beams, 0)[:, None]  # R 1 V
        return replace(step, logits=step.logits.masked_fill(forbidden, -torch.inf))

    @property
    def proposes(self) -> bool:
        """Where all lines have one list: the best of it are the best of each line."""
        return self.forbidden is None and self.inner.proposes

    def propose(self, tokens: Tensor, state: State, asked: Asked) -> Proposal:
        return self.inner.propose(self.ids[tokens], state, asked)

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.inner.reserve(state, more, beams)

    def places(self, tokens: Sequence[int]) -> list[int]:
        """Where those of the tokens stand that are in the list."""
        return [int(place) for token in tokens for place in (self.ids == token).nonzero().flatten()]

    def named(self, found: Hypothesis) -> Hypothesis:
        """The hypothesis in the ids of the whole vocabulary."""
        return replace(found, ids=tuple(self.ids[list(found.ids)].tolist()))


class Listed(Transducer):
    """A network that speaks the tokens of a list by their own ids, where its decoder can be asked about lists.

    The best next tokens come from each line's own list, and no other score is computed: nothing is made for a batch
    but the lists. Where a search asks for the scores of all tokens, a narrowed network gives those that there are.
    """

    def __init__(self, rows: OutputRows, allowed: Tensor) -> None:
        super().__init__()
        self.inner: Transducer = rows.network
        self._rows, self._allowed = rows, allowed
        lines, tokens = allowed.nonzero(as_tuple=True)
        self._tokens, self._begins = tokens.int(), torch.searchsorted(lines, torch.arange(len(allowed) + 1))

    @cached_property
    def narrowed(self) -> Narrowed:
        return Narrowed(self._rows, self._allowed)

    def start(self, batch: Batch) -> State:
        return _numbered(self.inner.start(batch), batch)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        few, size = self.narrowed, self._allowed.size(1)
        step = few.read(tokens, state, mask, with_attention=with_attention)
        every = step.logits.new_full((*step.logits.shape[:-1], size), -torch.inf)  # R T V
        return replace(step, logits=every.index_copy_(-1, few.ids, step.logits))

    @property
    def proposes(self) -> bool:
        return self.inner.proposes

    def propose(self, tokens: Tensor, state: State, asked: Asked) -> Proposal:
        lists = Lists(self._tokens, self._begins, state.fixed[LINE])
        return self.inner.propose(tokens, state, Asked(asked.count, asked.banned, asked.alive, lists))

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.inner.reserve(state, more, beams)

    def places(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def named(self, found: Hypothesis) -> Hypothesis:
        return found


def _numbered(state: State, batch: Batch) -> State:
    """With the number of each source in its batch: so a list leaves with its line."""
    return replace(state, fixed={**state.fixed, LINE: torch.arange(batch.size, device=batch.device)})


def narrow(rows: OutputRows, allowed: Tensor) -> Narrowed | Listed:
    """allowed (B V) -> a network over all that any line may use, in which each line has its own."""
    knows = rows.network.proposes and rows.network.decoder.lists
    return (Listed if knows else Narrowed)(rows, allowed)
