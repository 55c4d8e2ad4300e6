"""Pointer-generator copying of source words."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Decoder, Normaliser
from transduce.errors import InputError
from transduce.flow import Memory, State, Step
from transduce.layers.feed_forward import dense

SMALLEST = 1e-30  # keeps the logarithm finite for tokens that are not in the source


class PointerGeneratorDecoder(Decoder):
    """p(w) = g p_vocabulary(w) + (1 - g) sum of a_s where x_s = w, g = sigmoid(v . h + b) (See 2017)

    a is the cross-attention of one layer: one head, or the mean of all heads. The paper computes the gate from state,
    context and input; here it is computed from h, the input of the output layer, which depends on all three in every
    decoder. Source and target share one vocabulary.

    With `source`, only the rows of that one of several sources are copied. The weight of the other rows generates:
    p(w) = (g + (1 - g) a_others) p_vocabulary(w) + (1 - g) sum of a_s over the rows s of that source where x_s = w.
    """

    def __init__(
        self, decoder: Decoder, width: int, *, layer: int = -1, head: int | None = None, source: int | None = None
    ) -> None:
        """`source`: the number of the source to copy from; None: all."""
        super().__init__()
        layers, heads = decoder.attention_shape
        if not layers:
            raise InputError(
                "copy needs a decoder that attends to the source",
                remedy="give a recurrent decoder context: bahdanau or luong, or take another decoder",
            )
        if not -layers <= layer < layers or (head is not None and not -heads <= head < heads):
            raise InputError(
                f"copy.layer {layer}, head {head}: the decoder attends in {layers} layers of {heads} heads",
                remedy="leave them out: the mean of all heads of the last layer",
            )
        if any(isinstance(part, Normaliser) and part.stochastic for part in decoder.modules()):
            raise InputError(
                "copying trains the attention weights, and sampled attention is trained by reinforce alone",
                remedy="choose another normaliser: softmax, or gumbel to sample",
            )
        self.decoder, self.layer, self.head, self.source = decoder, layer, head, source
        self.gate = dense(width, 1)

    @property
    def attention_shape(self) -> tuple[int, int]:
        return self.decoder.attention_shape

    def start(self, memory: Memory) -> State:
        if memory.tokens is None:
            raise InputError("copying needs a memory whose rows are tokens")
        state = self.decoder.start(memory)
        fixed = {**state.fixed, "copied_tokens": memory.tokens}
        if self.source is not None:
            assert memory.source_ids is not None, "there are several sources"
            fixed["copied_rows"] = memory.source_ids == self.source
        return replace(state, fixed=fixed)

    def memory_mask(self, state: State) -> Tensor | None:
        return self.decoder.memory_mask(state)

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.decoder.reserve(state, more, beams)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        step = self.decoder.advance(tokens, state, mask, with_attention=True)
        assert step.attention is not None
        assert step.attention.cross is not None
        assert step.hidden is not None
        heads = step.attention.cross[:, self.layer].float()  # R H T S
        weights = heads.mean(1) if self.head is None else heads[:, self.head]  # R T S
        gate = self.gate(step.hidden).float()  # R T 1
        generates = F.logsigmoid(gate)
        if self.source is not None:
            rows = state.fixed["copied_rows"].repeat_interleave(state.beams, 0)[:, None]  # R 1 S
            others = weights.masked_fill(rows, 0.0).sum(-1, keepdim=True)  # R T 1
            generates = torch.logaddexp(generates, F.logsigmoid(-gate) + others.clamp(min=SMALLEST).log())
            weights = weights.masked_fill(~rows, 0.0)
        generated = generates + step.logits.float().log_softmax(-1)
        copied = F.logsigmoid(-gate) + self._copied(weights, state, step.logits.size(-1)).clamp(min=SMALLEST).log()
        attention = step.attention if with_attention else None
        return replace(step, logits=torch.logaddexp(generated, copied), attention=attention)

    @staticmethod
    def _copied(weights: Tensor, state: State, size: int) -> Tensor:
        """R T V: the attention weight of each token, summed over its source positions."""
        tokens = state.fixed["copied_tokens"].repeat_interleave(state.beams, 0)[:, None].expand_as(weights)  # R T S
        return weights.new_zeros(*weights.shape[:2], size).scatter_add(-1, tokens, weights)
