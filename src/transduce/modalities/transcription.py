"""Transcription of recordings in windows, with timestamps.

A model that hears `seconds` seconds (Whisper, Radford et al. 2022) reads a longer recording window by window. It writes
timestamps around each segment of text. The next window begins where the last complete segment ended; what follows it in
the output is dropped, since the window may have cut a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Encoder
from transduce.errors import InputError, UnreadableError
from transduce.flow import Batch, Hypothesis, Padded
from transduce.modalities.audio import Audio
from transduce.modalities.source_encoding import ModalitySourceEncoding, SourceEncoding

if TYPE_CHECKING:
    from transduce.data.tokenizers.tokenizer import Tokenizer
    from transduce.inference.generation import Searcher
    from transduce.recipe import GenerationRecipe

RECORDINGS = 8  # windows of different recordings in a batch


@dataclass(frozen=True)
class TimedSegment:
    """A part of a transcript, from `start` to `end` in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of a segment, with timestamps in frames from the beginning of the window."""

    ids: tuple[int, ...]
    token_scores: tuple[float, ...]
    start: int
    end: int


@dataclass
class Recording:
    """A recording, and what has been transcribed of it."""

    frames: Tensor  # S F
    number: int  # seeds the samples
    prefix: list[int]
    position: int = 0  # the frame where the next window begins
    spans: list[tuple[int, TokenSpan]] = field(default_factory=list)  # with the first frame of their window
    complete: bool = True  # False: the output of a window was cut at the maximum length

    def window(self, size: int) -> Tensor:
        part = self.frames[self.position : self.position + size]
        return F.pad(part, (0, 0, 0, size - len(part)))

    @property
    def done(self) -> bool:
        return self.position >= len(self.frames)


def recordings_of(encoding: SourceEncoding) -> Audio | None:
    """The modality of sources that are recordings; None: they are not."""
    if not isinstance(encoding, ModalitySourceEncoding) or len(encoding.source.parts) != 1:
        return None
    (modality,) = encoding.source.parts.values()
    return modality if isinstance(modality, Audio) else None


def windowed_recordings(
    encoding: SourceEncoding, sources: Sequence[str], settings: GenerationRecipe, *, timestamps: bool
) -> list[int]:
    """The numbers of the sources that are transcribed in windows: all with timestamps, else those that are long."""
    modality = recordings_of(encoding)
    if settings.timestamps is None or modality is None:
        if timestamps:
            raise InputError("this model has no timestamps", remedy="timestamps are those of Whisper models")
        return []
    return [number for number, one in enumerate(sources) if one.strip() and (timestamps or modality.is_long(one))]


def windowed_options_error(source: str) -> InputError:
    """The error about options that a recording in windows cannot have."""
    return InputError(
        "transcription in windows does not support prefixes, drafts, shortlists or constraints",
        where=source,
        remedy="leave them out",
    )


class Transcriber:
    """Transcribes recordings with a searcher, in windows."""

    def __init__(self, searcher: Searcher, target: Tokenizer, settings: GenerationRecipe) -> None:
        modality = recordings_of(searcher.source_encoding)
        assert modality is not None
        assert settings.timestamps is not None
        self._searcher, self._target, self._modality = searcher, target, modality
        self._first = int(settings.timestamps["first"])
        prefix = tuple(one for one in settings.forced_prefix if one != settings.timestamps["none"])
        rules = {"kind": "timestamps", **settings.timestamps, "after": len(prefix)}
        changes = {"forced_prefix": prefix, "logits_processors": (*settings.logits_processors, rules), "nbest": 1}
        self.settings = settings.model_copy(update=changes)

    @property
    def _frames_per_step(self) -> int:
        """Frames from one timestamp to the next: those of a row of the encoder."""
        encoder = self._searcher.network.get_submodule("encoder")
        assert isinstance(encoder, Encoder)
        return self._modality.window // math.prod(encoder.grids([self._modality.window])[0])

    def __call__(self, sources: Sequence[str], numbers: Sequence[int]) -> list[Recording]:
        """The transcribed recordings, in order."""
        recordings = [self._open(*one) for one in zip(sources, numbers, strict=True)]
        if self.settings.detected_first:
            for some in _groups(recordings):
                for one, prefix in zip(some, self._searcher.detect(self._batch(some), self.settings), strict=True):
                    one.prefix = prefix
        while waiting := [one for one in recordings if not one.done]:
            for some in _groups(waiting):
                self._advance(some)
        return recordings

    def _open(self, source: str, number: int) -> Recording:
        try:
            return Recording(self._modality.read_long(source), number, list(self.settings.forced_prefix))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=source, remedy=bad.remedy) from None

    def _batch(self, some: Sequence[Recording]) -> Batch:
        values = torch.stack([one.window(self._modality.window) for one in some])
        return Batch(Padded(values, torch.ones(values.shape[:2], dtype=torch.bool)))

    def _advance(self, some: Sequence[Recording]) -> None:
        """Transcribes the next window of each of these."""
        limit = min(self.settings.max_length, self._searcher.max_target_length)
        prefixes = [one.prefix for one in some] if self.settings.forced_prefix else None
        found = self._searcher.search_batch(
            self.settings, self._batch(some), torch.full((len(some),), limit), prefixes, [one.number for one in some]
        )
        for one, (best, *_) in zip(some, found, strict=True):
            left = min(len(one.frames) - one.position, self._modality.window)
            spans, moved = split_segments(best, len(one.prefix), self._first, self._frames_per_step, left)
            one.spans += [(one.position, span) for span in spans]
            one.complete &= best.complete
            one.position += moved if moved > 0 else left

    def segments(self, recording: Recording) -> tuple[TimedSegment, ...]:
        seconds = self._modality.frame_seconds
        return tuple(
            TimedSegment(
                round((begin + span.start) * seconds, 3),
                round((begin + span.end) * seconds, 3),
                self._target.decode(span.ids).strip(),
            )
            for begin, span in recording.spans
        )


def _groups(recordings: Sequence[Recording]) -> list[Sequence[Recording]]:
    return [recordings[first : first + RECORDINGS] for first in range(0, len(recordings), RECORDINGS)]


def split_segments(found: Hypothesis, prompt: int, first: int, step: int, frames: int) -> tuple[list[TokenSpan], int]:
    """The segments of the output for a window, and the frames until the next window.

    Two timestamps in a row end a segment and begin the next. `prompt`: tokens before the output. `first`: the id of the
    timestamp 0. `step`: frames from one timestamp to the next. `frames`: those of the window that the recording fills.
    """
    ids, scores = found.text_ids[prompt:], found.token_scores[prompt:]
    stamped = [token >= first for token in ids]
    cuts = [index for index in range(1, len(ids)) if stamped[index - 1] and stamped[index]]
    ended = stamped[-2:] == [False, True]  # one timestamp at the end: nothing is said after it
    if not cuts:
        times = [token for token in ids if token >= first]
        end = (times[-1] - first) * step if times and times[-1] != first else frames // step * step
        return [TokenSpan(ids, scores[: len(ids)], 0, end)], frames
    ends = [*cuts, len(ids)] if ended else [*cuts[:-1], cuts[-1] + 1]
    spans = []
    for begin, stop in zip([0, *ends], ends, strict=False):
        closing = ids[stop - 1] if ended or stop != ends[-1] else ids[stop - 2]
        start, end = (ids[begin] - first) * step, (closing - first) * step
        spans.append(TokenSpan(ids[begin:stop], scores[begin:stop], start, end))
    return spans, frames if ended else spans[-1].end
