"""Text Generation Inference interface: /generate, /generate_stream, /info."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

import transduce
from transduce.serving.protocols.event_stream import event_response
from transduce.serving.service import (
    GeneratedText,
    GenerationRequest,
    Interface,
    Service,
    ServiceError,
    TokenEvent,
    Unsupported,
)

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings

END = "</s>"
NO_ID = 0  # the service has the texts of tokens, not their numbers in a vocabulary


class TGIParameters(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    best_of: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, gt=0)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = None
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    do_sample: bool = False
    max_new_tokens: int | None = Field(None, ge=1)
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: int | None = Field(None, ge=1)
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = Field(None, ge=0, lt=2**63)
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None  # the name of a served model

    def request(self, inputs: str, model: str | None = None) -> GenerationRequest:
        for name in ("typical_p", "grammar", "watermark", "frequency_penalty", "top_n_tokens"):
            if getattr(self, name):
                raise Unsupported(f"{name} is not supported")
        sampled = self.do_sample or any((self.temperature, self.top_k, self.top_p))
        return GenerationRequest(
            (inputs,),
            model=model or self.adapter_id,
            n_best=self.best_of or 1,
            max_length=self.max_new_tokens,
            temperature=(self.temperature or 1.0) if sampled else None,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop),
        )

    def stream_request(self, inputs: str, model: str | None = None) -> GenerationRequest:
        if (self.best_of or 1) > 1:
            raise Unsupported("`best_of` != 1 is not supported when streaming tokens")
        if self.stop:
            raise Unsupported("`stop` is not supported when streaming tokens")
        return self.request(inputs, model)


class GenerateFields(BaseModel):
    inputs: str = Field(min_length=1)
    parameters: TGIParameters = TGIParameters()

    @property
    def before(self) -> str:
        """What stands before the generated text."""
        return self.inputs if self.parameters.return_full_text else ""


class TokenBody(BaseModel):
    id: int = NO_ID
    text: str
    logprob: float
    special: bool


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TGISequence(BaseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[TokenBody] = []
    tokens: list[TokenBody]


class TGIDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[TokenBody] = []
    tokens: list[TokenBody]
    best_of_sequences: list[TGISequence] | None = None


class GenerateBody(BaseModel):
    generated_text: str
    details: TGIDetails | None = None


class InfoBody(BaseModel):
    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str = "transduce"
    version: str


class TGIError(BaseModel):
    error: str
    error_type: str


def error_body(error: ServiceError) -> tuple[dict[str, str], int]:
    if error.status == 429:
        return {"error": "Model is overloaded", "error_type": "overloaded"}, 429
    if error.status in (500, 504):
        return {"error": f"Request failed during generation: {error.message}", "error_type": "generation"}, 424
    if error.status == 400:
        return {"error": f"Input validation error: {error.message}", "error_type": "validation"}, 422
    return {"error": error.message, "error_type": "validation" if error.status == 413 else error.reason}, error.status


def render_error(error: ServiceError) -> Response:
    body, status = error_body(error)
    return JSONResponse(body, status)


def finish_reason(one: GeneratedText) -> FinishReason:
    if one.finish_reason == "length":
        return "length"
    return "eos_token" if not one.tokens or one.tokens[-1] == END else "stop_sequence"


def token_bodies(one: GeneratedText) -> list[TokenBody]:
    rows = zip(one.tokens, one.token_scores, strict=True)
    return [TokenBody(text=token, logprob=score, special=token == END) for token, score in rows]


def generate_body(ranked: tuple[GeneratedText, ...], fields: GenerateFields) -> GenerateBody:
    given, best = fields.parameters, ranked[0]
    before = fields.before
    if not given.details:
        return GenerateBody(generated_text=before + best.text)
    others = [
        TGISequence(
            generated_text=before + one.text,
            finish_reason=finish_reason(one),
            generated_tokens=one.token_count,
            seed=given.seed,
            tokens=token_bodies(one),
        )
        for one in ranked[1:]
    ]
    details = TGIDetails(
        finish_reason=finish_reason(best),
        generated_tokens=best.token_count,
        seed=given.seed,
        tokens=token_bodies(best),
        best_of_sequences=others or None,
    )
    return GenerateBody(generated_text=before + best.text, details=details)


class StreamWriter:
    """The events of a stream. The last token has the whole text and its details."""

    def __init__(self, fields: GenerateFields) -> None:
        self.fields, self.count = fields, 0
        self.waiting: TokenEvent | None = None  # a token that may be the last

    def write(self, event: TokenEvent) -> Iterator[str]:
        if event.final is None:
            if self.waiting is not None:
                yield self._data(self.waiting, None)
            self.waiting = event
            return
        yield self._data(self.waiting or TokenEvent("", END), event.final)

    def _data(self, event: TokenEvent, final: GeneratedText | None) -> str:
        self.count += 1
        special = event.token == END
        token = {"id": NO_ID, "text": END if special else event.text, "logprob": event.score, "special": special}
        body: dict[str, Any] = {"index": self.count, "token": token, "generated_text": None, "details": None}
        if final is not None:
            body["generated_text"] = self.fields.before + final.text
            body["details"] = {
                "finish_reason": finish_reason(final),
                "generated_tokens": final.token_count,
                "input_length": final.source_token_count,
                "seed": self.fields.parameters.seed,
            }
        return json.dumps(body, ensure_ascii=False)


async def stream(service: Service, fields: GenerateFields, model: str | None = None) -> Response:
    events = service.stream(fields.parameters.stream_request(fields.inputs, model))
    return await event_response(events, StreamWriter(fields).write, lambda error: json.dumps(error_body(error)[0]))


async def generate(service: Service, fields: GenerateFields, model: str | None = None) -> GenerateBody:
    result = await service.generate(fields.parameters.request(fields.inputs, model))
    return generate_body(result.outputs[0], fields)


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": TGIError} for status in (401, 403, 404, 408, 413, 422, 424, 429, 503)
}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(tags=["Text Generation Inference"], responses=ERRORS)

    @router.post("/generate", response_model=GenerateBody, response_model_exclude_none=True)
    async def generate_text(fields: GenerateFields) -> Any:
        return await generate(service, fields)

    @router.post("/generate_stream", response_class=Response, responses=EVENTS)
    async def generate_stream(fields: GenerateFields) -> Response:
        return await stream(service, fields)

    @router.get("/info", response_model=InfoBody)
    async def info() -> Any:
        limits, model = settings.limits, service.model()
        return InfoBody(
            model_id=model.name,
            model_pipeline_tag=model.task,
            max_concurrent_requests=limits.queued,
            max_best_of=limits.n_best,
            max_stop_sequences=limits.items,
            max_input_tokens=model.max_source_tokens,
            max_total_tokens=model.max_source_tokens + min(limits.output_tokens, model.max_target_tokens),
            max_client_batch_size=limits.items,
            version=transduce.__version__,
        )

    return router


INTERFACE = Interface("TGI", create_router, ("/generate", "/generate_stream", "/info"), render_error)
