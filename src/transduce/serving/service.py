"""Service: the requests, results and errors that every HTTP interface shares.

An interface (LibreTranslate, OpenAI, ...) translates its own JSON to a `GenerationRequest`, awaits `Service.generate`,
and writes the `GenerationResult` in its own form. A `ServiceError` has an HTTP status and a message that may be shown:
interfaces render it, they never format another exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.responses import Response

    from transduce.serving.telemetry import RequestTrace

Modality = Literal["text", "image", "audio", "video"]
Want = Literal["tokens", "scores", "alignment", "attention", "explanation"]
Capability = Literal["generate", "stream", "embed", "transcribe", "classify"]
TextFormat = Literal["text", "html"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Media:
    """The bytes of an uploaded image, recording or video; `name` gives the file type (`scan.png`)."""

    data: bytes = field(repr=False)
    kind: Modality
    name: str = ""


Source = str | Media


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks for. None: the default of the model."""

    sources: tuple[Source, ...]
    model: str | None = None  # None: the model of these languages, else the first
    source_language: str | None = None  # None: any
    target_language: str | None = None
    beam_size: int | None = None
    n_best: int = 1
    max_length: int | None = None  # output tokens
    min_length: int | None = None
    temperature: float | None = None  # with top_k, top_p or this above 0, tokens are sampled; 0: greedy search
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    length_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()  # the output ends before the first of these texts
    prefixes: tuple[str, ...] = ()  # forced beginnings, one for each source; empty: none
    required: tuple[str, ...] = ()  # phrases that every output contains
    banned: tuple[str, ...] = ()  # phrases that no output contains
    wants: frozenset[Want] = frozenset()  # what costs time to compute or to send
    format: TextFormat = "text"  # html: tags are kept around the words that they enclosed
    protect: bool = False  # True: addresses, numbers, placeholders and emoji of the source stay as they are
    priority: int = 0  # larger: earlier
    deadline: float | None = None  # seconds until the client gives up; None: the limit of the server


