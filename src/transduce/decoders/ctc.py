"""CTC prefix scores, and joint CTC/attention decoding.

A path has one token or a blank in every row of the memory; it collapses to a text when repeats and then blanks are
removed (CTC, Graves 2006). Let l_t and b_t be the probability of all partial paths up to row t that collapse to the
prefix g and end in its last token, or in a blank. Then p(g) = l_S + b_S, and the texts that begin with g c have the
total probability

    p(g c ...) = sum_t phi_{t-1} p_t(c),   phi = b + l, or b alone where c is the last token of g

(Watanabe 2017). p(g) and all p(g c ...) add up to p(g ...). Their normalised logarithms are therefore log p(</s> | g)
and log p(c | g): an autoregressive model whose score of a text is exactly its CTC probability.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.contracts import Decoder
from transduce.flow import BOS, EOS, PAD, UNK, Memory, State, Step, Tree
from transduce.layers.feed_forward import dense

BLANK = PAD  # no target contains it
NEVER = -1e4  # instead of minus infinity, so that differences are never nan
BEYOND = -1e15  # of tokens in padding rows: less than the score of any path over real rows
LOWEST = -1e30  # of prefixes that no path gives
PREFIX_STATE = ("blank", "label", "last")  # of CTC, for each hypothesis


def read_paths(logits: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Logits (B S V) and mask (B S) -> the fixed part of a state: `paths`, log p_t(c), and the number of `rows`."""
    size = logits.size(-1)
    token = torch.arange(size, device=logits.device)
    excluded = (token == BOS) | (token == EOS)  # paths have neither
    logs = logits.float().masked_fill(excluded, NEVER).log_softmax(-1)
    padding = torch.full_like(logs[:1, :1], BEYOND).masked_fill(token == BLANK, 0.0)  # blank with probability 1
    return {"paths": torch.where(mask[..., None], logs, padding), "rows": mask.sum(1)}


def best_paths(fixed: dict[str, Tensor]) -> list[list[int]]:
    """The tokens of the most probable path of each source, without repeats and blanks."""
    best = fixed["paths"].argmax(-1)  # B S
    before = torch.nn.functional.pad(best[:, :-1], (1, 0), value=BLANK)
    kept = (best != before) & (best != BLANK)  # padding rows are blanks
    return [row[real].tolist() for row, real in zip(best, kept, strict=True)]


