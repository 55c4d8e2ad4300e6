"""Attention maps between tokens or words, and the explanation of an output.

The weights come from a forward pass over the whole hypothesis (teacher forcing), which gives the same weights as its
generation step by step. They are therefore exact for any search strategy and any attention kernel.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from transduce.contracts import Encoder, VisualSource
from transduce.data.batching import batch_by_length
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.explain.attribution import AttributionInput, attribute, source_attention
from transduce.explain.faithfulness import Faithfulness, UniformSwap, measure, seed_variance, uniform_swap
from transduce.flow import BOS, Batch, Hypothesis, Padded
from transduce.modalities.source_encoding import NO_WORD, EncodedSource, SourceEncoding, SourceLabels
from transduce.model import NEVER, Transducer

ReadAt = Literal["output", "input"]
READ_AT: dict[ReadAt, str] = {  # the step at which the attention of a target token is read
    "output": "at the step that outputs each token",
    "input": "at the step that reads each token as input (Chen et al. 2020)",
}
Link = tuple[int, int]  # (source position, target position), both from 0


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weight of every target position on every source position, with their tokens and words."""

    weights: np.ndarray  # T S: each row sums to 1 (less where </s> was left out)
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    source_words: Sequence[int]  # token -> word, -1 for </s>
    target_words: Sequence[int]
    source_labels: Sequence[str] = field(default=())  # the words; by default their joined tokens
    target_labels: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        shape = (len(self.target_tokens), len(self.source_tokens))
        if self.weights.shape != shape:
            raise ValueError(
                f"weights of shape {self.weights.shape} for {shape[0]} target and {shape[1]} source tokens"
            )
        for side in ("source", "target"):
            tokens, words = getattr(self, f"{side}_tokens"), getattr(self, f"{side}_words")
            if len(tokens) != len(words):
                raise ValueError(f"{len(tokens)} {side} tokens but {len(words)} word numbers")
            if not getattr(self, f"{side}_labels"):
                object.__setattr__(self, f"{side}_labels", join_tokens(tokens, words))
            elif max(words, default=NO_WORD) >= len(getattr(self, f"{side}_labels")):
                raise ValueError(f"a {side} token belongs to a word that has no label")