@dataclass(frozen=True)
class Caller:
    """Who sent the request that is being served. The application sets it; interfaces need not."""

    client: str = ""  # shares the queue fairly with the others; not the key itself
    request_id: str = ""
    trace: RequestTrace | None = None  # receives the times of the work; None: nothing is traced


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. More is refused with 400, or 413 for bytes."""

    body_bytes: int = 1_000_000  # of JSON and forms
    upload_bytes: int = 25_000_000  # of files
    job_items: int = 100_000  # sources of a job
    characters: int = 20_000  # of all texts of a request
    items: int = 128  # texts of a request
    beam_size: int = 16
    n_best: int = 16
    output_tokens: int = 1024
    queued: int = 512  # sources that wait or are searched, of all clients; more are refused with 429
    requests_per_minute: int = 0  # of one client; 0: any number
    body_seconds: float = 10.0  # in which a request must have arrived
    request_seconds: float = 60.0  # deadline of a request, and the longest that it may ask for


@dataclass(frozen=True)
class TranscriptSegment:
    """A part of a transcript with its times in seconds."""

    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class GeneratedText:
    """One output. `score` is the sum of `token_scores`, natural logarithms."""

    text: str
    tokens: tuple[str, ...] = ()  # the closing </s> included
    token_scores: tuple[float, ...] = ()
    score: float = 0.0
    finish_reason: FinishReason = "stop"
    source_token_count: int = 0
    confidence: float | None = None  # 0 to 1, of a calibrated run
    alignment: tuple[tuple[int, int], ...] | None = None  # (source word, output word); None: not asked for
    attention: list[Any] | None = None  # L H T S
    explanation: dict[str, Any] | None = None
    segments: tuple[TranscriptSegment, ...] = ()  # of a transcript

    @property
    def token_count(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class GenerationResult:
    """The outputs of a request: for each source its n best, best first."""

    model: str
    outputs: tuple[tuple[GeneratedText, ...], ...]
    cached: int = 0  # sources whose outputs were in the cache

    @property
    def best(self) -> list[GeneratedText]:
        return [ranked[0] for ranked in self.outputs]

    @property
    def source_token_count(self) -> int:
        return sum(one.source_token_count for one in self.best)

    @property
    def token_count(self) -> int:
        return sum(one.token_count for ranked in self.outputs for one in ranked)


@dataclass(frozen=True)
class TokenEvent:
    """One token of a stream. The texts of all events joined are the output.

    The last event has no token: it has the whole output in `final`.
    """

    text: str  # what is added to the output; may be empty
    token: str = ""
    score: float = 0.0
    source: int = 0  # number of the source
    final: GeneratedText | None = None


@dataclass(frozen=True)
class ModelInfo:
    """A served model. Empty languages: not known; the model takes whatever it is given."""

    name: str
    task: str  # translation, text-generation, transcription, captioning, classification, embedding
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()
    modality: Modality = "text"  # of the source
    capabilities: frozenset[Capability] = frozenset({"generate"})
    created: int = 0  # seconds since 1970, when it was loaded
    max_source_tokens: int = 0
    max_target_tokens: int = 0


class ServiceError(Exception):
    """An error with an HTTP status, a reason (a metric label) and a message without paths or stack traces."""

    status = 500
    reason = "internal"
    retry_after: int | None = None  # seconds

    def __init__(self, message: str = "internal error") -> None:
        self.message = message
        super().__init__(message)


class BadRequest(ServiceError):  # noqa: N818
    status, reason = 400, "invalid"


class LimitExceeded(ServiceError):  # noqa: N818
    """More than a limit of the server allows; the message names the limit."""

    status, reason = 400, "limit"

    def __init__(self, name: str, most: float, given: float | None = None) -> None:
        self.name, self.most = name, most
        beyond = "" if given is None else f", not {given:,}"
        super().__init__(f"{name}: at most {most:,}{beyond}")


class BodyTooLarge(LimitExceeded):
    status = 413


class RequestTimeout(ServiceError):  # noqa: N818
    """The client did not send its request in time."""

    status, reason = 408, "timeout"


class Unsupported(ServiceError):  # noqa: N818
    """The model cannot do what is asked, such as embed."""

    status, reason = 400, "unsupported"


class ModelNotFound(ServiceError):  # noqa: N818
    status, reason = 404, "model"


class KeyMissing(ServiceError):  # noqa: N818
    status, reason = 401, "key"

    def __init__(self, message: str = "an API key is required") -> None:
        super().__init__(message)


class InvalidKey(ServiceError):  # noqa: N818
    status, reason = 403, "key"

    def __init__(self, message: str = "invalid API key") -> None:
        super().__init__(message)


class Overloaded(ServiceError):  # noqa: N818
    """The queue is full."""

    status, reason = 429, "overloaded"

    def __init__(self, message: str = "the server is overloaded", retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class RateLimited(Overloaded):
    """The client has sent more requests than its rate allows."""

    reason = "rate"


class Draining(ServiceError):  # noqa: N818
    """The server is stopping, or has not started yet."""

    status, reason, retry_after = 503, "draining", 1


class DeadlineExceeded(ServiceError):  # noqa: N818
    status, reason = 504, "deadline"

    def __init__(self, message: str = "the deadline has passed") -> None:
        super().__init__(message)


class Service(ABC):
    """The models of a server, as interfaces use them."""

    @abstractmethod
    def models(self) -> list[ModelInfo]:
        """All served models; the first is the default."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """The outputs of all sources. When the awaiting task is cancelled, the work is."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """The best output of each source, token by token, one source after the other.

        Errors of the request are raised before the first event. When the iterator is closed, the work is cancelled.
        """

    @abstractmethod
    async def embed(self, texts: Sequence[str], model: str | None = None) -> list[list[float]]:
        """One vector for each text."""

    async def reload(self, name: str | None = None) -> None:
        """Loads models again from their paths; None: all. Requests that were accepted end with the old weights."""
        raise Unsupported("the models of this server cannot be loaded again")

    def model(
        self, name: str | None = None, source_language: str | None = None, target_language: str | None = None
    ) -> ModelInfo:
        """The model of this name; without a name, the first that has these languages."""
        served = self.models()
        if name:
            for one in served:
                if one.name == name:
                    return one
            raise ModelNotFound(f"no model {name!r} is served")
        for one in served:
            if accepts(one.source_languages, source_language) and accepts(one.target_languages, target_language):
                return one
        raise ModelNotFound(f"no model from {source_language or 'any'} to {target_language or 'any'} is served")


def accepts(languages: Sequence[str], language: str | None) -> bool:
    """Whether a language is one of these; unknown ones and `en` for `en-GB` are."""
    if language is None or not languages:
        return True
    return language in languages or language.split("-")[0] in languages


@dataclass(frozen=True)
class Interface:
    """One HTTP interface: its routes, and the form of its errors."""

    name: str
    router: Callable[[Service, Any], APIRouter]  # of a service and the `ServerSettings`
    paths: tuple[str, ...]  # the paths, or the beginnings of paths that end with /, whose errors it renders
    render_error: Callable[[ServiceError], Response]
    key_fields: tuple[str, ...] = ()  # fields of the query or the body that may hold the API key
    missing_key_status: int = 401  # LibreTranslate answers 400
