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

from transduce.data.batching import collate, ordered
from transduce.data.text import Tokenizer
from transduce.explain.alignment import END
from transduce.explain.page import Explained
from transduce.flow import BOS, Batch, Hypothesis, Padded, Step
from transduce.model import Transducer


@dataclass(frozen=True)
class Path:
    """A source and the hypothesis that won for it."""

    text: str
    source: tuple[int, ...]
    hypothesis: Hypothesis
    nbest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Rereader:
    """A network with its tokenizers; `facts` is what a page may say about it."""

    network: Transducer
    source: Tokenizer
    target: Tokenizer
    facts: Mapping[str, Any]

    def __call__(self, paths: Sequence[Path], budget: int) -> list[Explained]:
        """In order, whatever batches they are read in."""
        lengths = np.array([(len(path.source) + 1, len(path.hypothesis.ids)) for path in paths]).reshape(-1, 2)
        weights: list[np.ndarray | None] = [None] * len(paths)
        for rows in ordered(lengths, budget):
            for row, seen in zip(rows, self._look([paths[row] for row in rows]), strict=True):
                weights[row] = seen
        return [self._explain(path, seen) for path, seen in zip(paths, weights, strict=True)]

    @torch.inference_mode()
    def _look(self, paths: Sequence[Path]) -> list[np.ndarray | None]:
        """L H T S of each path; None where the model does not attend to the source."""
        device = next(self.network.parameters()).device
        batch = collate([(path.source, None) for path in paths], range(len(paths))).to(device)
        tokens = Padded.from_rows([[BOS, *path.hypothesis.ids[:-1]] for path in paths]).to(device)
        step = self.network.advance(tokens.values, self.network.start(batch), with_attention=True)
        weights = _over_source(step, batch)
        if weights is None:
            return [None] * len(paths)
        sizes = [(len(path.hypothesis.ids), len(path.source) + 1) for path in paths]
        rows = weights.float().cpu().numpy()
        return [row[:, :, :target, :source] for row, (target, source) in zip(rows, sizes, strict=True)]

    def _explain(self, path: Path, weights: np.ndarray | None) -> Explained:
        text, hypothesis, count = path.text, path.hypothesis, len(path.source)
        encoded = self.source.encode(text)
        output = self.target.decode(hypothesis.words)
        spans = spans_of(self.target, hypothesis.words, output)
        closing = ["</s>"] * hypothesis.complete
        return Explained(
            source=text,
            output=output,
            source_tokens=[*_shown(text, encoded.offsets, encoded.pieces)[:count], "</s>"],
            target_tokens=[*_shown(output, spans, [self.target.piece(one) for one in hypothesis.words]), *closing],
            source_words=[*self.source.word_of(encoded, text)[:count], END],
            target_words=[*self.target.word_of(spans, output), *[END for _ in closing]],
            token_scores=hypothesis.token_scores,
            score=hypothesis.score,
            attention=weights,
            nbest=path.nbest,
            facts=self.facts,
            source_labels=[text[begin:end] for begin, end in self.source.words(text)],
            target_labels=[output[begin:end] for begin, end in self.target.words(output)],
        )


def _over_source(step: Step, batch: Batch) -> Tensor | None:
    assert step.attention is not None
    assert batch.source is not None
    if step.attention.cross is not None or step.attention.past is None:
        return step.attention.cross
    # A decoder alone has the source in its past: its share of the look, brought to 1 for the picture.
    weights = step.attention.past[..., : batch.source.values.size(1)]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def _shown(text: str, spans: Sequence[tuple[int, int]], pieces: Sequence[str]) -> list[str]:
    """Tokens as they stand in the text; the piece itself where it covers no character of its own."""
    return [text[begin:end] or piece for (begin, end), piece in zip(spans, pieces, strict=True)]


def spans_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Where each generated token stands in the decoded text."""
    ends = [min(len(tokenizer.decode(ids[: number + 1])), len(text)) for number in range(len(ids))]
    begins = [0, *ends[:-1]]
    return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
