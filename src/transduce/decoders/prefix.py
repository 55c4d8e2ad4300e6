"""Prefix decoder: a Transformer decoder whose self-attention reads the memory as rows before the tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.attention.positions import embedded_only
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import SequenceContext
from transduce.decoders.transformer import TransformerDecoder
from transduce.errors import InputError
from transduce.flow import Memory, State, Tree
from transduce.kernels.dispatch import to_matmul_dtype
from transduce.kernels.linear import linear
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import dense
from transduce.layers.norm import LayerNorm
from transduce.layers.option_groups import flat_options
from transduce.layers.transformer import StackOptions, TransformerStack


class PrefixDecoder(TransformerDecoder):
    """masked self-attention over the tokens and, before them, norm(W m + b) of each row m of the memory (Wang 2022)

    The rows of the memory attend to each other, and not to tokens. They pass through the layers once per source; their
    keys and values are the fixed state. Positions are those of the tokens. Without a memory it is a language model.
    """

    @flat_options
    def __init__(self, embedding: Embedding, output: Output, memory_width: int, *, stack: StackOptions) -> None:
        TransformerStack.__init__(self, embedding, stack)
        self.output = output
        embedded_only(self.position, "the memory of a prefix decoder")
        if self.window is not None or type(self.layers[0].self_attention) is not SelfAttention:
            raise InputError(
                "a prefix decoder has self-attention over all earlier rows",
                remedy="leave window and token_mixer out, or choose the kind transformer",
            )
        self.memory_proj = dense(memory_width, self.width) if memory_width else None
        self.memory_norm = LayerNorm(self.width) if memory_width else None

    @property
    def supports_packing(self) -> bool:
        return False

    def start(self, memory: Memory) -> State:
        rows = memory.mask.size(0)
        fixed: dict[str, Tree] = {"memory": (), "mask": memory.mask}
        if self.memory_proj is not None and self.memory_norm is not None:
            values = self.memory_norm(linear(self.memory_proj, to_matmul_dtype(memory.values)))
            places = torch.arange(memory.mask.size(1), device=memory.mask.device)[None]
            context = SequenceContext(
                self.position, places, places, memory.mask[:, None, None], real=memory.mask, padded=True
            )
            fixed["memory"] = self.run_layers(self.dropout(values), self.start_layers(rows), context).past
        return State(fixed, {"layers": self.start_layers(rows)})

    def slot_context(self, state: State) -> tuple[SequenceContext, dict[str, Tensor]]:
        context, past = super().slot_context(state)
        return replace(context, mask=state.fixed["mask"][:, None, None]), past

    def _context(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[SequenceContext, dict[str, Tensor]]:
        """With the columns of the memory before those of the tokens in the mask."""
        context, past = super()._context(tokens, state, mask)
        if not state.fixed["memory"]:
            return context, past
        visible = self._visible(context.queries, context.keys) if context.mask is None else context.mask  # . 1 T U
        rows, steps = tokens.shape
        before = state.fixed["mask"].repeat_interleave(rows // len(state.fixed["mask"]), 0)  # R S
        both = (before[:, None, None].expand(-1, -1, steps, -1), visible.expand(rows, -1, -1, -1))
        return replace(context, mask=torch.cat(both, -1), causal=False), past
