"""Chosen paths in, `Explained` out: each path is read once more, with the attention of every layer and head.

Reading a path whole gives what writing it step by step gave, so the weights are exact, whatever search chose it and
whatever kernel it was trained with.
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
from transduce.explain.html import Explained
from transduce.flow import BOS, Batch, Hypothesis, Padded, Step
from transduce.modalities.source_encoding import NO_WORD, EncodedSource, SourceEncoding, SourceLabels
from transduce.model import Transducer


@dataclass(frozen=True)
class Path:
    """A source and the hypothesis that won for it."""

    text: str
    source: EncodedSource | None  # None: the model reads no source
    hypothesis: Hypothesis
    nbest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Rereader:
    """A network and how its sources and targets are read; `facts` is what a page may say about it."""

    network: Transducer
    source_encoding: SourceEncoding
    target: Tokenizer
    facts: Mapping[str, Any]

    def __call__(self, paths: Sequence[Path], budget: int) -> list[Explained]:
        """In order, whatever batches they are read in."""
        said = [self._said(path) for path in paths]
        seen = [self._seen(path, one) for path, one in zip(paths, said, strict=True)]
        sizes = [(len(one.tokens), len(path.hypothesis.ids)) for one, path in zip(seen, paths, strict=True)]
        weights: list[np.ndarray | None] = [None] * len(paths)
        for rows in batch_by_length(np.array(sizes).reshape(-1, 2), budget):
            looks = self._look([paths[row] for row in rows])
            for row, look in zip(rows, looks, strict=True):
                weights[row] = None if look is None else look[:, :, : sizes[row][1], : sizes[row][0]]
        return [self._explain(*one) for one in zip(paths, said, seen, weights, strict=True)]

    def _said(self, path: Path) -> SourceLabels:
        """What was written."""
        words, unknown = path.hypothesis.text_ids, self.source_encoding.oov_words(path.text)
        output = self.target.decode(words, unknown)
        spans, closing = spans_of(self.target, words, output, unknown), ["</s>"] * path.hypothesis.complete
        shown = zip(spans, words, strict=True)
        tokens = [output[begin:end] or self.target.piece(number) for (begin, end), number in shown]
        return SourceLabels(
            [*tokens, *closing],
            [*self.target.word_ids(spans, output), *[NO_WORD for _ in closing]],
            [output[begin:end] for begin, end in self.target.word_spans(output)],
        )

    def _seen(self, path: Path, said: SourceLabels) -> SourceLabels:
        """What was looked at: the source; without one, what was read before: <s> and the output but its last token."""
        if path.source is not None:
            return self.source_encoding.describe(path.text, path.source, getattr(self.network, "encoder", None))
        return SourceLabels(["<s>", *said.tokens[:-1]], [NO_WORD, *said.words[:-1]], said.labels)

    @torch.inference_mode()
    def _look(self, paths: Sequence[Path]) -> list[np.ndarray] | list[None]:
        """L H T S of each path, padded; None where the model does not attend to the source.

        Without a source it is the look at the own past, L H T T, <s> first.
        """
        device = next(self.network.parameters()).device
        tokens = Padded.from_rows([[BOS, *path.hypothesis.ids[:-1]] for path in paths]).to(device)
        batch = Batch(target=tokens)
        if paths[0].source is not None:
            batch = self.source_encoding.batch([path.source for path in paths]).to(device)
        step = self.network.advance(tokens.values, self.network.start(batch), with_attention=True)
        weights = _over_source(step, batch)
        return [None] * len(paths) if weights is None else list(weights.float().cpu().numpy())

    def _explain(self, path: Path, said: SourceLabels, seen: SourceLabels, weights: np.ndarray | None) -> Explained:
        hypothesis = path.hypothesis
        return Explained(
            source=path.text,
            output=self.target.decode(hypothesis.text_ids, self.source_encoding.oov_words(path.text)),
            source_tokens=seen.tokens,
            target_tokens=said.tokens,
            source_words=seen.words,
            target_words=said.words,
            token_scores=hypothesis.token_scores,
            score=hypothesis.score,
            attention=weights,
            nbest=path.nbest,
            facts=self.facts,
            source_labels=seen.labels,
            target_labels=said.labels,
            scenes=seen.visuals,
        )


def _over_source(step: Step, batch: Batch) -> Tensor | None:
    assert step.attention is not None
    if batch.source is None:
        return step.attention.past
    if step.attention.cross is not None or step.attention.past is None:
        return step.attention.cross
    # A decoder alone has the source in its past: its share of the look, brought to 1 for the picture.
    weights = step.attention.past[..., : batch.source.values.size(1)]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def spans_of(tokenizer: Tokenizer, ids: Sequence[int], text: str, unknown: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Where each generated token stands in the decoded text."""
    ends = [min(len(tokenizer.decode(ids[: number + 1], unknown)), len(text)) for number in range(len(ids))]
    begins = [0, *ends][:-1]  # none where nothing was said
    return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
