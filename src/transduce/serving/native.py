"""Interface of Transduce itself: `/v1/transduce`, models, jobs and reloading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from transduce.serving.jobs import BatchJob, Jobs
from transduce.serving.protocols.event_stream import event_response
from transduce.serving.service import (
    CALLER,
    BadRequest,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Interface,
    LimitExceeded,
    Limits,
    Media,
    ModelNotFound,
    Service,
    ServiceError,
    Source,
    TokenEvent,
    Unsupported,
    Want,
)

Texts = Annotated[list[str], Field(max_length=1024)]
Body = TypeVar("Body", bound=BaseModel)


class Options(BaseModel):
    """What an output should be like. Fields that are left out are those of the model."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    beam_size: int | None = Field(None, ge=1)
    n_best: int = Field(1, ge=1)
    max_length: int | None = Field(None, ge=1, description="Output tokens.")
    min_length: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100, description="Tokens are sampled; 0: greedy search.")
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**31)
    length_penalty: float | None = Field(None, ge=0, le=100)
    repetition_penalty: float | None = Field(None, ge=1, le=100)
    stop: Texts = Field(default_factory=list, description="The output ends before the first of these texts.")
    required: Texts = Field(default_factory=list, description="Phrases that every output contains.")
    banned: Texts = Field(default_factory=list, description="Phrases that no output contains.")
    wants: set[Want] = Field(
        default_factory=set, description="What to add to the texts: it costs time to compute or to send."
    )
    format: Literal["text", "html"] = "text"
    protect: bool = Field(False, description="Addresses, numbers, placeholders and emoji stay as they are.")
    priority: int = Field(0, ge=-10, le=10, description="Larger: earlier.")
    deadline: float | None = Field(None, gt=0, description="Seconds after which the client gives up.")

    def request(self, sources: tuple[Source, ...], prefixes: tuple[str, ...] = ()) -> GenerationRequest:
        own = self.__dict__
        values = {name: own[name] for name in OPTIONS}
        for name in ("stop", "required", "banned"):
            values[name] = tuple(own[name])
        values["wants"] = frozenset(self.wants)
        return GenerationRequest(sources, prefixes=prefixes, **values)


OPTIONS = tuple(Options.model_fields)


class TransduceBody(Options):
    """One text or several, and options."""

    input: str | list[str] = Field(description="One text or several.")
    prefix: str | list[str] | None = Field(None, description="Forced beginning of the output, one for each text.")
    stream: bool = Field(False, description="Tokens as server-sent events.")

    def generation(self, media: tuple[Source, ...] = ()) -> GenerationRequest:
        texts = (self.input,) if isinstance(self.input, str) else tuple(self.input)
        prefixes = (self.prefix,) if isinstance(self.prefix, str) else tuple(self.prefix or ())
        return self.request(media or texts, prefixes)


class JobBody(Options):
    """Many texts, answered in the background."""

    input: list[str] = Field(min_length=1)


def output_json(one: GeneratedText, wants: frozenset[Want]) -> dict[str, Any]:
    """One output as JSON: its text, score and end, and what was asked for."""
    found: dict[str, Any] = {"text": one.text, "score": one.score, "finish_reason": one.finish_reason}
    if one.confidence is not None:
        found["confidence"] = one.confidence
    if "tokens" in wants:
        found["tokens"] = list(one.tokens)
    if "scores" in wants:
        found["token_scores"] = list(one.token_scores)
    for name in ("alignment", "attention", "explanation"):
        if name in wants:
            found[name] = getattr(one, name)
    if one.segments:
        found["segments"] = [vars(segment) for segment in one.segments]
    return found


def result_json(result: GenerationResult, wants: frozenset[Want]) -> dict[str, Any]:
    return {
        "id": CALLER.get().request_id,
        "model": result.model,
        "results": [[output_json(one, wants) for one in ranked] for ranked in result.outputs],
        "usage": {
            "source_tokens": result.source_token_count,
            "output_tokens": result.token_count,
            "cached": result.cached,
        },
    }


def render_error(error: ServiceError) -> Response:
    return JSONResponse({"error": {"type": error.reason, "message": error.message}}, error.status)


def parse_body(kind: type[Body], content: bytes | str) -> Body:
    """A body as a typed value; what is wrong is named by its field."""
    try:
        return kind.model_validate_json(content or b"{}")
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)[:4]]
        raise BadRequest("; ".join(f"{place}: {text}" if place else text for place, text in places)) from None


