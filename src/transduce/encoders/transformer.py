"""Transformer encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Encoder, FrontEnd, SequenceContext
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.option_groups import flat_options
from transduce.layers.transformer import StackOptions, TransformerStack


class TransformerEncoder(TransformerStack, Encoder):
    """layers of self-attention and feed-forward (Vaswani 2017)"""

    capturable = True

    @flat_options
    def __init__(self, embedding: FrontEnd, *, stack: StackOptions, causal: bool = False) -> None:
        """`causal`: a row attends to itself and earlier rows alone, as in a decoder."""
        self.causal = causal  # positions depend on it
        super().__init__(embedding, stack)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source, layout = self.embedding.rows(batch.source), batch.source.layout
        mask, segment_ids = source.mask, None if layout is None else layout.segment_ids
        positions = torch.arange(mask.size(1), device=mask.device)[None] if layout is None else layout.positions  # . S
        everywhere = mask[:, None, None] if layout is None else layout.same_segment(layout.segment_ids)  # B 1 . S
        sequence = SequenceContext(
            self.position,
            positions,
            positions,
            self._visible(everywhere),
            real=mask,
            padded=True,
            with_attention=with_attention,
            global_mask=everywhere,
        )
        embedded = self.embed(source.values, positions, mask)
        output = self.run_layers(embedded, self.start_layers(mask.size(0)), sequence)
        values = output.values.to(embedded)  # in the dtype of the embeddings, for any decoder
        summary = masked_mean(values, mask)
        return Memory(values, mask, summary, output.self_attention, batch.source.ids, segment_ids)

    def _visible(self, visible: Tensor) -> Tensor:
        """The attention mask within the window, from the padding (B 1 1 S) or packing mask (B 1 S S)."""
        if self.window is None and not self.causal:
            return visible
        columns = visible.size(-1)
        window = columns if self.window is None else self.window
        near = torch.ones(columns, columns, dtype=torch.bool, device=visible.device)
        near = near.tril(0 if self.causal else window).triu(-window)
        # A padded row far from all real rows attends to itself: the softmax of an empty row would be nan.
        return visible & near | torch.eye(columns, dtype=torch.bool, device=visible.device)  # B 1 S S
