"""OpenAI interface: completions and chat completions with streams, models, embeddings, audio transcriptions."""

from __future__ import annotations

import base64
import binascii
import json
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, File, Form, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from transduce.serving.protocols.event_stream import event_response
from transduce.serving.service import (
    BadRequest,
    BodyTooLarge,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Interface,
    InvalidKey,
    KeyMissing,
    Media,
    ModelNotFound,
    Service,
    ServiceError,
    Source,
    TokenEvent,
    TranscriptSegment,
    Unsupported,
)

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings

DONE = "[DONE]"
DEFAULT_MODELS = ("dummy", "tgi")  # names that clients of Hugging Face send for the model of a server, whatever it is


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel):
    """What completions and chat completions have in common. Other fields of the API are accepted and not read."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def request(self, sources: Sequence[Source], *, prefixes: tuple[str, ...] = ()) -> GenerationRequest:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise Unsupported(f"{name} is not supported")
        if self.stream and self.n > 1:
            raise Unsupported("a stream has one choice for each prompt: n must be 1")
        if self.stream and self.stop:
            raise Unsupported("stop is not supported in a stream")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationRequest(
            tuple(sources),
            model=None if self.model in DEFAULT_MODELS else self.model,
            n_best=self.n,
            max_length=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else abs(self.seed),
            stop=stop,
            prefixes=prefixes,
        )

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionFields(SamplingFields):
    prompt: str | list[str]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    suffix: str | None = None

    @property
    def prompts(self) -> list[str]:
        if self.suffix:
            raise Unsupported("suffix is not supported")
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImageAddress(BaseModel):
    url: str


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageAddress


class AudioData(BaseModel):
    data: str
    format: str = "wav"


class AudioPart(BaseModel):
    type: Literal["input_audio"]
    input_audio: AudioData


class OpenAIMessage(BaseModel):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Annotated[TextPart | ImagePart | AudioPart, Field(discriminator="type")]] | None = None

    def source(self) -> Source:
        """The text of the message, or its image or recording."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if not isinstance(part, TextPart):
                return _media(part)
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))


class ChatFields(SamplingFields):
    messages: list[OpenAIMessage] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False

    def chat_request(self) -> GenerationRequest:
        """The last message of the user is the source; a message of the assistant after it begins the output."""
        users = [place for place, one in enumerate(self.messages) if one.role == "user"]
        if not users:
            raise BadRequest("messages: one message of the user is needed")
        source, last = self.messages[users[-1]].source(), self.messages[-1]
        begun = last.source() if last.role == "assistant" and users[-1] < len(self.messages) - 1 else ""
        chosen = self.model_copy(update={"max_tokens": self.max_completion_tokens or self.max_tokens})
        return chosen.request([source], prefixes=(begun,) if isinstance(begun, str) and begun else ())


def _media(part: ImagePart | AudioPart) -> Media:
    if isinstance(part, AudioPart):
        return Media(_decoded(part.input_audio.data), "audio", f"upload.{part.input_audio.format}")
    head, comma, data = part.image_url.url.partition(";base64,")
    if not head.startswith("data:image/") or not comma:
        raise BadRequest("image_url: images are sent as data:image/png;base64,..., and never fetched")
    return Media(_decoded(data), "image", f"upload.{head.removeprefix('data:image/')}")


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("the data are not base64") from None


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transduce"


