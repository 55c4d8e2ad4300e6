"""Transformer encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Encoder, SequenceContext
from transduce.flow import Batch, Memory
from transduce.layers.transformer import TransformerStack


class TransformerEncoder(TransformerStack, Encoder):
    """layers of self-attention and feed-forward (Vaswani 2017)"""

    causal = False
    capturable = True

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        entered = self.embedding.rows(batch.source)
        mask, shared = entered.mask, batch.source.layout
        places = torch.arange(mask.size(1), device=mask.device)[None] if shared is None else shared.positions  # . S
        seen = self._visible(mask if shared is None else shared.same_segment(shared.segment_ids))
        view = SequenceContext(
            self.position, places, places, seen, real=mask, padded=True, with_attention=with_attention
        )
        values = self.embed(entered.values, places, mask)
        passed = self.run_layers(values, self.start_layers(mask.size(0)), view)
        read = passed.values.to(values)  # in the dtype of the embeddings, for any decoder
        shown = mask[..., None]
        summary = (read * shown).sum(1) / shown.sum(1)  # the mean of the real rows
        return Memory(
            read, mask, summary, passed.self_attention, batch.source.ids, None if shared is None else shared.segment_ids
        )

    def _visible(self, mask: Tensor) -> Tensor:
        """The attention mask from the padding mask (B S) or the packing mask (B 1 S S)."""
        visible = mask[:, None, None] if mask.dim() == 2 else mask  # B 1 . S
        if self.window is None:
            return visible
        columns = mask.size(-1)
        near = torch.ones(columns, columns, dtype=torch.bool, device=mask.device)
        near = near.tril(self.window).triu(-self.window)
        # A padded row far from all real rows attends to itself: the softmax of an empty row would be nan.
        return visible & near | torch.eye(columns, dtype=torch.bool, device=mask.device)  # B 1 S S
