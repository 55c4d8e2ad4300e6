"""Exact attention weights of finished hypotheses, by teacher forcing.

A forward pass over a whole hypothesis gives the same weights as its generation step by step. They are therefore exact
for any search strategy and any attention kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.data.batching import batch_by_length
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.explain.attention_map import Explanation
from transduce.flow import BOS, Batch, Hypothesis, Padded, Step
from transduce.modalities.source_encoding import NO_WORD, EncodedSource, SourceEncoding, SourceLabels
from transduce.model import Transducer


@dataclass(frozen=True)
class DecodedSource:
    """A source and its best hypothesis."""

    text: str
    source: EncodedSource | None  # None for a language model
    hypothesis: Hypothesis
    nbest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Explainer:
    """A model with its source encoding and target tokenizer; computes the explanations of decoded sources."""

    network: Transducer
    source_encoding: SourceEncoding
    target: Tokenizer
    model_info: Mapping[str, Any]

    def __call__(self, decoded: Sequence[DecodedSource], batch_tokens: int) -> list[Explanation]:
        """The explanations in order, computed in batches of similar length."""
        targets = [self._target_labels(one) for one in decoded]
        sources = [self._source_labels(*pair) for pair in zip(decoded, targets, strict=True)]
        sizes = [(len(labels.tokens), len(one.hypothesis.ids)) for labels, one in zip(sources, decoded, strict=True)]
        weights: list[np.ndarray | None] = [None] * len(decoded)
        for rows in batch_by_length(np.array(sizes).reshape(-1, 2), batch_tokens):
            padded = self._attention([decoded[row] for row in rows])
            for row, values in zip(rows, padded, strict=True):
                weights[row] = None if values is None else values[:, :, : sizes[row][1], : sizes[row][0]]
        return [self._explanation(*parts) for parts in zip(decoded, targets, sources, weights, strict=True)]

    def _target_labels(self, decoded: DecodedSource) -> SourceLabels:
        ids, unknown = decoded.hypothesis.text_ids, self.source_encoding.oov_words(decoded.text)
        output = self.target.decode(ids, unknown)
        spans, end = token_spans(self.target, ids, output, unknown), ["</s>"] * decoded.hypothesis.complete
        tokens = [output[begin:stop] or self.target.piece(id_) for (begin, stop), id_ in zip(spans, ids, strict=True)]
        return SourceLabels(
            [*tokens, *end],
            [*self.target.word_ids(spans, output), *[NO_WORD for _ in end]],
            [output[begin:stop] for begin, stop in self.target.word_spans(output)],
        )

    def _source_labels(self, decoded: DecodedSource, target: SourceLabels) -> SourceLabels:
        """The labels of the memory; for a language model those of its own input: <s> and all tokens but the last."""
        if decoded.source is not None:
            return self.source_encoding.describe(decoded.text, decoded.source, getattr(self.network, "encoder", None))
        return SourceLabels(["<s>", *target.tokens[:-1]], [NO_WORD, *target.words[:-1]], target.labels)

    @torch.inference_mode()
    def _attention(self, decoded: Sequence[DecodedSource]) -> list[np.ndarray] | list[None]:
        """L H T S of each hypothesis, padded; None if the model does not attend to the source.

        For a language model it is the self-attention, L H T T, <s> first.
        """
        device = next(self.network.parameters()).device
        tokens = Padded.from_rows([[BOS, *one.hypothesis.ids[:-1]] for one in decoded]).to(device)
        batch = Batch(target=tokens)
        if decoded[0].source is not None:
            batch = self.source_encoding.batch([one.source for one in decoded]).to(device)
        step = self.network.advance(tokens.values, self.network.start(batch), with_attention=True)
        weights = _source_attention(step, batch)
        return [None] * len(decoded) if weights is None else list(weights.float().cpu().numpy())

    def _explanation(
        self, decoded: DecodedSource, target: SourceLabels, source: SourceLabels, weights: np.ndarray | None
    ) -> Explanation:
        hypothesis = decoded.hypothesis
        return Explanation(
            source=decoded.text,
            output=self.target.decode(hypothesis.text_ids, self.source_encoding.oov_words(decoded.text)),
            source_tokens=source.tokens,
            target_tokens=target.tokens,
            source_words=source.words,
            target_words=target.words,
            token_scores=hypothesis.token_scores,
            score=hypothesis.score,
            attention=weights,
            nbest=decoded.nbest,
            model_info=self.model_info,
            source_labels=source.labels,
            target_labels=target.labels,
            visual_sources=source.visuals,
        )


def _source_attention(step: Step, batch: Batch) -> Tensor | None:
    assert step.attention is not None
    if batch.source is None:
        return step.attention.past
    if step.attention.cross is not None or step.attention.past is None:
        return step.attention.cross
    # A decoder-only model has the source in its past: the weights on it, renormalised to sum to 1.
    weights = step.attention.past[..., : batch.source.values.size(1)]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def token_spans(
    tokenizer: Tokenizer, ids: Sequence[int], text: str, unknown: Sequence[str] = ()
) -> list[tuple[int, int]]:
    """The character span of each generated token in the decoded text."""
    ends = [min(len(tokenizer.decode(ids[: number + 1], unknown)), len(text)) for number in range(len(ids))]
    begins = [0, *ends][:-1]  # empty for an empty output
    return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
