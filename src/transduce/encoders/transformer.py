"""Transformer encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Encoder, SequenceContext
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.transformer import TransformerStack


class TransformerEncoder(TransformerStack, Encoder):
    """layers of self-attention and feed-forward (Vaswani 2017)"""

    causal = False
    capturable = True

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source, layout = self.embedding.rows(batch.source), batch.source.layout
        mask, segment_ids = source.mask, None if layout is None else layout.segment_ids
        positions = torch.arange(mask.size(1), device=mask.device)[None] if layout is None else layout.positions  # . S
        visible = self._visible(mask if layout is None else layout.same_segment(layout.segment_ids))
        sequence = SequenceContext(
            self.position, positions, positions, visible, real=mask, padded=True, with_attention=with_attention
        )
        embedded = self.embed(source.values, positions, mask)
        output = self.run_layers(embedded, self.start_layers(mask.size(0)), sequence)
        values = output.values.to(embedded)  # in the dtype of the embeddings, for any decoder
        summary = masked_mean(values, mask)
        return Memory(values, mask, summary, output.self_attention, batch.source.ids, segment_ids)

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
