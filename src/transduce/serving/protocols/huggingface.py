"""Hugging Face inference interface: /models/NAME and /pipeline/TASK, for texts, images and recordings."""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from transduce.serving.protocols import tgi
from transduce.serving.protocols.translation import match_language
from transduce.serving.service import (
    BadRequest,
    GenerationRequest,
    GenerationResult,
    Interface,
    Media,
    ModelInfo,
    Service,
    ServiceError,
    Source,
    Unsupported,
)

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings

Fields = TypeVar("Fields", bound=BaseModel)
TASK_OF = {  # a model at /models/NAME answers as its task says
    "translation": "translation",
    "text-generation": "text-generation",
    "transcription": "automatic-speech-recognition",
    "captioning": "image-to-text",
    "embedding": "feature-extraction",
    "classification": "text-classification",
}


class SearchFields(BaseModel):
    """Settings of the search, by the names of transformers."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    max_new_tokens: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    min_length: int | None = Field(None, ge=0)
    num_beams: int | None = Field(None, ge=1)
    do_sample: bool = False
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    length_penalty: float | None = None


class HuggingFaceParameters(SearchFields):
    src_lang: str | None = None
    tgt_lang: str | None = None
    return_timestamps: bool | str = False
    generate_parameters: SearchFields | None = None
    generation_parameters: SearchFields | None = None

    def request(self, sources: tuple[Source, ...], model: ModelInfo) -> GenerationRequest:
        own = self.generate_parameters or self.generation_parameters or self
        sampled = own.do_sample
        return GenerationRequest(
            sources,
            model=model.name,
            source_language=_language(self.src_lang, model.source_languages),
            target_language=_language(self.tgt_lang, model.target_languages),
            beam_size=own.num_beams,
            max_length=own.max_new_tokens or own.max_length,
            min_length=own.min_length,
            temperature=(own.temperature or 1.0) if sampled else None,
            top_k=own.top_k if sampled else None,
            top_p=own.top_p if sampled else None,
            repetition_penalty=own.repetition_penalty,
            length_penalty=own.length_penalty,
        )


def _language(code: str | None, known: tuple[str, ...]) -> str | None:
    """A served language for a code such as en, en_XX or eng_Latn."""
    if code is None:
        return None
    found = match_language(code, known) or match_language(code.split("_")[0], known)
    if found is None and known:
        raise BadRequest(f"{code} is not supported")
    return found or code


@dataclass(frozen=True)
class InferenceCall:
    """What a client sent: the inputs of a JSON body, or the bytes of a file."""

    inputs: Any
    parameters: dict[str, Any]
    stream: bool
    kind: str  # media type of a file

    def texts(self) -> list[str]:
        found = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise BadRequest("inputs: a text or a list of texts is needed")
        return found

    def media(self, modality: str) -> Media:
        data = self.inputs
        if isinstance(data, str):
            try:
                data = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                raise BadRequest("inputs: the data are not base64") from None
        if not isinstance(data, bytes) or not data:
            raise BadRequest("inputs: the bytes of a file are needed")
        name = f"upload{mimetypes.guess_extension(self.kind) or ''}"
        return Media(data, "image" if modality == "image" else "audio", name)

    def search(self) -> HuggingFaceParameters:
        return parsed(HuggingFaceParameters, self.parameters)


def parsed(kind: type[Fields], given: Any) -> Fields:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        rows = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:4]]
        raise BadRequest("; ".join(rows)) from None


async def read_call(request: Request) -> InferenceCall:
    body, kind = await request.body(), request.headers.get("content-type", "").split(";")[0].strip()
    if kind.startswith(("image/", "audio/", "application/octet-stream")):
        return InferenceCall(body, {}, False, kind)
    try:
        content = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError
    except (ValueError, RecursionError):
        if kind in ("", "application/x-www-form-urlencoded") and body:  # files whose type the client did not know
            return InferenceCall(body, {}, False, "")
        raise BadRequest("the body is neither JSON nor a file") from None
    if "inputs" not in content:
        raise BadRequest("inputs: field required")
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadRequest("parameters: an object is needed")
    more = {name: value for name, value in content.items() if name not in ("inputs", "parameters", "stream", "options")}
    return InferenceCall(content["inputs"], {**more, **parameters}, content.get("stream") is True, "")


async def texts_with(service: Service, call: InferenceCall, model: ModelInfo, key: str) -> list[dict[str, str]]:
    result = await service.generate(call.search().request(tuple(call.texts()), model))
    return [{key: one.text} for one in result.best]


async def translation(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    return await texts_with(service, call, model, "translation_text")


async def summarization(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    return await texts_with(service, call, model, "summary_text")


async def text_generation(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    (text, *more) = call.texts()
    if more:
        return await texts_with(service, call, model, "generated_text")
    fields = parsed(tgi.GenerateFields, {"inputs": text, "parameters": _without_none(call.parameters)})
    if call.stream:
        return await tgi.stream(service, fields, model.name)
    return [(await tgi.generate(service, fields, model.name)).model_dump(exclude_none=True)]


def _without_none(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


async def feature_extraction(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    vectors = await service.embed(call.texts(), model.name)
    if not call.parameters.get("normalize"):
        return vectors
    norms = [sum(value * value for value in row) ** 0.5 or 1.0 for row in vectors]
    return [[value / norm for value in row] for row, norm in zip(vectors, norms, strict=True)]


async def media_result(service: Service, call: InferenceCall, model: ModelInfo, modality: str) -> GenerationResult:
    if model.modality != modality:
        raise Unsupported(f"the model {model.name!r} reads {model.modality}")
    return await service.generate(call.search().request((call.media(modality),), model))


async def image_to_text(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    (one,) = (await media_result(service, call, model, "image")).best
    return [{"generated_text": one.text}]


async def automatic_speech_recognition(service: Service, call: InferenceCall, model: ModelInfo) -> Any:
    (one,) = (await media_result(service, call, model, "audio")).best
    body: dict[str, Any] = {"text": one.text}
    if call.parameters.get("return_timestamps"):
        body["chunks"] = [{"text": row.text, "timestamp": [row.begin, row.end]} for row in one.segments]
    return body


TEXT_TASKS = ("summarization", "text-generation", "text2text-generation")  # of any model from text to text
Task = Callable[[Service, InferenceCall, ModelInfo], Awaitable[Any]]
TASKS: dict[str, Task] = {
    "translation": translation,
    "summarization": summarization,
    "text-generation": text_generation,
    "text2text-generation": text_generation,
    "feature-extraction": feature_extraction,
    "image-to-text": image_to_text,
    "automatic-speech-recognition": automatic_speech_recognition,
}


class HuggingFaceError(BaseModel):
    error: str


def render_error(error: ServiceError) -> Response:
    return JSONResponse({"error": error.message}, error.status)


def select(service: Service, task: str) -> ModelInfo:
    """The first model that fits a task."""
    for one in service.models():
        if task == "feature-extraction" and "embed" in one.capabilities:
            return one
        own = TASK_OF.get(one.task)
        if own == task or (own == "translation" and task in TEXT_TASKS):
            return one
    raise Unsupported(f"no served model fits the task {task}")


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": HuggingFaceError} for status in (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
}
_JSON = {"type": "object", "required": ["inputs"], "properties": {"inputs": {}, "parameters": {"type": "object"}}}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _JSON},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}}}
}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(tags=["Hugging Face"], responses=ERRORS | _ANSWER)

    async def answer(request: Request, model: ModelInfo | None, task: str | None) -> Response:
        if task is not None and task not in TASKS:
            raise Unsupported(f"the task {task} is not served")
        model = model or (service.model() if task is None else select(service, task))
        task = task or TASK_OF.get(model.task, "")
        if task not in TASKS:
            raise Unsupported(f"the task {task} is not served here")
        found = await TASKS[task](service, await read_call(request), model)
        return found if isinstance(found, Response) else JSONResponse(found)

    @router.post("/", openapi_extra=_BODY, response_class=Response)
    async def default_model(request: Request) -> Response:
        return await answer(request, None, None)

    @router.post("/models/{name}", openapi_extra=_BODY, response_class=Response)
    async def named_model(request: Request, name: str) -> Response:
        return await answer(request, service.model(name), None)

    @router.post("/pipeline/{task}", openapi_extra=_BODY, response_class=Response)
    async def task_of_any_model(request: Request, task: str) -> Response:
        return await answer(request, None, task)

    @router.post("/models/{name}/pipeline/{task}", openapi_extra=_BODY, response_class=Response)
    async def task_of_a_model(request: Request, name: str, task: str) -> Response:
        return await answer(request, service.model(name), task)

    return router


INTERFACE = Interface("Hugging Face", create_router, ("/models/", "/pipeline/", "/"), render_error)
