"""A decoder of lean blocks in, the same out, which finds the best next tokens of a search's rows in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from transduce.contracts import TopKRequest
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import State, TopK
from transduce.inference.lowering.lean import LeanBlock
from transduce.kernels.native.block_step import NativeBlock, StepStruct
from transduce.kernels.native.decoder_step import KeysValues, NativeDecoder
from transduce.kernels.native.top_k import TopKBuffers, shortlists_struct
from transduce.layers.norm import LayerNorm


class LeanDecoder(TransformerDecoder):
    """masked self-attention, cross-attention and feed-forward blocks, a step of a search in one call of our kernels

    The scores of all tokens are never written down: a part of them is made, looked through and forgotten. Rows that
    nobody asks about are left out. Everything but `propose` goes the way it always went.
    """

    supports_shortlists = True

    def __init__(self, plain: TransformerDecoder, blocks: list[NativeBlock]) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: copy.copy(one) for name, one in vars(plain).items()})
        norm = plain.final_norm
        level = (norm.weight, norm.bias, norm.eps) if isinstance(norm, LayerNorm) else None
        self.steps = NativeDecoder(blocks, level)

    @property
    def proposes(self) -> bool:
        return True

    def propose(self, tokens: torch.Tensor, state: State, asked: TopKRequest) -> TopK:
        view, past = self._place(state)
        places, owners, fixed = state.past["next"], past["owners"], state.fixed
        which = None if bool(asked.active.all()) else asked.active.nonzero().flatten()  # R'
        if which is not None:
            tokens = tokens[which]
        queries = places[:1, None] if bool((places == places[0]).all()) else places[:, None]  # all the same, as a rule
        if which is not None and len(queries) > 1:
            queries = queries[which]
        values = self.embed(self.embedding(tokens), queries, None).contiguous()  # R' 1 D
        memories: list[KeysValues] = list(fixed["memory"])
        shade = view.source
        where = StepStruct(
            len(values), state.beams, owners.size(1), -1 if self.window is None else self.window,
            None if which is None else which.data_ptr(), places.data_ptr(), owners.data_ptr(), None, None,
            shade.size(-1) if memories and shade is not None else 0, None, None,
            shade.data_ptr() if memories and shade is not None else None, torch.get_num_threads(),
        )  # fmt: skip
        layer: Any = self.output.projection  # asked for now: a search may have one of its own
        found = TopKBuffers(len(values), asked.k, asked.suppressed, shortlists_struct(layer.native, asked.shortlists))
        self.steps(values, where, fixed["room"], memories, layer.native, found)
        logs, chosen = found.log_probs, found.tokens
        if which is not None:
            logs = logs.new_full((len(places), asked.k), -torch.inf).index_copy_(0, which, logs)
            chosen = chosen.new_zeros(len(places), asked.k).index_copy_(0, which, chosen)
        return TopK(logs, chosen, State(fixed, past, state.beams))


def proposing(part: nn.Module) -> nn.Module:
    """The part, or the same as a decoder that proposes, where our kernels know all that is in it."""
    if type(part) is not TransformerDecoder or not part.has_kv_cache or part.output.transform is not None:
        return part
    blocks = [block.whole for block in part.layers if type(block) is LeanBlock and block.whole is not None]
    level = part.final_norm is None or (
        isinstance(part.final_norm, LayerNorm) and part.final_norm.weight.dtype == torch.float32
    )
    if len(blocks) < len(part.layers) or not level or getattr(part.output.projection, "native", None) is None:
        return part
    return LeanDecoder(part, blocks)
