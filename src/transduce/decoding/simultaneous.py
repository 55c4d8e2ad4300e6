"""Simultaneous decoding: output tokens while the source arrives, by wait-k or by the attention of the model.

Wait-k (Ma et al. 2019) reads k source tokens, then writes and reads in turn: token t of the output reads the first g(t)
= min(k + t - 1, S) of the S source tokens, </s> included. AlignAtt (Papi et al. 2023) writes a token when it attends to
none of the last source tokens that have arrived, and reads on otherwise; with monotonic attention it follows the
alignment that the model was trained with. The prefix is encoded again at every step, and the output so far is read
again with it. So every model with a text source can stream, with any encoder and decoder, and no token depends on a
source token after g(t).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transduce.contracts import Forward
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Hypothesis, Padded, Step
from transduce.model import Transducer


def source_prefix(batch: Batch, length: int) -> Batch:
    """The batch with the first tokens of its sources; one that has fewer is complete."""
    assert batch.source is not None, "wait-k reads a source"
    values, mask = batch.source.values[:, :length], batch.source.mask[:, :length]
    return replace(batch, source=Padded(values, mask))


def check_wait_k(batch: Batch, k: int) -> None:
    """Wait-k reads at least one token of a text. Further sources, such as a picture, are read whole."""
    if k < 1:
        raise InputError(f"wait-k with k = {k}", where="wait_k", remedy="k is 1 or more")
    if batch.source is None or batch.source.ids is None or batch.packed_labels is not None:
        raise InputError(
            "simultaneous decoding reads the tokens of a text, and this model has no such source",
            where="wait_k",
            remedy="train an encoder and a decoder on pairs of texts, without packing",
        )


def wait_k_logits(model: Forward, batch: Batch, k: int) -> Tensor:
    """Logits (B T V) of all labels of a batch, each from the part of the source that wait-k has read by then.

    Step t of a source of S tokens is one pass over a prefix; all steps after the last prefix share one pass.
    """
    check_wait_k(batch, k)
    assert batch.source is not None
    tokens, total = batch.decoder_inputs.values, batch.source.values.size(1)
    partial = min(max(total - k, 0), tokens.size(1))  # steps before the longest source is complete
    parts = [model(_target_prefix(source_prefix(batch, k + step), step + 2)).logits[:, -1:] for step in range(partial)]
    if partial < tokens.size(1):
        parts.append(model(batch).logits[:, partial:])
    return torch.cat(parts, 1)


def _target_prefix(batch: Batch, length: int) -> Batch:
    """The batch with the first tokens of its targets, <s> included."""
    assert batch.target is not None
    target = Padded(batch.target.values[:, :length], batch.target.mask[:, :length])
    return replace(batch, target=target, loss_mask=None)


@dataclass(frozen=True)
class WrittenToken:
    """One output token: its id, its log-probability, and the source tokens that had been read when it was written."""

    token: int
    log_prob: float
    delay: int  # g(t)


@torch.inference_mode()
def wait_k_step(model: Transducer, batch: Batch, written: Tensor, k: int, complete: Tensor) -> tuple[Tensor, Tensor]:
    """The best next token of each source (B) after those written (B t), <s> first, and its log-probability.

    `complete`: the sources (B) whose </s> is among the tokens read. No other output may end.
    """
    length = k + written.size(1) - 1
    logits = model.advance(written, model.start(source_prefix(batch, length))).logits[:, -1]
    log_probs = logits.log_softmax(-1, dtype=torch.float)
    return _best_tokens(log_probs, complete)


def _best_tokens(log_probs: Tensor, complete: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row that may be written, and its log-probability; only complete sources allow </s>."""
    allowed = log_probs.clone()
    allowed[:, [PAD, BOS]] = -torch.inf
    allowed[~complete, EOS] = -torch.inf
    best = allowed.argmax(-1)
    return best, log_probs.gather(1, best[:, None]).squeeze(1)