def begin_paths(fixed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the empty prefix: B S+1, from before the first row to after the last; in double precision."""
    blank = _sums(fixed["paths"][..., BLANK].double())
    return {"blank": blank, "label": torch.full_like(blank, LOWEST), "last": torch.zeros_like(fixed["rows"])}


def extend_paths(fixed: dict[str, Tensor], past: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The state of prefixes (R) extended by one token each; <s> and padding do not change them."""
    logs = fixed["paths"]
    sources = _sources(fixed, past)
    rows = torch.arange(logs.size(1), device=logs.device)
    emitted = _sums(logs[sources[:, None], rows, tokens[:, None]].double())  # R S+1
    blanks = _sums(logs[sources[:, None], rows, BLANK].double())
    before = torch.logaddexp(past["blank"], past["label"])
    before = torch.where((tokens == past["last"])[:, None], past["blank"], before)
    label = _carried(before, emitted)
    found = {"blank": _carried(label, blanks), "label": label, "last": tokens}
    return {name: torch.where(_like(tokens < UNK, one), past[name], one) for name, one in found.items()}


def next_scores(fixed: dict[str, Tensor], past: dict[str, Tensor]) -> Tensor:
    """R V: log p(c | g), and log p(</s> | g)."""
    probabilities, sources = fixed["paths"].double().exp(), _sources(fixed, past)  # B S V
    before = torch.logaddexp(past["blank"], past["label"])  # R S+1
    highest = before.amax(1, keepdim=True).detach()
    grouped = (before - highest).exp()[:, :-1].unflatten(0, (len(probabilities), -1))  # B N S
    extended = (grouped @ probabilities).flatten(0, 1)  # R V
    last = past["last"][:, None]
    again = probabilities[sources[:, None], torch.arange(probabilities.size(1), device=last.device), last]  # R S
    again = ((past["blank"] - highest).exp()[:, :-1] * again).sum(1, keepdim=True)
    extended = extended.scatter(1, last, again)
    logs = extended.clamp_min(torch.finfo(extended.dtype).tiny).log()
    token = torch.arange(logs.size(-1), device=logs.device)
    logs = torch.where(token == EOS, (before - highest)[:, -1:], logs)
    logs = logs.masked_fill((token == BLANK) | (token == BOS), LOWEST).log_softmax(-1).clamp_min(NEVER)
    closed = torch.full_like(logs, NEVER).masked_fill(token == EOS, 0.0)  # a prefix without any path ends
    return torch.where(highest < BEYOND / 2, closed, logs).float()


def advance_paths(
    fixed: dict[str, Tensor], past: dict[str, Tensor], tokens: Tensor, mask: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The state after tokens (R T; only those in the mask count), and the scores R T V."""
    logits = []
    for step in range(tokens.size(1)):
        after = extend_paths(fixed, past, tokens[:, step])
        if mask is not None:
            after = {name: torch.where(_like(mask[:, step], one), one, past[name]) for name, one in after.items()}
        past = after
        logits.append(next_scores(fixed, past))
    return past, torch.stack(logits, 1)


def _sums(logs: Tensor) -> Tensor:
    """Running sums from 0: R S -> R S+1."""
    return torch.nn.functional.pad(logs.cumsum(1), (1, 0))


def _carried(inputs: Tensor, sums: Tensor) -> Tensor:
    """log y_t of y_t = (y_{t-1} + x_{t-1}) p_t with y_0 = 0, for log x (R S+1) and running sums of log p."""
    # y_t = P_t sum_{u < t} x_u / P_u, with P the running product: all rows at once, in logarithms.
    carried = sums[:, 1:] + torch.logcumsumexp(inputs[:, :-1] - sums[:, :-1], 1)
    return torch.nn.functional.pad(carried, (1, 0), value=LOWEST).clamp_min(LOWEST)


def _sources(fixed: dict[str, Tensor], past: dict[str, Tensor]) -> Tensor:
    """R: the index of the source of each prefix."""
    beams = len(past["last"]) // len(fixed["rows"])
    return torch.arange(len(past["last"]), device=past["last"].device) // beams


def _like(flags: Tensor, values: Tensor) -> Tensor:
    return flags if values.dim() == 1 else flags[:, None]


class JointCTCDecoder(Decoder):
    """p(w) ~ p_decoder(w) ^ (1 - weight) p_paths(w) ^ weight, p_paths the CTC prefix probability (Watanabe 2017)

    p_paths is the sum over all alignment paths with the prefix so far (decoders/ctc.py). The combined scores
    of a step are normalised. In training the logits are those of the decoder, as the two losses are separate: see
    objectives/ctc.py.
    """

    def __init__(self, decoder: Decoder, memory_width: int, size: int, *, weight: float = 0.3) -> None:
        super().__init__()
        self.decoder, self.weight = decoder, weight
        self.ctc_proj = dense(memory_width, size)

    @property
    def attention_shape(self) -> tuple[int, int]:
        return self.decoder.attention_shape

    def start(self, memory: Memory) -> State:
        state = self.decoder.start(memory)
        paths = read_paths(self.ctc_proj(memory.values), memory.mask)
        return State({**state.fixed, **paths}, {**state.past, **begin_paths(paths)}, state.beams)

    def memory_mask(self, state: State) -> Tensor | None:
        return self.decoder.memory_mask(state)

    def reserve(self, state: State, more: int, beams: int) -> State:
        return _with_prefixes(self.decoder.reserve(_inner(state), more, beams), _prefixes(state))

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        step = self.decoder.advance(tokens, _inner(state), mask, with_attention=with_attention)
        if self.training or not self.weight:
            return replace(step, state=_with_prefixes(step.state, _prefixes(state)))
        prefixes, ctc_scores = advance_paths(state.fixed, _prefixes(state), tokens, mask)
        logits = (1 - self.weight) * step.logits.float().log_softmax(-1) + self.weight * ctc_scores
        return replace(step, logits=logits, state=_with_prefixes(step.state, prefixes))


def _prefixes(state: State) -> dict[str, Tree]:
    return {name: state.past[name] for name in PREFIX_STATE}


def _inner(state: State) -> State:
    """The state of the inner decoder."""
    return replace(state, past={name: tree for name, tree in state.past.items() if name not in PREFIX_STATE})


def _with_prefixes(state: State, prefixes: dict[str, Tree]) -> State:
    return replace(state, past={**state.past, **prefixes})
