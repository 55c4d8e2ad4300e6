"""Joint CTC/attention decoding: a decoder whose scores are combined with CTC prefix scores."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from transduce.contracts import Decoder
from transduce.decoding.ctc_prefix import advance_paths, begin_paths, read_paths
from transduce.flow import Memory, State, Step, Tree
from transduce.layers.feed_forward import dense

PREFIX_STATE = ("blank", "label", "last")  # of CTC, for each hypothesis


class JointCTCDecoder(Decoder):
    """p(w) ~ p_decoder(w) ^ (1 - weight) p_paths(w) ^ weight, p_paths the CTC prefix probability (Watanabe 2017)

    p_paths is the sum over all alignment paths with the prefix so far (decoding/ctc_prefix.py). The combined scores
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
