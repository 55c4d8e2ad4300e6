"""Recipes for speech: transcription of recordings or of frames of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transduce.autoconfig.sizes import cosine, pieces_for
from transduce.autoconfig.statistics import CorpusStatistics
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError, UnreadableError
from transduce.modalities.audio.files import soundfile, stored_frame_width
from transduce.modalities.audio.modality import AudioFeatures
from transduce.recipe import parse

SPEECH_RATE = 16_000  # samples per second that speech needs; lower rates are kept
UTTERANCE_FRAMES = 250  # assumed per utterance: two and a half seconds
SPECAUGMENT = {"time_masks": 2, "time_width": 20, "frequency_masks": 1}


def audio_source(data: dict[str, Any]) -> dict[str, Any]:
    """The source of the first line: a recording with its sampling rate, or features with their width."""
    parsed = parse({"data": {**data, "sources": {"sound": {"kind": "audio"}}}}).data
    example = next((one for corpus in parsed.train for one in read_corpus(corpus, parsed.invalid)), None)
    if example is None:
        raise InputError(
            "there is nothing to transcribe", where=str(parsed.train[0].path), remedy="give lines: FILE TAB TEXT"
        )
    named, place = example.source.split("\t")[0], f"{example.file}:{example.line}"
    try:
        return {"sources": {"sound": _audio_spec(named)}, "max_length": 512}
    except UnreadableError as bad:
        raise InputError(bad.problem, where=place, remedy=bad.remedy) from None


def _audio_spec(named: str) -> dict[str, Any]:
    if Path(named.partition("#")[0]).suffix.lower() in AudioFeatures.extensions:
        return {"kind": "audio_features", "size": stored_frame_width(named), **SPECAUGMENT}
    library = soundfile()
    try:
        rate = int(library.info(named).samplerate)
    except Exception as error:  # whatever the library raises, the file is not one that it reads
        raise UnreadableError("not a readable audio file", f"{named}: {error}") from None
    rate = min(rate, SPEECH_RATE)
    return {"kind": "audio", "rate": rate, "mels": 40 if rate < SPEECH_RATE else 80, "speed": 0.1, **SPECAUGMENT}


def transcribe(statistics: CorpusStatistics) -> dict[str, Any]:
    """Joint CTC and attention (Watanabe 2017)."""
    small = statistics.pairs < 5_000
    width, dropout = (128, 0.2) if small else (256, 0.1)
    encoder = {
        "kind": "conformer",
        "width": width,
        "layers": 3 if small else 8,
        "ff_width": 4 * width,
        "dropout": dropout,
    }
    an_epoch = max(1, statistics.pairs * UTTERANCE_FRAMES // 8192)
    steps = int(min(100_000, max(800, 30 * an_epoch)))
    check = max(50, min(1000, steps // 10))
    return {
        "tokens": {"target": _tokens(statistics)},
        "model": {
            "encoder": {**encoder, "front": {"kind": "conv_subsampling"}},
            "decoder": {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout, "context": "bahdanau"},
            "ctc": {},
        },
        "training": {
            **cosine(steps, check, 3e-3 if small else 1e-3),
            "batch_tokens": 8192,
            "objective": {"kind": "joint_ctc", "weight": 0.3},
            "monitor": "wer",
            "patience": 10,
        },
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["wer", "cer"]},
    }


def _tokens(statistics: CorpusStatistics) -> dict[str, Any]:
    """Words for small vocabularies, else characters; BPE for much text."""
    if statistics.target.closed_vocabulary or (statistics.target.vocabulary <= 200 and statistics.target.unseen < 0.01):
        return {"kind": "words", "size": 2000}
    return {"kind": "chars", "size": 1000} if statistics.pairs < 50_000 else pieces_for(statistics.pairs)
