"""A service without a model, for tests of interfaces: it writes the words of a text in capitals, last word first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.testclient import TestClient

from transduce.serving.application import ServerSettings, create_app
from transduce.serving.service import (
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Limits,
    Media,
    ModelInfo,
    Service,
    ServiceError,
    TokenEvent,
    TranscriptSegment,
)

CAPABILITIES = frozenset({"generate", "stream", "embed"})
MODELS = (
    ModelInfo("reverse", "translation", ("en",), ("de",), capabilities=CAPABILITIES, max_source_tokens=64),  # type: ignore[arg-type]
    ModelInfo("back", "translation", ("de",), ("en",), capabilities=CAPABILITIES),  # type: ignore[arg-type]
    ModelInfo("writer", "text-generation"),
    ModelInfo("ear", "transcription", modality="audio", capabilities=frozenset({"generate", "transcribe"})),
    ModelInfo("eye", "captioning", modality="image"),
)
SEGMENTS = (TranscriptSegment(0, 1.5, "one"), TranscriptSegment(1.5, 61, "two"))
LIMITS = Limits(body_bytes=4000, upload_bytes=4000, characters=1000, items=8, n_best=4, output_tokens=50)


def reverse(text: str) -> str:
    return " ".join(reversed(text.upper().split()))


class ReverseService(Service):
    """Answers at once, or with an error."""

    def __init__(self, models: Sequence[ModelInfo] = MODELS, error: ServiceError | None = None) -> None:
        self.served, self.error, self.requests = list(models), error, list[GenerationRequest]()

    def models(self) -> list[ModelInfo]:
        return self.served

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        info = self.model(request.model, request.source_language, request.target_language)
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        outputs = tuple(self._ranked(one, request) for one in request.sources)
        return GenerationResult(info.name, outputs)

    def _ranked(self, source: str | Media, request: GenerationRequest) -> tuple[GeneratedText, ...]:
        if isinstance(source, Media):
            return (GeneratedText(f"{len(source.data)} bytes", segments=SEGMENTS),)
        text, count = reverse(source), len(source.split())
        tokens, scores = (*text.split(), "</s>"), (-0.5,) * (count + 1)
        links = tuple((count - 1 - word, word) for word in range(count)) if "alignment" in request.wants else None
        best = {"tokens": tokens, "token_scores": scores, "score": sum(scores), "source_token_count": count + 1}
        return tuple(
            GeneratedText(text + "!" * rank, **best, alignment=links if rank == 0 else None)  # type: ignore[arg-type]
            for rank in range(request.n_best)
        )

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        for number, one in enumerate((await self.generate(request)).best):
            for place, word in enumerate(one.text.split()):
                yield TokenEvent(" " * (place > 0) + word, word, -0.5, number)
            yield TokenEvent("", "</s>", -0.5, number)
            yield TokenEvent("", source=number, final=one)

    async def embed(self, texts: Sequence[str], model: str | None = None) -> list[list[float]]:
        self.model(model)
        return [[float(len(text)), 3.0, 4.0] for text in texts]


def reverse_client(*keys: str, service: Service | None = None, limits: Limits = LIMITS, **settings: Any) -> TestClient:
    """A client of an application over the service."""
    app = create_app(service or ReverseService(), ServerSettings(keys, limits, **settings))
    return TestClient(app, raise_server_exceptions=False)