class OpenAIModels(BaseModel):
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class EmbeddingFields(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    input: str | list[str]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[OpenAIEmbedding]
    model: str
    usage: EmbeddingUsage


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: ErrorDetail


def error_body(error: ServiceError) -> dict[str, Any]:
    param = code = None
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    elif isinstance(error, (KeyMissing, InvalidKey)):
        code = "invalid_api_key"
    elif error.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def render_error(error: ServiceError) -> Response:
    status = 401 if isinstance(error, InvalidKey) else error.status
    return JSONResponse(error_body(error), status)


def usage_of(result: GenerationResult) -> OpenAIUsage:
    read, written = result.source_token_count, result.token_count
    return OpenAIUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def completion(result: GenerationResult, fields: CompletionFields) -> Completion:
    choices: list[CompletionChoice] = []
    for prompt, ranked in zip(fields.prompts, result.outputs, strict=True):
        for one in ranked:
            scores = CompletionLogprobs(tokens=list(one.tokens), token_logprobs=list(one.token_scores))
            text = prompt + one.text if fields.echo else one.text
            choice = CompletionChoice(index=len(choices), text=text, finish_reason=one.finish_reason)
            choices.append(choice if fields.logprobs is None else choice.model_copy(update={"logprobs": scores}))
    identity = f"cmpl-{uuid.uuid4().hex}"
    return Completion(
        id=identity, created=int(time.time()), model=result.model, choices=choices, usage=usage_of(result)
    )


def chat_completion(result: GenerationResult, fields: ChatFields) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=one.text),
            finish_reason=one.finish_reason,
            logprobs=_chat_logprobs(one) if fields.logprobs else None,
        )
        for index, one in enumerate(result.outputs[0])
    ]
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    return ChatCompletion(
        id=identity, created=int(time.time()), model=result.model, choices=choices, usage=usage_of(result)
    )


def _chat_logprobs(one: GeneratedText) -> ChatLogprobs:
    rows = zip(one.tokens, one.token_scores, strict=True)
    return ChatLogprobs(
        content=[TokenLogprob(token=token, logprob=score, bytes=list(token.encode())) for token, score in rows]
    )