async def read_request(request: Request, limits: Limits) -> tuple[TransduceBody, tuple[Source, ...]]:
    """The options of a request, and its uploads: JSON, or a multipart form of files and a field `request`."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return parse_body(TransduceBody, await request.body()), ()
    async with request.form(max_files=limits.items) as form:
        options = form.get("request", "{}")
        given = json.loads(parse_body(AnyObject, str(options)).model_dump_json())
        return parse_body(TransduceBody, json.dumps({"input": [], **given})), await uploads(form)


class AnyObject(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


MEDIA_KINDS = {"image": "image", "audio": "audio", "video": "video"}


async def uploads(form: FormData) -> tuple[Source, ...]:
    """The files of a form, with their kind by content type or name."""
    found: list[Source] = []
    for _, one in form.multi_items():
        if isinstance(one, UploadFile):
            kind = (one.content_type or "").split("/")[0]
            if kind not in MEDIA_KINDS:
                kind = "audio" if Path(one.filename or "").suffix.lower() in (".wav", ".flac", ".mp3") else "image"
            found.append(Media(await one.read(), kind, one.filename or ""))  # type: ignore[arg-type]
    if not found:
        raise BadRequest("the form has no file")
    return tuple(found)


def write_event(event: TokenEvent, wants: frozenset[Want]) -> Iterator[str]:
    """One event of a stream as JSON."""
    if event.final is None:
        found: dict[str, Any] = {"source": event.source, "text": event.text}
        yield json.dumps(found | ({"token": event.token, "score": event.score} if event.token else {}))
    else:
        yield json.dumps({"source": event.source, "text": event.text, "output": output_json(event.final, wants)})


_ERROR = {"description": "An error with its type and message.", "content": {"application/json": {"schema": {}}}}
ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 408, 413, 429, 500, 503, 504), _ERROR)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}}}
}


def router(service: Service, settings: Any) -> APIRouter:
    routes = APIRouter(tags=["transduce"], responses=ERRORS)
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(TransduceBody)}}}}

    @routes.post(
        "/v1/transduce", openapi_extra=schema, responses=ANSWERS, summary="Outputs of texts, images or recordings."
    )
    async def transduce(request: Request) -> Response:
        body, media = await read_request(request, settings.limits)
        asked = body.generation(media)
        if not body.stream:
            return JSONResponse(result_json(await service.generate(asked), asked.wants))
        error = lambda one: json.dumps({"error": {"type": one.reason, "message": one.message}})  # noqa: E731
        return await event_response(service.stream(asked), lambda one: write_event(one, asked.wants), error)

    @routes.get("/v1/transduce/models", summary="The served models and what they can do.")
    async def models() -> Response:
        rows = [{**vars(one), "capabilities": sorted(one.capabilities)} for one in service.models()]
        return JSONResponse({"models": rows})

    @routes.post("/admin/reload", summary="Loads the models again from their paths; no request is dropped.")
    async def reload() -> Response:
        if not settings.keys:
            raise Unsupported("models are loaded again over HTTP only where keys are needed; send SIGHUP instead")
        await (settings.reload or service.reload)()
        return JSONResponse({"models": [one.name for one in service.models()]})

    if settings.jobs_folder is not None:
        _job_routes(routes, Jobs(settings.jobs_folder, service, settings.limits), settings.limits)
    return routes


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a body, without references."""
    return {name: value for name, value in kind.model_json_schema().items() if name != "$defs"}


def resume_jobs(jobs: Jobs) -> int:
    """Continues the jobs that no process works on: their processes have ended. Returns their number."""

    def resumed(job: BatchJob) -> bool:
        body = JobBody(input=[""], **job.options)
        return jobs.start(job, lambda texts: body.request(tuple(texts)))

    return sum([resumed(job) for job in jobs.unfinished()])


def _file_lines(file: Media) -> list[str]:
    """The lines of an uploaded file. Only a line feed ends a line: every line has an answer in the same place."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("the file is not UTF-8 text") from None
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _job_routes(routes: APIRouter, jobs: Jobs, limits: Limits) -> None:
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(JobBody)}}}}

    def find(identity: str) -> BatchJob:
        job = jobs.find(identity)
        if job is None or job.client != CALLER.get().client:
            raise ModelNotFound("there is no such job")
        return job

    @routes.post("/v1/jobs", openapi_extra=schema, status_code=202, summary="Many texts, answered in the background.")
    async def create(request: Request) -> Response:
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            async with request.form(max_files=1) as form:
                (file,) = await uploads(form)
                assert isinstance(file, Media)
                lines = _file_lines(file)
                given = json.loads(parse_body(AnyObject, str(form.get("request", "{}"))).model_dump_json())
                body = parse_body(JobBody, json.dumps({**given, "input": lines}))
        else:
            body = parse_body(JobBody, await request.body())
        if len(body.input) > limits.job_items:
            raise LimitExceeded("job items", limits.job_items, len(body.input))
        service_model = jobs.service.model(body.model, body.source_language, body.target_language)
        options = body.model_dump(mode="json", exclude={"input"}) | {"model": service_model.name}
        job = await run_in_threadpool(jobs.create, body.input, options, CALLER.get().client)
        jobs.start(job, lambda texts: body.request(tuple(texts)))
        return JSONResponse(job.public(), 202)

    @routes.get("/v1/jobs/{identity}", summary="The progress of a job.")
    async def progress(identity: str) -> Response:
        return JSONResponse(find(identity).public())

    @routes.delete("/v1/jobs/{identity}", summary="Cancels a job and removes its output.")
    async def cancel(identity: str) -> Response:
        job = find(identity)
        await run_in_threadpool(jobs.cancel, job)
        return JSONResponse(job.public())

    @routes.get("/v1/jobs/{identity}/output", summary="The output so far, one JSON line per text; Range is accepted.")
    async def output(identity: str) -> Response:
        job = find(identity)
        return FileResponse(job.output, media_type="application/jsonl", filename=f"{job.identity}.jsonl")


NATIVE = Interface("transduce", router, ("/v1/transduce", "/v1/transduce/", "/v1/jobs", "/v1/jobs/"), render_error)
