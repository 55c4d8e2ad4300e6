"""Served models: what they can do, and requests and predictions in their terms."""

from __future__ import annotations

import io
import re
import struct
import tempfile
import time
import wave
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.languages import split_language, tagged
from transduce.errors import InputError
from transduce.inference.model import Model
from transduce.inference.prediction import Prediction
from transduce.inference.protected_spans import KINDS
from transduce.inference.terminology import Constraints
from transduce.modalities.audio import Audio, AudioFeatures, Waveform
from transduce.modalities.image import Image, ImageFeatures
from transduce.modalities.image_patches import ImagePatches
from transduce.modalities.source_encoding import ModalitySourceEncoding
from transduce.modalities.video import Video
from transduce.model import CTCModel, EmbeddingModel, EncoderOnly
from transduce.recipe import GenerationRecipe
from transduce.serving.service import (
    BadRequest,
    Capability,
    GeneratedText,
    GenerationRequest,
    LimitExceeded,
    Limits,
    Media,
    Modality,
    ModelInfo,
    TranscriptSegment,
    Unsupported,
)

MODALITIES: tuple[tuple[tuple[type, ...], Modality], ...] = (
    ((Image, ImageFeatures, ImagePatches), "image"),
    ((Audio, Waveform, AudioFeatures), "audio"),
    ((Video,), "video"),
)
CODE = (
    r"\w+(?:-[A-Z]\w+)*"  # of a language, such as en, pt-BR and zh-Hant: only what begins with a capital is a variant
)
CODES = rf"{CODE}(?:,{CODE})*"
SUFFIXES = {"image": ".png", "audio": ".wav", "video": ".mp4", "text": ".txt"}
TASKS = {"text": "translation", "image": "captioning", "audio": "transcription", "video": "captioning"}


@dataclass(frozen=True)
class ModelSpec:
    """A model on the command line, `[NAME=]PATH[@SOURCE-TARGET]`, such as `english=runs/en-de@en-de`."""

    path: str
    name: str
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        rest, source, target = text, "", ""
        if match := re.fullmatch(rf"(.+)@({CODES})-({CODES})", text):
            rest, source, target = match.groups()
        name, equals, path = rest.partition("=")
        if not equals or "/" in name:
            name, path = "", rest
        if not path:
            raise InputError(f"{text!r} names no model", remedy="write RUN, NAME=RUN, or RUN@en-de")
        if (stated := re.search(r"@([^/@]+)$", path)) is not None and not Path(path).exists():
            problem = f"@{stated.group(1)} is no pair of languages"
            raise InputError(problem, where=text, remedy="write @SOURCE-TARGET, such as @en-de or @en-pt-BR")
        own = Path(path.split(",")[0]).name or path
        if not source and (pair := re.search(r"-([a-z]{2,3})-([a-z]{2,3})$", own)) is not None:  # opus-mt-en-de
            source, target = pair.groups()
        return cls(path, name or own, tuple(filter(None, source.split(","))), tuple(filter(None, target.split(","))))


def describe(model: Model, spec: ModelSpec) -> ModelInfo:
    """What a loaded model can do."""
    modality = _modality(model)
    capabilities: set[Capability] = set()
    task = TASKS[modality]
    if isinstance(model.network, EmbeddingModel):
        task = "embedding"
    elif isinstance(model.network, EncoderOnly):
        task = "classification"
        capabilities |= {"generate", "classify"}
    else:
        capabilities |= {"generate", "transcribe"} if modality == "audio" else {"generate"}
        capabilities |= set() if isinstance(model.network, CTCModel) else {"stream"}
    if model.sourceless:
        task = "text-generation"
    elif modality == "text":
        capabilities.add("embed")
    return ModelInfo(
        spec.name,
        task,
        spec.source_languages,
        spec.target_languages or tuple(model.source.languages),
        modality,
        frozenset(capabilities),
        int(time.time()),
        model.max_source_tokens(),
        min(model.max_target_tokens, 2**31),
    )