class Chunks:
    """The chunks of a stream, as JSON."""

    def __init__(self, kind: str, model: str, choice: Callable[[int, str | None, str | None], dict[str, Any]]) -> None:
        self.head = {
            "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.choice, self.outputs = choice, list[GeneratedText]()

    def write(self, event: TokenEvent) -> Iterator[str]:
        if event.final is None:
            if event.text:
                yield self._chunk([self.choice(event.source, event.text, None)])
            return
        self.outputs.append(event.final)
        yield self._chunk([self.choice(event.source, None, event.final.finish_reason)])

    def end(self, *, with_usage: bool) -> Iterator[str]:
        if with_usage:
            result = GenerationResult(str(self.head["model"]), tuple((one,) for one in self.outputs))
            yield self._chunk([], usage=usage_of(result).model_dump())
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps({**self.head, "choices": choices, **more}, ensure_ascii=False)


def completion_choice(index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text or "", "logprobs": None, "finish_reason": finish_reason}


def chat_choice(index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
    delta = {} if text is None else {"role": "assistant", "content": text}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def stream(service: Service, request: GenerationRequest, fields: SamplingFields) -> Response:
    chat = isinstance(fields, ChatFields)
    kind, choice = ("chat.completion.chunk", chat_choice) if chat else ("text_completion", completion_choice)
    chunks = Chunks(kind, service.model(request.model).name, choice)
    end = chunks.end(with_usage=fields.with_usage)
    return await event_response(
        service.stream(request), chunks.write, lambda error: json.dumps(error_body(error)), end=end
    )


def timestamp(seconds: float, separator: str) -> str:
    milliseconds = round(max(seconds, 0) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{separator}{rest % 1000:03}"


def subtitles(segments: Sequence[TranscriptSegment], kind: str) -> str:
    """Segments as SubRip (`srt`) or WebVTT (`vtt`)."""
    separator, blocks = ("," if kind == "srt" else "."), [] if kind == "srt" else ["WEBVTT"]
    for number, one in enumerate(segments, 1):
        times = f"{timestamp(one.begin, separator)} --> {timestamp(one.end, separator)}"
        lines = [str(number), times, one.text.strip()] if kind == "srt" else [times, one.text.strip()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def transcription(one: GeneratedText, kind: str, language: str) -> Response:
    segments = one.segments or (TranscriptSegment(0.0, 0.0, one.text),)
    if kind in ("srt", "vtt"):
        return PlainTextResponse(subtitles(segments, kind))
    if kind == "text":
        return PlainTextResponse(f"{one.text}\n")
    if kind == "json":
        return JSONResponse({"text": one.text})
    rows = [{"id": number, "start": row.begin, "end": row.end, "text": row.text} for number, row in enumerate(segments)]
    duration = max(row.end for row in segments)
    body = {"task": "transcribe", "language": language, "duration": duration, "text": one.text, "segments": rows}
    return JSONResponse(body)


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIError} for status in (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=ERRORS)
    add_completion_routes(router, service)
    add_model_routes(router, service)
    add_audio_routes(router, service, settings)
    return router


def add_completion_routes(router: APIRouter, service: Service) -> None:
    @router.post("/completions", response_model=Completion, responses=EVENTS)
    async def create_completion(fields: CompletionFields) -> Any:
        request = fields.request(fields.prompts)
        if fields.stream:
            return await stream(service, request, fields)
        return completion(await service.generate(request), fields)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=EVENTS)
    async def create_chat_completion(fields: ChatFields) -> Any:
        request = fields.chat_request()
        if fields.stream:
            return await stream(service, request, fields)
        return chat_completion(await service.generate(request), fields)


def add_model_routes(router: APIRouter, service: Service) -> None:
    @router.get("/models", response_model=OpenAIModels)
    async def list_models() -> Any:
        return OpenAIModels(data=[OpenAIModel(id=one.name, created=one.created) for one in service.models()])

    @router.get("/models/{name}", response_model=OpenAIModel)
    async def get_model(name: str) -> Any:
        one = service.model(name)
        return OpenAIModel(id=one.name, created=one.created)

    @router.post("/embeddings", response_model=EmbeddingList)
    async def create_embeddings(fields: EmbeddingFields) -> Any:
        texts = [fields.input] if isinstance(fields.input, str) else fields.input
        vectors = await service.embed(texts, fields.model)
        if fields.dimensions is not None and any(len(one) != fields.dimensions for one in vectors):
            raise Unsupported("dimensions: vectors have the width of the model")
        rows = [OpenAIEmbedding(index=index, embedding=_encoded(one, fields)) for index, one in enumerate(vectors)]
        usage = EmbeddingUsage(prompt_tokens=0, total_tokens=0)  # the service does not count them
        return EmbeddingList(data=rows, model=service.model(fields.model).name, usage=usage)


def _encoded(vector: list[float], fields: EmbeddingFields) -> list[float] | str:
    if fields.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


TRANSCRIPTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/plain": {"schema": {"type": "string"}},
        }
    }
}


def add_audio_routes(router: APIRouter, service: Service, settings: ServerSettings) -> None:
    @router.post("/audio/transcriptions", response_class=Response, responses=TRANSCRIPTS)
    async def create_transcription(
        file: Annotated[UploadFile, File()],
        model: Annotated[str | None, Form()] = None,
        language: Annotated[str | None, Form()] = None,
        response_format: Annotated[Literal["json", "text", "srt", "verbose_json", "vtt"], Form()] = "json",
        temperature: Annotated[float | None, Form(ge=0, le=1)] = None,
    ) -> Response:
        data = await file.read()
        if len(data) > settings.limits.upload_bytes:
            raise BodyTooLarge("upload bytes", settings.limits.upload_bytes, len(data))
        source = Media(data, "audio", file.filename or "")
        request = GenerationRequest((source,), model=_listener(service, model), temperature=temperature or None)
        (one,) = (await service.generate(request)).best
        return transcription(one, response_format, language or "")


def _listener(service: Service, name: str | None) -> str:
    """The model of this name, or the first that transcribes; clients have to name one, such as whisper-1."""
    served = service.models()
    if name and any(one.name == name for one in served):
        return name
    if (found := next((one.name for one in served if "transcribe" in one.capabilities), None)) is None:
        raise Unsupported("no served model transcribes recordings")
    return found


INTERFACE = Interface("OpenAI", create_router, ("/v1/",), render_error)
