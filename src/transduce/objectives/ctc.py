"""CTC loss, and joint CTC/attention training."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transduce.contracts import Forward, Loss, Objective, Rate
from transduce.decoders.ctc import BLANK, JointCTCDecoder
from transduce.errors import InputError
from transduce.flow import Batch, Padded, Step
from transduce.model import CTCModel
from transduce.objectives.cross_entropy import Share, cross_entropy


def ctc_loss(logs: Tensor, rows: Tensor, target: Padded) -> Loss:
    """CTC loss: -log of the sum over all alignment paths of the target, summed over a batch.

    logs (B S V) are log-probabilities, rows (B) how many of them are real, target (B T) has neither <s> nor </s>. A
    target that does not fit into its rows has no path: it adds nothing to the total and is counted as `impossible`.
    """
    lengths = target.mask.sum(1)  # B
    total = F.ctc_loss(
        logs.transpose(0, 1), target.values, rows, lengths, blank=BLANK, reduction="sum", zero_infinity=True
    )
    # A repeated token needs a blank in between.
    repeated = (target.values[:, 1:] == target.values[:, :-1]) & target.mask[:, 1:]
    impossible = (rows < lengths + repeated.sum(1)).sum()
    return Loss(total, {"nll": total.detach(), "impossible": impossible})


def _ctc_of_step(step: Step, batch: Batch) -> Loss:
    gold = batch.labels
    labels = Padded(gold.values, gold.mask & (torch.arange(gold.mask.size(1), device=batch.device) < _words(gold)))
    return ctc_loss(step.state.fixed["paths"], step.state.fixed["rows"], labels)


def _words(gold: Padded) -> Tensor:
    """B 1: the number of target tokens without </s>."""
    return gold.mask.sum(1, keepdim=True) - 1


class CTC(Objective):
    """CTC: -log of the total probability of all paths that collapse to the target (Graves 2006)

    Equal to the cross-entropy of the CTC prefix scores without smoothing, in one pass over the rows. Targets that do
    not fit into their rows add nothing to the loss and are counted in `impossible`.
    """

    parts = ("nll", "impossible")

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        return _ctc_of_step(model(replace(batch, target=None)), batch)

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, CTCModel):
            raise InputError(
                "ctc trains an encoder with a CTC head",
                remedy="set model.head: {kind: ctc} without a decoder; with one, model.ctc: {} and kind: joint_ctc",
            )


class JointCTC(Objective):
    """(1 - weight) cross-entropy of the decoder + weight CTC of the encoder (Watanabe 2017)

    CTC only allows what goes from left to right, which is soon learnt and draws attention after it.
    """

    parts = ("nll", "paths", "impossible")

    def __init__(self, *, weight: Share = 0.3, label_smoothing: Rate = 0.1) -> None:
        self.weight, self.label_smoothing = weight, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        step = model(batch)
        found, paths = cross_entropy(step.logits, batch.labels, self.label_smoothing), _ctc_of_step(step, batch)
        total = torch.lerp(found.smoothed, paths.total.to(found.smoothed), self.weight)
        parts = {"nll": found.nll, "paths": paths.parts["nll"], "impossible": paths.parts["impossible"]}
        return Loss(total, parts)

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not isinstance(getattr(model, "decoder", None), JointCTCDecoder):
            raise InputError("joint_ctc needs a CTC projection of the encoder", remedy="set model.ctc: {}")