def _modality(model: Model) -> Modality:
    encoding = model.source_encoding
    if isinstance(encoding, ModalitySourceEncoding):
        for part in encoding.source.parts.values():
            for kinds, name in MODALITIES:
                if isinstance(part, kinds):
                    return name
    return "text"


def check_limits(request: GenerationRequest, limits: Limits) -> None:
    """Refuses a request that is larger than the server allows, with the name of the limit."""
    characters = sum(len(one) for one in (*request.sources, *request.prefixes) if isinstance(one, str))
    phrases = (*request.required, *request.banned, *request.stop)
    for name, most, given in (
        ("items", limits.items, len(request.sources)),
        ("characters", limits.characters, characters + sum(map(len, phrases))),
        ("beam_size", limits.beam_size, request.beam_size or 1),
        ("n_best", limits.n_best, request.n_best),
        ("max_length", limits.output_tokens, request.max_length or 1),
        ("min_length", limits.output_tokens, request.min_length or 0),
        ("phrases", limits.items, len(phrases)),
        ("deadline", limits.request_seconds, request.deadline or 0),
        ("upload bytes", limits.upload_bytes, sum(len(one.data) for one in request.sources if isinstance(one, Media))),
    ):
        if given > most:
            raise LimitExceeded(name, most, given)
    if request.prefixes and len(request.prefixes) != len(request.sources):
        raise BadRequest(f"{len(request.sources)} sources, and {len(request.prefixes)} prefixes")