@torch.inference_mode()
def wait_k_search(
    model: Transducer, batch: Batch, k: int, max_lengths: Tensor
) -> tuple[list[Hypothesis], list[list[int]]]:
    """The wait-k output of each source, whose tokens all count as read in turn, and the delays g(t) of its tokens."""
    check_wait_k(batch, k)
    assert batch.source is not None
    lengths = batch.source.mask.sum(1)  # B, </s> included
    written = torch.full((batch.size, 1), BOS, device=batch.device)
    scores, delays = [], []
    done = torch.zeros(batch.size, dtype=torch.bool, device=batch.device)
    for step in range(int(max_lengths.max())):
        best, log_prob = wait_k_step(model, batch, written, k, lengths <= k + step)
        written = torch.cat((written, best[:, None]), 1)
        scores.append(log_prob)
        delays.append((lengths.clamp(max=k + step)).tolist())
        done |= (best == EOS) | (max_lengths.to(done.device) <= step + 1)
        if bool(done.all()):
            break
    return _hypotheses(written[:, 1:], torch.stack(scores, 1), delays, max_lengths)


def _hypotheses(
    written: Tensor, scores: Tensor, delays: list[list[int]], max_lengths: Tensor
) -> tuple[list[Hypothesis], list[list[int]]]:
    found, read = [], []
    for row, (ids, own) in enumerate(zip(written.tolist(), scores.tolist(), strict=True)):
        most = min(int(max_lengths[row]), len(ids))
        length = min(ids.index(EOS) + 1 if EOS in ids else most, most)
        complete = ids[length - 1] == EOS
        total = sum(own[:length])
        found.append(Hypothesis(tuple(ids[:length]), tuple(own[:length]), total, complete))
        read.append([one[row] for one in delays[:length]])
    return found, read


def stream_wait_k(
    model: Transducer, prefixes: Iterable[tuple[Batch, bool]], k: int, max_length: int
) -> Iterator[WrittenToken]:
    """Output tokens of one source that grows.

    `prefixes` are batches of one row with the tokens that have arrived, and whether the source is complete: then </s>
    is the last of them.
    """
    written = [BOS]
    for batch, complete in prefixes:
        check_wait_k(batch, k)
        assert batch.source is not None
        arrived = batch.source.values.size(1)
        while len(written) <= max_length and (complete or k + len(written) - 1 <= arrived):
            read = min(k + len(written) - 1, arrived)
            ended = torch.tensor([complete and read == arrived], device=batch.device)
            ids = torch.tensor([written], device=batch.device)
            best, log_prob = wait_k_step(model, batch, ids, k, ended)
            written.append(int(best))
            yield WrittenToken(int(best), float(log_prob), read)
            if written[-1] == EOS:
                return


@torch.inference_mode()
def stream_alignatt(
    model: Transducer, prefixes: Iterable[tuple[Batch, bool]], guard: int, max_length: int
) -> Iterator[WrittenToken]:
    """Output tokens of one source that grows, by AlignAtt; `prefixes` as for `stream_wait_k`.

    A token is written when the source token with the largest attention weight (mean over layers and heads) is before
    the last `guard` that have arrived. An output whose best next token is </s> waits for the end of the source.
    """
    written = [BOS]
    for batch, complete in prefixes:
        check_wait_k(batch, 1)
        assert batch.source is not None
        arrived = batch.source.values.size(1)
        while len(written) <= max_length:
            ids = torch.tensor([written], device=batch.device)
            step = model.advance(ids, model.start(batch), with_attention=True)
            log_probs = step.logits[:, -1].log_softmax(-1, dtype=torch.float)
            if not complete and (_aligned(step) >= arrived - guard or int(log_probs.argmax()) == EOS):
                break
            best, log_prob = _best_tokens(log_probs, torch.tensor([complete], device=batch.device))
            written.append(int(best))
            yield WrittenToken(int(best), float(log_prob), arrived)
            if written[-1] == EOS:
                return


def _aligned(step: Step) -> int:
    """The source token that the last output token attends to most."""
    if step.attention is None or step.attention.cross is None:
        raise InputError(
            "alignatt reads the cross-attention of the decoder, and this one has none",
            where="alignatt",
            remedy="use wait-k, or a decoder with attention",
        )
    return int(step.attention.cross[0, :, :, -1].mean((0, 1)).argmax())