@dataclass(frozen=True, eq=False)
class Explanation:
    """A source, the output of the model, its scores and its attention. Tokens include the closing </s>."""

    source: str
    output: str
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    source_words: Sequence[int]  # token -> word, -1 for </s>
    target_words: Sequence[int]
    token_scores: Sequence[float]  # natural logarithms, one per target token
    score: float  # their sum
    attention: np.ndarray | None  # L H T S; None if the decoder has no attention
    nbest: Sequence[tuple[str, float]] = ()
    model_info: Mapping[str, Any] = field(default_factory=dict)  # facts about the model, for the HTML page
    source_labels: Sequence[str] = ()  # the words; by default their joined tokens
    target_labels: Sequence[str] = ()
    visual_sources: Sequence[VisualSource] = ()  # what can be drawn of a source that is not text
    attributions: Mapping[str, np.ndarray] = field(default_factory=dict)  # T S, by method: see `attribution.METHODS`
    faithfulness: Mapping[str, Faithfulness] = field(default_factory=dict)  # of each of the attributions
    self_attention: np.ndarray | None = None  # L H S S, of an encoder with a head
    uniform_swap: UniformSwap | None = None  # what the attention is worth, computed with attributions
    read_at: ReadAt = "output"  # the step at which `map` reads the attention of a target token; see `READ_AT`

    def __post_init__(self) -> None:
        shape = (len(self.target_tokens), len(self.source_tokens))
        if self.attention is not None and (self.attention.ndim != 4 or self.attention.shape[2:] != shape):
            raise ValueError(f"attention of shape {self.attention.shape}, tokens require (layers, heads, {shape})")
        if len(self.token_scores) != shape[0]:
            raise ValueError(f"{len(self.token_scores)} token scores for {shape[0]} tokens")
        if not math.isclose(sum(self.token_scores), self.score, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"the token scores sum to {sum(self.token_scores)}, the score is {self.score}")
        if not self.source_labels:
            object.__setattr__(self, "source_labels", join_tokens(self.source_tokens, self.source_words))
        if not self.target_labels:
            object.__setattr__(self, "target_labels", join_tokens(self.target_tokens, self.target_words))

    def _repr_html_(self) -> str:
        """The page of this explanation, as a notebook shows it."""
        from transduce.explain.html import notebook_frame

        return notebook_frame(self)

    def show(self) -> None:
        """Displays the explanation: inline in a notebook, else its map, or its output, in the terminal."""
        from rich.console import Console

        from transduce.explain.html import displayed
        from transduce.explain.terminal import draw

        if displayed(self):
            return
        console = Console()
        console.print(f"{self.source} -> {self.output}", highlight=False, markup=False)
        if self.rows is not None:
            draw(to_words(self.map(), keep_end=True), console)
        if self.attributions:
            console.print(self.verdict, highlight=False, markup=False)

    @property
    def outputs(self) -> list[int]:
        """The target tokens without the closing </s>."""
        closed = bool(self.target_tokens) and self.target_tokens[-1] == "</s>" and self.target_words[-1] == NO_WORD
        return list(range(len(self.target_tokens) - closed))

    @property
    def rows(self) -> MapRows | None:
        """The rows of the attention map over the source; None where there is nothing to show."""
        if self.attention is not None:
            return MapRows(
                _read_at(self.attention, self.read_at), self.target_tokens, self.target_words, self.target_labels
            )
        return _encoder_rows(self)

    def map(self, layer: int | Literal["mean", "last"] = "mean", head: int | Literal["mean"] = "mean") -> AttentionMap:
        """The attention map of one layer and head, or of their mean.

        For an encoder with a head the first rows are the attributions of its outputs, the others its self-attention.
        """
        rows = self.rows or MapRows(np.zeros((0, 0, 0, 0)), (), (), ())
        return AttentionMap(
            combine_heads(rows.weights, layer, head),
            self.source_tokens,
            rows.tokens,
            self.source_words,
            rows.words,
            self.source_labels,
            rows.labels,
        )

    def to_json(self) -> dict[str, Any]:
        """Texts, tokens, scores, attention (L H T S), attributions (T S) and their measures."""
        return {
            "source": self.source,
            "output": self.output,
            "source_tokens": list(self.source_tokens),
            "target_tokens": list(self.target_tokens),
            "token_scores": list(self.token_scores),
            "score": self.score,
            "attention": None if self.attention is None else self.attention.tolist(),
            "attributions": {name: one.tolist() for name, one in self.attributions.items()},
            "faithfulness": {name: {**asdict(one), "verdict": one.verdict} for name, one in self.faithfulness.items()},
            "uniform_swap": None if self.uniform_swap is None else self.uniform_swap.to_json(),
            "read_at": self.read_at,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        """How far the maps of this explanation can be trusted, in one sentence each; what was not measured says so."""
        found = [f"{name}: {one.verdict}" for name, one in self.faithfulness.items()]
        if self.uniform_swap is not None:
            found.append(self.uniform_swap.verdict)
        return " ".join(found) or "Not measured: attention alone does not say what an output depends on."

    def attribution_map(self, method: str) -> AttentionMap:
        """The attributions by one method, each row as shares of its absolute values."""
        if method not in self.attributions:
            raise InputError(
                f"this explanation has no attribution by {method!r}",
                remedy=f"ask for it: model.explain(source, methods=[{method!r}])",
            )
        shares = np.abs(self.attributions[method])
        shares = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-12)
        labels = (self.source_words, self.target_words, self.source_labels, self.target_labels)
        return AttentionMap(shares, self.source_tokens, self.target_tokens, *labels)


@dataclass(frozen=True, eq=False)
class MapRows:
    """The rows of a map over the source, with their tokens and words."""

    weights: np.ndarray  # L H R S: each row sums to 1
    tokens: Sequence[str]
    words: Sequence[int]
    labels: Sequence[str]


def _read_at(attention: np.ndarray, step: ReadAt) -> np.ndarray:
    """The attention (L H T S) of each target token at the step where it is output, or at the next, where it is input.

    The last token is never input: it keeps the step that outputs it.
    """
    if step == "output":
        return attention
    return np.concatenate((attention[:, :, 1:], attention[:, :, -1:]), 2)