def search_settings(request: GenerationRequest, model: Model, limits: Limits) -> dict[str, Any]:
    """The changes of the generation settings that a request asks for."""
    own = model.recipe.generation
    changes: dict[str, Any] = {
        "beam": request.beam_size,
        "nbest": request.n_best,
        "min_length": request.min_length,
        "seed": request.seed,
        "length_penalty": request.length_penalty,
        "repetition_penalty": request.repetition_penalty,
        "max_length": min(request.max_length or own.max_length, limits.output_tokens),
    }
    sampled = [value for value in (request.temperature, request.top_k, request.top_p) if value is not None]
    if request.temperature == 0:
        changes["strategy"] = "greedy"
    elif sampled:
        sampling = {"temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p}
        changes |= {"strategy": "sample", "beam": request.n_best, **sampling}
    if changes.get("strategy") is None and request.n_best > (request.beam_size or own.beam):
        changes["beam"] = request.n_best
    if request.protect and request.format == "text":
        changes["protect"] = KINDS
    return {name: value for name, value in changes.items() if value is not None}


def tagged_texts(request: GenerationRequest, model: Model, texts: Sequence[str]) -> list[str]:
    """The texts with the tag of the target language, where the model has tags."""
    language = request.target_language
    if not model.source.languages or language is None:
        return list(texts)
    if language not in model.source.languages:
        language = language.split("-")[0]
    if language not in model.source.languages:
        raise BadRequest(f"{request.target_language} is not supported")
    return [text if split_language(text)[0] else tagged(text, language) for text in texts]


def constraints(request: GenerationRequest) -> list[Constraints | None] | None:
    if not request.required and not request.banned:
        return None
    return [Constraints(request.required, request.banned)] * len(request.sources)


def sample_source(modality: Modality) -> str | Media | None:
    """A small source for a first decode; None: of a video there is none."""
    if modality == "image":
        return Media(_grey_png(64), "image", "sample.png")
    if modality == "audio":
        return Media(_tone_wav(8000), "audio", "sample.wav")
    return "a" if modality == "text" else None


def _grey_png(side: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)  # 8 bits, grey
    rows = zlib.compress((b"\0" + b"\x80" * side) * side)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _tone_wav(rate: int) -> bytes:
    """One second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, rate, rate, "NONE", ""))
        opened.writeframes(struct.pack("<8h", 0, 2828, 4000, 2828, 0, -2828, -4000, -2828) * (rate // 8))
    return file.getvalue()


@contextmanager
def source_files(sources: Sequence[str | Media], modality: Modality) -> Iterator[list[str]]:
    """The sources as texts; uploads as the names of temporary files. A text is never the name of a file."""
    if modality == "text":
        if any(isinstance(one, Media) for one in sources):
            raise Unsupported("this model reads text")
        yield [str(one) for one in sources]
        return
    with tempfile.TemporaryDirectory(prefix="transduce-") as folder:
        paths = []
        for number, one in enumerate(sources):
            if not isinstance(one, Media):
                raise Unsupported(f"this model reads {modality} files, which are uploaded")
            suffix = Path(one.name).suffix.lower()
            suffix = suffix if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix) else SUFFIXES[modality]
            paths.append(Path(folder, f"{number}{suffix}"))
            paths[-1].write_bytes(one.data)
        try:
            yield [str(path) for path in paths]
        except InputError as error:
            raise BadRequest(error.problem.replace(folder, "")) from None


def generated_texts(prediction: Prediction, request: GenerationRequest) -> tuple[GeneratedText, ...]:
    """A prediction and its rivals as a request wants them."""
    count, rivals = source_tokens(prediction), prediction.nbest or (prediction,)
    found = [_plain(one, count, request.stop) for one in rivals]
    changes: dict[str, Any] = {}
    if prediction.confidence != found[0].confidence:
        changes["confidence"] = prediction.confidence
    if "alignment" in request.wants:
        changes["alignment"] = tuple(prediction.alignment)
    if "attention" in request.wants and prediction.attention is not None:
        changes["attention"] = prediction.attention.round(5).tolist()
    if "explanation" in request.wants and prediction.explanation is not None:
        changes["explanation"] = prediction.explanation.to_json()
    if prediction.segments:
        changes["segments"] = tuple(TranscriptSegment(one.start, one.end, one.text) for one in prediction.segments)
    return replace(found[0], **changes) if changes else found[0], *found[1:]


def source_tokens(prediction: Prediction) -> int:
    """Tokens of the source, or of its parts."""
    count = 0 if prediction.decoded is None else len(prediction.decoded.source or ())
    return sum(len(part.decoded.source or ()) for part in prediction.parts if part.decoded is not None) or count


def document_text(text: str, sentences: Sequence[Prediction]) -> GeneratedText:
    """A document with the tokens and scores of its sentences."""
    return GeneratedText(
        text,
        tuple(token for one in sentences for token in one.tokens),
        tuple(score for one in sentences for score in one.token_scores),
        sum((one.score for one in sentences), 0.0),
        "stop" if all(one.complete for one in sentences) else "length",
        sum(map(source_tokens, sentences)),
    )


def continuation(found: Prediction, prompt: str, tokens: int) -> Prediction:
    """What a language model wrote after a prompt of this many tokens: clients have the prompt."""

    def after(one: Prediction, **changes: Any) -> Prediction:
        text, pieces, scores = one.text[len(prompt) :], one.tokens[tokens:], one.token_scores[tokens:]
        return replace(one, text=text, tokens=pieces, token_scores=scores, **changes)

    return after(found, nbest=tuple(after(one) for one in found.nbest))


def prompt_tokens(model: Model, prompt: str, settings: GenerationRecipe) -> int:
    """Tokens of a prompt that a language model reads."""
    most = min(settings.max_source_length, model.max_target_tokens - 1)
    return min(len(model.target.encode_batch([prompt])[0]), most)


def _plain(one: Prediction, source_tokens: int, stop: Sequence[str]) -> GeneratedText:
    places = [place for text in stop if text and (place := one.text.find(text)) >= 0]
    text = one.text[: min(places)] if places else one.text
    reason = "stop" if one.complete or places else "length"
    return GeneratedText(text, one.tokens, one.token_scores, one.score, reason, source_tokens, one.confidence)  # type: ignore[arg-type]
