"""Logits processors, and lexical constraints: phrases that an output must contain, or must not contain.

A beam is divided into banks by the number of constraint tokens that a hypothesis still needs, so that hypotheses with
many and with few of them survive side by side: dynamic beam allocation (Post and Vilar 2018), with the banks filled in
turns as in the vectorised form (Hu et al. 2019). An output ends only when it contains every required phrase. When the
tokens that are left just suffice for the phrases that are missing, nothing else may be generated; so every strategy
satisfies all constraints, whatever the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Count, LogitsProcessor, Selection
from transduce.flow import BOS, EOS, PAD
from transduce.kernels.beam_update import TOP_K, BeamState

NonNegative = Annotated[int, Ge(0)]
LOWEST_LOG_PROB = -1e4  # of a token that a model cannot generate: a required one must not end its hypothesis
DONE = 2**30  # more tokens than any output has


class MinLength(LogitsProcessor):
    """no </s> before this number of tokens"""

    def __init__(self, *, length: int) -> None:
        self.length = length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        short = (history != PAD).sum(1) < self.length  # R
        scores[:, EOS] = scores[:, EOS].masked_fill(short, -torch.inf)
        return scores

    def suppressed(self, length: int) -> Sequence[int]:
        return (EOS,) if length < self.length else ()


class NoRepeatNgram(LogitsProcessor):
    """no n-gram twice"""

    def __init__(self, *, size: Count) -> None:
        self.size = size

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        size = self.size
        if history.size(1) < size:
            return scores
        ngrams = history.unfold(1, size, 1)  # R . n
        context = history[:, history.size(1) - size + 1 :]  # R n-1: the n-gram that the next token would complete
        repeated = (ngrams[..., :-1] == context[:, None]).all(-1) & (ngrams != PAD).all(-1)  # R .
        banned = torch.zeros_like(scores).scatter_add_(1, ngrams[..., -1], repeated.to(scores.dtype)) > 0
        return scores.masked_fill(banned, -torch.inf)


class RepetitionPenalty(LogitsProcessor):
    """the log-probability of tokens that were generated before is multiplied (Keskar 2019)"""

    def __init__(self, *, penalty: float) -> None:
        self.penalty = penalty

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        generated = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, history, True)
        generated[:, : EOS + 1] = False  # <pad>, <s> and </s>
        return torch.where(generated, scores * self.penalty, scores)


class ForcedBOS(LogitsProcessor):
    """every output begins with this token, at no cost"""

    def __init__(self, *, token: int) -> None:
        self.token = token

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _force(scores, self.token, (history == PAD).all(1))

    def suppressed(self, length: int) -> Sequence[int] | None:
        return () if length else None


class ForcedEOS(LogitsProcessor):
    """the last token of an output of maximal length is </s>, at no cost"""

    def __init__(self, *, max_length: Count) -> None:
        self.max_length = max_length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _force(scores, EOS, (history != PAD).sum(1) == self.max_length - 1)

    def suppressed(self, length: int) -> Sequence[int] | None:
        return None if length == self.max_length - 1 else ()


class ForcedToken(LogitsProcessor):
    """this token is generated after a number of tokens, with the probability that the model gives it"""

    def __init__(self, *, token: int, at: NonNegative) -> None:
        self.token, self.at = token, at

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        here = (history != PAD).sum(1, keepdim=True) == self.at  # R 1
        others = torch.arange(scores.size(-1), device=scores.device) != self.token
        return scores.masked_fill(here & others, -torch.inf)

    def suppressed(self, length: int) -> Sequence[int] | None:
        return None if length == self.at else ()


def _force(scores: Tensor, token: int, where: Tensor) -> Tensor:
    """In these rows (R) this token has probability 1."""
    forced = torch.full_like(scores, -torch.inf)
    forced[:, token] = 0.0
    return torch.where(where[:, None], forced, scores)


class SuppressTokens(LogitsProcessor):
    """these tokens are never generated"""

    def __init__(self, *, tokens: list[int], at: int | None = None) -> None:
        self.tokens, self.at = tokens, at  # at: only after this number of tokens; None: always
        self._on: dict[torch.device, Tensor] = {}  # by device: a captured CUDA graph cannot copy them from the host

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        if scores.device not in self._on:
            self._on[scores.device] = torch.tensor(self.tokens, device=scores.device)
        tokens = self._on[scores.device]
        if self.at is None:
            return scores.index_fill_(1, tokens, -torch.inf)
        here = (history != PAD).sum(1, keepdim=True) == self.at  # R 1
        return torch.where(here, scores.index_fill(1, tokens, -torch.inf), scores)

    def suppressed(self, length: int) -> Sequence[int]:
        return self.tokens if self.at in (None, length) else ()


class TimestampRules(LogitsProcessor):
    """timestamps in pairs around every segment of a transcript, in order of time (Radford et al. 2022)

    An output begins with a timestamp. A timestamp after text ends a segment, and another timestamp or </s> follows it.
    Where all timestamps together are more probable than the best other token, one of them is next.
    """

    def __init__(
        self,
        *,
        first: NonNegative,
        text_end: NonNegative,
        none: NonNegative,
        after: NonNegative = 0,
        max_initial: NonNegative | None = None,
    ) -> None:
        """`first`: id of the timestamp 0; all later ids are timestamps. `text_end`: ids below it are text. `none`: the
        request for no timestamps. `after`: tokens of the prompt. `max_initial`: the number of the last timestamp that
        an output may begin with."""
        self.first, self.text_end, self.none, self.after, self.max_initial = first, text_end, none, after, max_initial

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        token = torch.arange(scores.size(-1), device=scores.device)
        count = (history != PAD).sum(1, keepdim=True) - self.after  # R 1: tokens after the prompt
        history = torch.nn.functional.pad(history, (2, 0), value=PAD)
        stamped = history >= self.first
        last, before = (count >= 1) & stamped[:, -1:], (count < 2) | stamped[:, -2:-1]  # R 1
        is_time = token >= self.first
        banned = (token == self.none) | (last & before & is_time)
        banned = banned | (last & ~before & (token < self.text_end) & (token != EOS))
        latest = torch.where(stamped, history, self.first - 1).amax(1, keepdim=True)
        earliest = torch.where(last & ~before, latest, latest + 1)  # the end of a segment may begin the next
        banned = banned | (is_time & (token < earliest))
        late = token > (self.first + self.max_initial if self.max_initial is not None else token)
        banned = banned | ((count == 0) & (~is_time | late))
        scores = scores.masked_fill(banned, -torch.inf)
        logs = scores.log_softmax(-1)
        total = logs.masked_fill(~is_time, -torch.inf).logsumexp(-1, keepdim=True)
        best = logs.masked_fill(is_time, -torch.inf).amax(-1, keepdim=True)
        return scores.masked_fill((total > best) & ~is_time, -torch.inf)


NEVER_GENERATED = SuppressTokens(tokens=[PAD, BOS])

LOGITS_PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "min_length": MinLength,
    "no_repeat_ngram": NoRepeatNgram,
    "repetition_penalty": RepetitionPenalty,
    "forced_bos": ForcedBOS,
    "forced_eos": ForcedEOS,
    "forced_token": ForcedToken,
    "suppress": SuppressTokens,
    "timestamps": TimestampRules,
}


@dataclass(frozen=True)
class ConstraintProgress:
    """How far hypotheses (B K) have come with the required phrases (B M P, of which A in a row are alternatives)."""

    met: Tensor  # B K M/A: which constraints are satisfied
    missing: Tensor  # B K: tokens of all phrases that are not satisfied, counted from their beginnings
    needed: Tensor  # B K: the same, continuing the phrase that is matched in part
    next_tokens: Tensor  # B K 2M: the tokens that continue each phrase, and those that begin it; PAD: none
    needed_after: Tensor  # B K 2M: `needed` after each of them


def constrained_scores(
    beams: BeamState, allowed: Tensor, log_probs: Tensor, *, competing: bool
) -> tuple[Tensor, ConstraintProgress]:
    """The scores (B N V) of the tokens that the constraints permit after the hypotheses of a beam, else -inf.

    `allowed` are the scores after the logits processors. `competing`: the rows of a source compete, so that one of them
    suffices; otherwise each is an output. Where processors or banned phrases leave no output that can still contain all
    required phrases, the required tokens have their log-probabilities back.
    """
    assert beams.constraints is not None
    required, banned = beams.constraints.required, beams.constraints.banned
    scores = allowed.masked_fill(_completes_banned(beams.history, banned, allowed.size(-1)), -torch.inf)
    progress = _progress(beams.history, contained(beams.history, required), required)
    left = (beams.max_lengths - beams.lengths - 2)[:, None]  # after the next token, with a position for </s>
    free = (progress.missing <= left) | (progress.missing == 0)  # B N
    scores[..., EOS] = scores[..., EOS].masked_fill(progress.missing > 0, -torch.inf)
    in_time = (progress.next_tokens != PAD) & (progress.needed_after <= left[..., None])  # B N 2M
    timely = torch.zeros_like(scores, dtype=torch.long).scatter_add(-1, progress.next_tokens, in_time.long()) > 0
    scores = scores.masked_fill(~free[..., None] & ~timely, -torch.inf)
    helpless = (scores == -torch.inf).all(-1) & timely.any(-1)  # B N
    if competing:
        alone = helpless | (beams.totals == -torch.inf)
        helpless &= alone.all(1, keepdim=True) & (beams.finished.ranks == -torch.inf).all(1, keepdim=True)
    return torch.where(helpless[..., None] & timely, log_probs, scores), progress


def select_from_banks(beams: BeamState, scores: Tensor, progress: ConstraintProgress, width: int) -> Selection:
    """The N candidates of the next step: the best of each bank, then the second best of each, and so on.

    Candidates are the N best tokens of each row and all tokens that continue a required phrase.
    """
    assert beams.constraints is not None
    best, tokens = TOP_K(scores, min(width, scores.size(-1)))  # B N W
    more = progress.next_tokens  # B N 2M
    known = (more[..., None] == tokens[..., None, :]).any(-1) | (more == PAD) | _repeated(more)
    best = torch.cat((best, scores.gather(-1, more).masked_fill(known, -torch.inf)), -1)  # B N W+2M
    tokens = torch.cat((tokens, more), -1)
    totals = (beams.totals[..., None] + best).flatten(1)  # B K
    parents = torch.arange(tokens.size(1), device=tokens.device).repeat_interleave(tokens.size(2)).expand_as(totals)
    needed = _needed_after(beams, progress.met, parents, tokens.flatten(1))
    index = _take_turns(totals, needed, width)
    return Selection(parents.gather(1, index), tokens.flatten(1).gather(1, index), totals.gather(1, index))


def contained(history: Tensor, required: Tensor) -> Tensor:
    """Which constraints (B C A P) each of the texts (B K L) satisfies: B K C."""
    phrases = required.flatten(1, 2)  # B M P
    exists = (phrases != PAD).any(-1)  # B M
    length = max(phrases.size(-1), 1)
    windows = F.pad(history, (0, length), value=PAD).unfold(-1, length, 1)[..., None, :]  # B K L 1 P
    wanted = phrases[:, None, None]  # B 1 1 M P
    found = ((windows == wanted) | (wanted == PAD)).all(-1).any(2) & exists[:, None]  # B K M
    return _satisfied(found, exists, required)


def _satisfied(found: Tensor, exists: Tensor, required: Tensor) -> Tensor:
    """B K C: one of the alternatives is found (B K M), or there are none."""
    shape = required.shape[1:3]
    return found.unflatten(-1, shape).any(-1) | ~exists.unflatten(-1, shape).any(-1)[:, None]


def _progress(history: Tensor, met: Tensor, required: Tensor) -> ConstraintProgress:
    """The progress of hypotheses (B K L) that satisfy these constraints (B K C)."""
    alternatives, phrases = required.size(2), required.flatten(1, 2)  # B M P
    lengths = (phrases != PAD).sum(-1)  # B M
    shortest = lengths.masked_fill(lengths == 0, DONE).unflatten(1, required.shape[1:3]).amin(-1)  # B C
    missing = (shortest[:, None] * ~met).sum(-1)  # B K
    matched = _matched(history, phrases, lengths - 1)  # B K M
    open_ = (~met).repeat_interleave(alternatives, -1) & (lengths > 0)[:, None]  # B K M
    others = missing[..., None] - shortest.repeat_interleave(alternatives, 1)[:, None]  # B K M
    after = others + lengths[:, None] - matched - 1
    needed = torch.where(open_ & (matched > 0), after + 1, DONE)
    needed = torch.minimum(missing, needed.amin(-1)) if needed.size(-1) else missing
    phrases = phrases[:, None].expand(-1, history.size(1), -1, -1)  # B K M P
    tokens = torch.cat((phrases.gather(-1, matched[..., None]).squeeze(-1), phrases[..., 0]), -1)
    after, open_ = torch.cat((after, after + matched), -1), torch.cat((open_, open_), -1)
    return ConstraintProgress(met, missing, needed, tokens.masked_fill(~open_, PAD), after.masked_fill(~open_, DONE))


def _matched(history: Tensor, phrases: Tensor, most: Tensor) -> Tensor:
    """B K M: how many of its first tokens, at most `most` (B M), the texts (B K L) end with."""
    count = torch.zeros(*history.shape[:2], phrases.size(1), dtype=torch.long, device=history.device)
    for length in range(1, min(phrases.size(-1), history.size(-1)) + 1):
        ends = (history[..., None, -length:] == phrases[:, None, :, :length]).all(-1)  # B K M
        count = torch.where(ends & (length <= most)[:, None], length, count)
    return count


def _needed_after(beams: BeamState, met: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """B K: tokens that candidates still need."""
    assert beams.constraints is not None
    required = beams.constraints.required
    phrases, size = required.flatten(1, 2), required.size(-1)
    ends = beams.history[..., -size:]  # B N P
    ends = ends.gather(1, parents[..., None].expand(-1, -1, ends.size(-1)))
    ends = torch.cat((ends, tokens[..., None]), -1)  # B K P+1
    before = met.gather(1, parents[..., None].expand(-1, -1, met.size(-1)))  # B K C
    exists = phrases != PAD
    found = _matched(ends, phrases, exists.sum(-1)) == exists.sum(-1)[:, None]  # B K M: it ends with the phrase
    now = _satisfied(found & exists.any(-1)[:, None], exists.any(-1), required)
    return _progress(ends, before | now, required).needed


def _completes_banned(history: Tensor, banned: Tensor, size: int) -> Tensor:
    """B N V: which tokens would complete a banned phrase (B K P)."""
    lengths = (banned != PAD).sum(-1)  # B K
    complete = torch.zeros(*history.shape[:2], size, dtype=torch.long, device=history.device)
    for length in range(1, banned.size(-1) + 1):
        ends = lengths == length  # B K
        if length - 1 > history.size(-1) or not ends.any():
            continue
        context = history[..., None, history.size(-1) - length + 1 :] == banned[:, None, :, : length - 1]
        last = banned[..., length - 1][:, None].expand(-1, history.size(1), -1)  # B N K
        complete.scatter_add_(-1, last, (context.all(-1) & ends[:, None]).long())
    return complete > 0


def _repeated(tokens: Tensor) -> Tensor:
    """Which tokens occur further left in their row (..., M)."""
    same = tokens[..., :, None] == tokens[..., None, :]
    return same.tril(-1).any(-1)


def _take_turns(totals: Tensor, needed: Tensor, width: int) -> Tensor:
    """B N: indices of the best candidates (B K) of each bank in turns; banks that need fewer tokens come first."""
    order = totals.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, needed.gather(1, order).argsort(dim=1, stable=True))  # by bank, then by total
    banks, columns = needed.gather(1, order), torch.arange(order.size(1), device=order.device).expand_as(order)
    first = F.pad(banks[:, 1:] != banks[:, :-1], (1, 0), value=True)
    turn = columns - torch.where(first, columns, 0).cummax(1).values  # rank within the bank
    dead = totals.gather(1, order) == -torch.inf
    turn = turn + dead * order.size(1)
    return order.gather(1, (turn * order.size(1) + columns).topk(width, 1, largest=False).indices)