def _encoder_rows(explained: Explanation) -> MapRows | None:
    """The attribution of each output, as shares of their absolute values, and the self-attention of each source row."""
    outputs = explained.outputs
    own, given = explained.self_attention, next(iter(explained.attributions.values()), None)
    if own is None and given is None:
        return None
    parts = [] if own is None else [own]
    tokens, words = ([], []) if own is None else (list(explained.source_tokens), list(explained.source_words))
    if given is not None:
        share = np.abs(given[outputs]) / np.maximum(np.abs(given[outputs]).sum(-1, keepdims=True), 1e-12)
        shape = (1, 1) if own is None else own.shape[:2]
        parts.insert(0, np.broadcast_to(share, (*shape, *share.shape)))
        after = len(explained.target_labels)
        tokens = [*(explained.target_tokens[row] for row in outputs), *tokens]
        words = [*(explained.target_words[row] for row in outputs), *(w if w == NO_WORD else w + after for w in words)]
    labels = [
        *(explained.target_labels if given is not None else ()),
        *(explained.source_labels if own is not None else ()),
    ]
    return MapRows(np.concatenate(parts, 2), tokens, words, labels)


def join_tokens(tokens: Sequence[str], words: Sequence[int]) -> list[str]:
    """The text of each word: its tokens joined."""
    labels = [""] * (max(words, default=NO_WORD) + 1)
    for token, word in zip(tokens, words, strict=True):
        if word != NO_WORD:
            labels[word] += token
    return [label.strip("▁") or label for label in labels]  # the word boundary mark of subword tokenizers


def combine_heads(
    attention: np.ndarray, layer: int | Literal["mean", "last"] = "mean", head: int | Literal["mean"] = "mean"
) -> np.ndarray:
    """One map (T S) from the attention of all layers and heads (L H T S). The mean of rows that sum to 1 sums to 1."""
    if attention.ndim != 4 or 0 in attention.shape[:2]:
        raise InputError(
            "this model has no attention over the source",
            remedy="use a model whose decoder has attention: a Transformer, or a recurrent decoder with a context",
        )
    layers = attention.mean(0) if layer == "mean" else attention[_index("layer", layer, len(attention))]  # H T S
    return np.asarray(layers.mean(0) if head == "mean" else layers[_index("head", head, len(layers))])


def _index(name: str, value: int | str, count: int) -> int:
    index = count - 1 if value == "last" else value
    if not isinstance(index, int) or not -count <= index < count:
        raise InputError(f"no {name} {value!r}: there are {count}", remedy=f"0 to {count - 1}, or mean")
    return index


def to_words(tokens: AttentionMap, keep_end: bool = False) -> AttentionMap:
    """The map between words: summed over the tokens of a source word, averaged over those of a target word.

    The tokens of a source word share the attention of one row, so their weights add up; the tokens of a target word
    are separate rows, so they are averaged. With `keep_end`, tokens outside words (such as </s>) form one last row and
    column, and every row sums to 1; otherwise they are dropped, and a row sums to less.
    """
    source, source_labels = _membership(tokens.source_words, tokens.source_tokens, tokens.source_labels, keep_end)
    target, target_labels = _membership(tokens.target_words, tokens.target_tokens, tokens.target_labels, keep_end)
    target = target / np.maximum(target.sum(0), 1)
    weights = target.T @ tokens.weights @ source
    sources, targets = _word_numbers(tokens.source_labels, source), _word_numbers(tokens.target_labels, target)
    # The labels are those of the words alone, without the row and column of </s>: applied twice, nothing changes.
    names = (tokens.source_labels, tokens.target_labels)
    return AttentionMap(weights, source_labels, target_labels, sources, targets, *names)


def _membership(
    words: Sequence[int], tokens: Sequence[str], labels: Sequence[str], keep_end: bool
) -> tuple[np.ndarray, list[str]]:
    """A 0/1 matrix tokens x words, and the word labels; with `keep_end`, a last column for tokens outside words."""
    outside = [token for token, word in zip(tokens, words, strict=True) if word == NO_WORD]
    member = np.zeros((len(words), len(labels) + 1))
    member[np.arange(len(words)), [len(labels) if word == NO_WORD else word for word in words]] = 1
    if keep_end and outside:
        return member, [*labels, outside[0] if len(set(outside)) == 1 else "other"]
    return member[:, :-1], list(labels)


