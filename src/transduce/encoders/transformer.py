"""Sources in, a memory out: every row has looked at the others, in each of several layers."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.attention.blocks import Blocks
from transduce.attention.own import View
from transduce.contracts import Encoder
from transduce.flow import Batch, Memory


class TransformerEncoder(Blocks, Encoder):
    """self-attention and feed-forward blocks, all positions at once (Vaswani 2017)"""

    causal = False
    steady = True

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        entered = self.embedding.rows(batch.source)
        mask = entered.mask
        places = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        view = View(
            self.position, places, places, self._visible(mask), real=mask, padded=True, with_attention=with_attention
        )
        values = self.enter(entered.values, places, mask)
        passed = self.run(values, self.begin(mask.size(0)), view)
        read = passed.values.to(values)  # for all kinds of decoders
        shown = mask[..., None]
        summary = (read * shown).sum(1) / shown.sum(1)  # the mean of the real rows
        return Memory(read, mask, summary, passed.own, batch.source.ids)

    def _visible(self, mask: Tensor) -> Tensor:
        visible = mask[:, None, None]  # B 1 1 S
        if self.reach is None:
            return visible
        near = torch.ones(mask.size(1), mask.size(1), dtype=torch.bool, device=mask.device)
        near = near.tril(self.reach).triu(-self.reach)
        # A padded row far from all real ones still sees itself: a row without anything to see would be nan.
        return visible & near | torch.eye(mask.size(1), dtype=torch.bool, device=mask.device)  # B 1 S S
