"""Transformer decoder without the causal mask, to show what the mask is for."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from transduce.contracts import SequenceContext
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import State


class UnmaskedDecoder(TransformerDecoder):
    """a Transformer decoder whose tokens attend to all tokens of a call, the later ones too"""

    def _context(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[SequenceContext, dict[str, Tensor]]:
        context, past = super()._context(tokens, state, mask)
        return replace(context, mask=None, causal=False), past