def _word_numbers(labels: Sequence[str], member: np.ndarray) -> list[int]:
    return [*range(len(labels)), *([NO_WORD] * (member.shape[1] - len(labels)))]


def links(attention: AttentionMap, threshold: float = 0.0) -> list[Link]:
    """Links each target position to the source position with the largest weight, if it reaches `threshold`.

    </s>, where it is in the map, acts as the empty word: positions that attend mostly to it get no link.
    """
    result = []
    for target, row in enumerate(attention.weights):
        if attention.target_words[target] == NO_WORD or not row.size:
            continue
        source = int(row.argmax())
        if attention.source_words[source] != NO_WORD and row[source] > 0 and row[source] >= threshold:
            result.append((source, target))
    return sorted(result)


def visible(text: str) -> str:
    """A label that is safe to draw: blanks are visible, control and direction characters are removed."""
    if text.isspace():
        return "␣" * len(text)
    return "".join(_drawable(character) for character in text)


def _drawable(character: str) -> str:
    if character in "\u200c\u200d":  # joiners: part of the spelling in Persian, Hindi, emoji
        return character
    category = unicodedata.category(character)
    if category == "Cf":  # direction marks and other invisible characters
        return ""
    if category in ("Zs", "Zl", "Zp"):
        return " "
    return "\ufffd" if category.startswith("C") and category != "Co" else character


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
        weights = source_attention(step, batch)
        return [None] * len(decoded) if weights is None else list(weights.float().cpu().numpy())

    def with_attributions(
        self,
        explained: Explanation,
        decoded: DecodedSource,
        methods: Sequence[str],
        *,
        measures: bool = True,
        seeds: Sequence[Explanation] = (),
    ) -> Explanation:
        """The explanation with attributions of the output by these methods, and the measures of each.

        `seeds`: explanations of the same pair by models of other seeds, with the same methods.
        """
        if decoded.source is None:
            raise InputError(
                "a language model has no source to attribute its text to", where="methods", remedy="leave them out"
            )
        batch = self.source_encoding.batch([decoded.source]).to(next(self.network.parameters()).device)
        inputs = AttributionInput(self.network, batch, decoded.hypothesis.ids)
        found = {method: attribute(inputs, method) for method in methods}
        maps = {name: one.numpy() for name, one in found.items()}
        if not measures:
            return replace(explained, attributions=maps)
        reference = found.get("occlusion")
        measured = measure(inputs, found, attribute(inputs, "occlusion") if reference is None else reference)
        if seeds:
            for name, one in measured.items():
                variance = seed_variance([maps[name], *(other.attributions[name] for other in seeds)])
                measured[name] = replace(one, seed_variance=variance)
        return replace(explained, attributions=maps, faithfulness=measured, uniform_swap=uniform_swap(inputs))

    def with_self_attention(self, explained: Explanation, decoded: DecodedSource) -> Explanation:
        """The explanation of an encoder with a head: its self-attention, where its rows are tokens of a text."""
        own = None
        if not explained.visual_sources:
            batch = self.source_encoding.batch([decoded.source]).to(next(self.network.parameters()).device)
            with torch.inference_mode():
                own = cast(Encoder, self.network.encoder)(batch, with_attention=True).attention
        return replace(
            explained,
            self_attention=None if own is None else own[0].float().cpu().numpy(),
            nbest=[(text, score) for text, score in explained.nbest if score > NEVER / 2],  # labels that exist
        )

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


def token_spans(
    tokenizer: Tokenizer, ids: Sequence[int], text: str, unknown: Sequence[str] = ()
) -> list[tuple[int, int]]:
    """The character span of each generated token in the decoded text."""
    ends = [min(len(tokenizer.decode(ids[: number + 1], unknown)), len(text)) for number in range(len(ids))]
    begins = [0, *ends][:-1]  # empty for an empty output
    return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
