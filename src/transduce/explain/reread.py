"""Chosen paths in, `Explained` out: each path is read once more, with the attention of every layer and head.

Reading a path whole gives what writing it step by step gave, so the weights are exact, whatever search chose it and
whatever kernel it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.data.batching import collate, ordered
from transduce.data.text import Tokenizer
from transduce.data.unknowns import unknown_words
from transduce.explain.alignment import END
from transduce.explain.page import Explained
from transduce.flow import BOS, Batch, Hypothesis, Padded, Step
from transduce.model import Transducer


@dataclass(frozen=True)
class Path:
    """A source and the hypothesis that won for it."""

    text: str
    source: tuple[int, ...] | None  # None: the model reads no source
    hypothesis: Hypothesis
    nbest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Rereader:
    """A network with its tokenizers; `facts` is what a page may say about it."""

    network: Transducer
    source: Tokenizer
    target: Tokenizer
    facts: Mapping[str, Any]
    masked: bool = False  # `<mask>` stands for a token of the source

    def __call__(self, paths: Sequence[Path], budget: int) -> list[Explained]:
        """In order, whatever batches they are read in."""
        lengths = np.array([(len(path.source or ()) + 1, len(path.hypothesis.ids)) for path in paths]).reshape(-1, 2)
        weights: list[np.ndarray | None] = [None] * len(paths)
        for rows in ordered(lengths, budget):
            for row, seen in zip(rows, self._look([paths[row] for row in rows]), strict=True):
                weights[row] = seen
        return [self._explain(path, seen) for path, seen in zip(paths, weights, strict=True)]

    @torch.inference_mode()
    def _look(self, paths: Sequence[Path]) -> list[np.ndarray | None]:
        """L H T S of each path; None where the model does not attend to the source.

        Without a source it is the look at the own past, L H T T, <s> first.
        """
        device = next(self.network.parameters()).device
        tokens = Padded.from_rows([[BOS, *path.hypothesis.ids[:-1]] for path in paths]).to(device)
        batch = Batch(target=tokens)
        if paths[0].source is not None:
            batch = collate([(path.source, None) for path in paths], range(len(paths))).to(device)
        step = self.network.advance(tokens.values, self.network.start(batch), with_attention=True)
        weights = _over_source(step, batch)
        if weights is None:
            return [None] * len(paths)
        targets = [len(path.hypothesis.ids) for path in paths]
        sources = [n if path.source is None else len(path.source) + 1 for path, n in zip(paths, targets, strict=True)]
        sizes = zip(targets, sources, strict=True)
        rows = weights.float().cpu().numpy()
        return [row[:, :, :target, :source] for row, (target, source) in zip(rows, sizes, strict=True)]

    def _explain(self, path: Path, weights: np.ndarray | None) -> Explained:
        text, hypothesis, count = path.text, path.hypothesis, len(path.source or ())
        encoded = self.source.encode_source(text, masked=self.masked)
        unknown = unknown_words(self.source, text)
        output = self.target.decode(hypothesis.words, unknown)
        spans = spans_of(self.target, hypothesis.words, output, unknown)
        closing = ["</s>"] * hypothesis.complete
        explained = Explained(
            source=text,
            output=output,
            source_tokens=[*_shown(text, encoded.offsets, encoded.pieces)[:count], "</s>"],
            target_tokens=[*_shown(output, spans, [self.target.piece(one) for one in hypothesis.words]), *closing],
            source_words=[*self.source.word_of(encoded, text)[:count], END],
            target_words=[*self.target.word_of(spans, output), *[END for _ in closing]],
            token_scores=hypothesis.token_scores,
            score=hypothesis.score,
            attention=weights if path.source is not None else None,
            nbest=path.nbest,
            facts=self.facts,
            source_labels=[text[begin:end] for begin, end in self.source.words(text)],
            target_labels=[output[begin:end] for begin, end in self.target.words(output)],
        )
        return explained if path.source is not None else _over_itself(explained, weights)


def _over_itself(explained: Explained, weights: np.ndarray | None) -> Explained:
    """Without a source, what is looked at is what was read before: <s> and the output without its last token."""
    return replace(
        explained,
        source_tokens=["<s>", *explained.target_tokens[:-1]],
        source_words=[END, *explained.target_words[:-1]],
        source_labels=explained.target_labels,
        attention=weights,
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


def _shown(text: str, spans: Sequence[tuple[int, int]], pieces: Sequence[str]) -> list[str]:
    """Tokens as they stand in the text; the piece itself where it covers no character of its own."""
    return [text[begin:end] or piece for (begin, end), piece in zip(spans, pieces, strict=True)]


def spans_of(tokenizer: Tokenizer, ids: Sequence[int], text: str, unknown: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Where each generated token stands in the decoded text."""
    ends = [min(len(tokenizer.decode(ids[: number + 1], unknown)), len(text)) for number in range(len(ids))]
    begins = [0, *ends[:-1]]
    return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
