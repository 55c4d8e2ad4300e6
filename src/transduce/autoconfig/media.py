"""Recipes for images, video and sound: captions, labels, visual questions, image generation, transcription."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transduce.autoconfig.sizes import Chosen, TimeBudget, cosine, pieces_for, training_for, usual
from transduce.autoconfig.statistics import CorpusStatistics
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError, UnreadableError
from transduce.modalities.audio import AudioFeatures
from transduce.modalities.audio_files import soundfile, stored_frame_width
from transduce.recipe import parse

SIDE = 64  # pixels of a side
IMAGE = {"kind": "image", "size": SIDE}
CELLS = {"kind": "cnn_grid", "channels": 32, "stages": 3}
VIDEO_FRAMES, VIDEO_SIZE = 8, 32
VIDEO_SOURCE = {"sources": {"video": {"kind": "video", "frames": VIDEO_FRAMES, "size": VIDEO_SIZE}}}
SPEECH_RATE = 16_000  # samples per second that speech needs; lower rates are kept
UTTERANCE_FRAMES = 250  # assumed per utterance: two and a half seconds
SPECAUGMENT = {"time_masks": 2, "time_width": 20, "frequency_masks": 1}
CLIP_FRAMES = 100  # assumed per sound that is classified: one second
LONGEST_CLIP = 3000  # frames
CLIP_MASKS = {"time_masks": 1, "time_width": 10, "frequency_masks": 1, "frequency_width": 6}
TaskRecipe = Callable[[CorpusStatistics, TimeBudget], dict[str, Any]]


def _training(statistics: CorpusStatistics, epochs: int, monitor: str, budget: TimeBudget) -> dict[str, Any]:
    """Batches of 64 pictures; small sets are seen more often."""
    steps = int(min(60_000, max(400, epochs * statistics.pairs / 64)))
    return training_for(usual(steps, 64 * (SIDE + 2 + int(statistics.target.words)), 1e-3), monitor, budget)


def _classify(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """One label."""
    encoder = {
        "kind": "transformer",
        "width": 128,
        "layers": 3,
        "heads": 4,
        "ff_width": 256,
        "activation": "gelu",
        "position": "none",
        "front": CELLS,
    }
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {
            "encoder": Chosen(
                encoder, "a Transformer over the cells of a CNN, which need fewer images than patches (Xiao 2021)"
            ),
            "head": {"kind": "classifier", "pooling": "mean", "activation": "none"},
        },
        "training": _training(statistics, 15, "accuracy", budget),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }


def _caption(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """A sentence."""
    rare = 5 if statistics.pairs >= 20_000 else 2 if statistics.pairs >= 5_000 else 1
    decoder = {"kind": "recurrent", "cell": "gru", "width": 256, "context": "bahdanau", "dropout": 0.2}
    return {
        "tokens": {"target": {"kind": "words", "size": 10_000, "min_count": rare}},
        "model": {
            "encoder": {"kind": "identity", "width": 256, "dropout": 0.2, "front": CELLS},
            "decoder": Chosen(decoder, "a recurrent decoder with soft attention to the cells of a CNN (Xu 2015)"),
        },
        "training": _training(statistics, 20, "bleu", budget),
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["bleu", "bleu1", "cider", "exact"], "references": "by_source"},
    }


PICTURES: dict[str, TaskRecipe] = {"caption": _caption, "classify-images": _classify}
PICTURED: dict[str, dict[str, Any]] = {task: {"sources": {"picture": IMAGE}} for task in PICTURES}


QUESTION_SOURCES = {"sources": {"picture": IMAGE, "question": {"kind": "text"}}}


def ask(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """The answer to a question about a picture."""
    width, dropout = (128, 0.1) if statistics.pairs < 50_000 else (256, 0.1)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    an_epoch = max(1, statistics.pairs // 64)
    steps = int(min(100_000, max(1_500, 40 * an_epoch)))
    part = {"width": width, "dropout": dropout}
    parts = {
        "picture": {"kind": "identity", **part, "front": CELLS},
        "question": {"kind": "recurrent", "cell": "gru", **part},
    }
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": Chosen(
                {"kind": "multi_source", "width": width, "parts": parts},
                "cells of a CNN and the words of the question in one memory, so that the decoder attends to both",
            ),
            "decoder": {"kind": "transformer", **part, "layers": 2, "heads": 4, "ff_width": 2 * width},
        },
        # A picture counts its rows of pixels.
        "training": training_for(usual(steps, 64 * (SIDE + 12), 1e-3), "exact", budget),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact", "token_f1"]},
    }


LONGEST = 4200  # pixels of the largest picture, and a little


def draw(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """The tokens of an image, one after another."""
    pixels = int(statistics.target.words)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    width = 128 if statistics.pairs < 20_000 else 256
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 4 * width, "dropout": 0.1}
    steps = int(min(50_000, max(1_000, 20 * statistics.pairs * pixels // 8192)))
    return {
        "tokens": {"source": words, "target": {"kind": "words", "size": 2000}},
        "model": {
            "encoder": {**part, "layers": 1},
            "decoder": Chosen(
                {**part, "layers": 2, "position": {"kind": "learned", "max_positions": LONGEST}},
                "learned positions tell the place in the image",
            ),
        },
        "training": {**training_for(usual(steps, 8192, 1e-3), "loss", budget), "validate_examples": 100},
        # A picture is as long as it is, however short its text.
        "generation": {"strategy": "greedy", "max_length": pixels + 1, "max_ratio": float(pixels)},
        "evaluation": {"metrics": ["wer"]},
    }


def _video_part(statistics: CorpusStatistics) -> dict[str, Any]:
    """A recurrent network, the encoder of the frames or the decoder of a caption."""
    width = 128 if statistics.pairs < 20_000 else 256
    return {"kind": "recurrent", "cell": "gru", "width": width, "dropout": 0.1}


def _video_encoder(statistics: CorpusStatistics) -> Chosen:
    front = {"kind": "frames", "stages": 3, "channels": 16}
    return Chosen({**_video_part(statistics), "front": front}, "a recurrent network over the vectors of the frames")


def _video_training(statistics: CorpusStatistics, monitor: str, budget: TimeBudget) -> dict[str, Any]:
    steps = int(min(50_000, max(1_000, 40 * statistics.pairs // 64)))
    return training_for(usual(steps, 64 * (VIDEO_FRAMES + 8), 2e-3, bf16=False), monitor, budget)


def caption_videos(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """A sentence about a video."""
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    return {
        "tokens": {"target": words},
        "model": {
            "encoder": _video_encoder(statistics),
            "decoder": {**_video_part(statistics), "context": "bahdanau"},
        },
        "training": _video_training(statistics, "bleu", budget),
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", "bleu"]},
    }


def classify_videos(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """One label of a video."""
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {"encoder": _video_encoder(statistics), "head": {"kind": "classifier", "pooling": "mean"}},
        "training": _video_training(statistics, "accuracy", budget),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }


def audio_source(data: dict[str, Any]) -> dict[str, Any]:
    """The source of the first line: a recording with its sampling rate, or features with their width."""
    parsed = parse({"data": {**data, "sources": {"sound": {"kind": "audio"}}}}).data
    example = next((one for corpus in parsed.train for one in read_corpus(corpus, parsed.invalid)), None)
    if example is None:
        raise InputError("there is no recording", where=str(parsed.train[0].path), remedy="give lines: FILE TAB TEXT")
    named, place = example.source.split("\t")[0], f"{example.file}:{example.line}"
    try:
        return {"sources": {"sound": _audio_spec(named)}, "max_length": 512}
    except UnreadableError as bad:
        raise InputError(bad.problem, where=place, remedy=bad.remedy) from None


def clip_source(data: dict[str, Any]) -> dict[str, Any]:
    """The same for sounds that are classified: levels are not normalised, and fewer frames and bands are masked."""
    spec = {**audio_source(data)["sources"]["sound"], **CLIP_MASKS}
    if spec["kind"] == "audio":
        spec |= {"scale": "whisper", "normalise": False}
    return {"sources": {"sound": spec}, "max_length": LONGEST_CLIP}


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


def classify_audio(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """One label."""
    front = {
        "kind": "conv2d_subsampling",
        "channels": 48,
        "strides": [2, 1, 2, 1],
        "band_strides": [2, 1, 2, 2],
    }
    steps = int(min(60_000, max(500, 12 * statistics.pairs * CLIP_FRAMES / 4096)))
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {
            # Of 600 development recordings of FSDD, 5 were wrong, and 10 without the recurrent network.
            "encoder": Chosen(
                {"kind": "recurrent", "cell": "gru", "width": 128, "dropout": 0.2, "front": front},
                "convolutions over time and frequency see a fifth of a second, a recurrent network the whole",
            ),
            "head": {"kind": "classifier", "pooling": "max", "dropout": 0.2},
        },
        "training": {
            **cosine(
                steps, max(50, min(1000, steps // 5)), 2e-3, "12 passes over the recordings, at least 500 updates"
            ),
            "batch_tokens": 4096,
            "objective": {"label_smoothing": 0.0},
            "validate_examples": 2000,
            "monitor": "loss",  # the accuracy on few development sounds is soon perfect, which ends training
            "patience": Chosen(10, "validations without improvement"),
            "minutes": budget.given,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }


def transcribe(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Speech recognition."""
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
    reason = "the CTC loss of the encoder finds the alignment that so little speech does not teach to attention"
    return {
        "tokens": {"target": _tokens(statistics)},
        "model": {
            "encoder": {**encoder, "front": {"kind": "conv_subsampling"}},
            "decoder": {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout, "context": "bahdanau"},
            "ctc": {},
        },
        "training": {
            **training_for(usual(steps, 8192, 3e-3 if small else 1e-3), "wer", budget),
            "objective": Chosen({"kind": "joint_ctc", "weight": 0.3}, reason),
        },
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["wer", "cer"]},
    }


def _tokens(statistics: CorpusStatistics) -> dict[str, Any]:
    """Words for small vocabularies, else characters; BPE for much text."""
    if statistics.target.closed_vocabulary or (statistics.target.vocabulary <= 200 and statistics.target.unseen < 0.01):
        return {"kind": "words", "size": 2000}
    return {"kind": "chars", "size": 1000} if statistics.pairs < 50_000 else pieces_for(statistics.pairs)
