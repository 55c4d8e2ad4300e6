"""Streams of a loaded model: tokens as they are generated, and simultaneous translation of words that arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transduce.data.batching import batch_by_length
from transduce.decoding.simultaneous import source_prefix, stream_alignatt, stream_wait_k, wait_k_search
from transduce.errors import InputError
from transduce.flow import EOS, Batch
from transduce.inference.long_sources import separator
from transduce.model import DecoderModel

if TYPE_CHECKING:
    from transduce.inference.model import Model


@dataclass(frozen=True)
class StreamedToken:
    """One output token of a stream. The texts of all tokens joined are the output."""

    text: str  # what the token adds to the output; empty while it is not certain, and for </s>
    token: str
    score: float  # its log-probability
    delay: int  # source tokens that had been read, </s> included

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class SimulatedOutput:
    """A simultaneous output of a whole text."""

    text: str
    token_scores: tuple[float, ...]
    delays: tuple[int, ...]  # of each token: source tokens that had been read
    source_length: int  # tokens of the source, </s> included


def stream_tokens(model: Model, text: str, **settings: Any) -> Iterator[StreamedToken]:
    """The output of one source, token by token, each as soon as all hypotheses of the search have it.

    The texts joined are the output of `generate`; a long source is read in parts, one after the other.
    """
    if not isinstance(text, str):
        raise InputError(f"stream_tokens takes one text, not {text!r}", remedy='write model.stream_tokens("...")')
    chosen = model.settings(**settings)
    if model.sourceless or chosen.strategy_kind == "mbr" or chosen.protect:
        raise InputError(
            "tokens cannot be streamed without a source, or with a strategy that changes whole outputs",
            remedy="use generate for language models, minimum Bayes risk and protected spans",
        )
    parts, sources, _ = model.source_parts([text], chosen)
    written, before = "", ""
    for part, source in zip(parts, sources, strict=True):
        ids, own, unknown = list[int](), "", model.source_encoding.oov_words(part.text)
        for token, score in model.searcher.stream(source, chosen, part.number):
            if token != EOS:
                ids.append(token)
            now = model.target.decode(ids, unknown)
            added, own = (now[len(own) :], now) if now.startswith(own) else ("", own)
            lead = separator(written, before, added) if added and added == own else ""
            written += lead + added
            yield StreamedToken(lead + added, model.target.piece(token), score, len(source))
        before = part.source


def check_streaming(model: Model) -> None:
    """Simultaneous translation is for models that map a text to a text."""
    if model.sourceless or not model.source_encoding.reads_text or not isinstance(model.network, DecoderModel):
        raise InputError(
            "simultaneous translation needs a model that reads and generates text",
            remedy="give a run of an encoder and a decoder, or of a decoder with a source",
        )


def stream_translate(
    model: Model, words: Iterable[str], k: int = 3, alignatt: int | None = None, **settings: Any
) -> Iterator[StreamedToken]:
    """The output tokens of one source whose words arrive one by one, each as soon as the policy may write it.

    The words are read as they are needed. Wait-k: output token t is written when k + t - 1 source tokens have arrived.
    With `alignatt`: when it attends to none of the last `alignatt` source tokens.
    """
    check_streaming(model)
    if isinstance(words, str):
        raise InputError("stream_translate takes words", remedy="write model.stream_translate(text.split())")
    chosen, arrived = model.settings(**settings), list[str]()

    def prefixes() -> Iterator[tuple[Batch, bool]]:
        for word in words:
            arrived.append(word)
            yield _batch(model, arrived, complete=False), False
        if arrived:
            yield _batch(model, arrived, complete=True), True

    ids, before = list[int](), ""
    stream, limit = (stream_wait_k, k) if alignatt is None else (stream_alignatt, alignatt)
    for step in stream(model.network, prefixes(), limit, min(chosen.max_length, model.max_target_tokens)):
        if step.token != EOS:
            ids.append(step.token)
        now = model.target.decode(ids, model.source_encoding.oov_words(" ".join(arrived)))
        added = now[len(before) :] if now.startswith(before) else ""
        before = before + added
        yield StreamedToken(added, model.target.piece(step.token), step.log_prob, step.delay)


def _batch(model: Model, words: Sequence[str], *, complete: bool) -> Batch:
    """One source of these words; an incomplete one is without </s> and what else ends every source."""
    (source,) = model.source_encoding.encode([" ".join(words)])
    batch = model.source_encoding.batch([source]).to(model.device)
    return batch if complete else source_prefix(batch, len(source) - len(model.source.suffix))


@torch.inference_mode()
def simulate_wait_k(model: Model, texts: Sequence[str], k: int, **settings: Any) -> list[SimulatedOutput]:
    """The wait-k outputs of whole texts, in batches, as if their tokens arrived one by one."""
    check_streaming(model)
    chosen, found = model.settings(**settings), dict[int, SimulatedOutput]()
    sources = model.source_encoding.encode(list(texts))
    longest = min(chosen.max_length, model.max_target_tokens)
    for rows in batch_by_length([len(one) + 1 for one in sources], chosen.batch_tokens):
        batch = model.source_encoding.batch([sources[row] for row in rows]).to(model.device)
        outputs = wait_k_search(model.network, batch, k, torch.full((len(rows),), longest))
        for row, one, delays in zip(rows, *outputs, strict=True):
            text = model.target.decode(one.text_ids, model.source_encoding.oov_words(texts[row]))
            found[row] = SimulatedOutput(text, one.token_scores, tuple(delays), len(sources[row]) + 1)
    return [found[row] for row in range(len(texts))]


def simulate_alignatt(model: Model, texts: Sequence[str], guard: int, **settings: Any) -> list[SimulatedOutput]:
    """The AlignAtt outputs of whole texts, as if their tokens arrived one by one."""
    check_streaming(model)
    chosen, found = model.settings(**settings), []
    longest = min(chosen.max_length, model.max_target_tokens)
    for text, source in zip(texts, model.source_encoding.encode(list(texts)), strict=True):
        batch = model.source_encoding.batch([source]).to(model.device)
        size = len(source) + 1
        prefixes = ((source_prefix(batch, length), length == size) for length in range(1, size + 1))
        steps = list(stream_alignatt(model.network, prefixes, guard, longest))
        ids = [step.token for step in steps if step.token != EOS]
        output = model.target.decode(ids, model.source_encoding.oov_words(text))
        scores, delays = tuple(step.log_prob for step in steps), tuple(step.delay for step in steps)
        found.append(SimulatedOutput(output, scores, delays, size))
    return found
