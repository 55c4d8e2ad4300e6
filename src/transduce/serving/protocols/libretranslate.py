"""LibreTranslate interface: /translate, /detect, /languages, /translate_file, /suggest, /frontend/settings, /spec.

Parameters are accepted as JSON, as a form and in the query string, on every POST.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from transduce.inference.documents import FORMATS, parse_document
from transduce.serving.protocols.translation import (
    ServedLanguages,
    TranslationRequest,
    language_name,
    translate_document,
    translate_texts,
)
from transduce.serving.service import (
    BadRequest,
    Interface,
    InvalidKey,
    KeyMissing,
    LimitExceeded,
    Overloaded,
    Service,
    ServiceError,
)

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings

FILE_SECONDS = 1800  # for which a translated file can be downloaded
FORM_FIELDS = 16
MEDIA_TYPES = {".txt": "text/plain", ".srt": "application/x-subrip", ".vtt": "text/vtt"}


class DetectedLanguageBody(BaseModel):
    confidence: float  # 0 to 100
    language: str


class LibreTranslation(BaseModel):
    translatedText: str | list[str]  # noqa: N815
    detectedLanguage: DetectedLanguageBody | list[DetectedLanguageBody] | None = None  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None


class LibreLanguage(BaseModel):
    code: str
    name: str
    targets: list[str]


class FileBody(BaseModel):
    translatedFileUrl: str  # noqa: N815


class SuccessBody(BaseModel):
    success: bool


class SettingsLanguage(BaseModel):
    code: str
    name: str


class SettingsBody(BaseModel):
    charLimit: int  # noqa: N815
    frontendTimeout: int  # noqa: N815
    apiKeys: bool  # noqa: N815
    keyRequired: bool  # noqa: N815
    suggestions: bool
    filesTranslation: bool  # noqa: N815
    supportedFilesFormat: list[str]  # noqa: N815
    language: dict[str, SettingsLanguage]


class LibreError(BaseModel):
    error: str


class LibreFields(BaseModel):
    """The parameters of a request, in whatever form they came. Each route says which are needed."""

    model_config = ConfigDict(extra="ignore")

    q: str | list[str] | None = None
    s: str | None = None
    source: str | None = None
    target: str | None = None
    format: str | None = None
    alternatives: int | str | None = None

    def required(self, *names: str) -> list[Any]:
        for name in names:
            if not getattr(self, name):
                raise BadRequest(f"Invalid request: missing {name} parameter")
        return [getattr(self, name) for name in names]

    @property
    def alternative_count(self) -> int:
        try:
            return max(int(self.alternatives or 0), 0)
        except ValueError:
            raise BadRequest("Invalid request: alternatives parameter is not a number") from None


async def read_fields(request: Request) -> LibreFields:
    """The parameters of the query string and of the body."""
    given: dict[str, Any] = dict(request.query_params)
    kind = request.headers.get("content-type", "")
    if kind.startswith(("application/x-www-form-urlencoded", "multipart/form-data")):
        given |= dict((await request.form(max_fields=FORM_FIELDS)).items())
    elif body := await request.body():
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("Invalid JSON format") from None
        if not isinstance(content, dict):
            raise BadRequest("Invalid JSON format")
        given |= content
    try:
        return LibreFields.model_validate(given)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise BadRequest(f"Invalid request: {name} parameter is not valid") from None


def check_languages(languages: ServedLanguages, source: str, target: str) -> tuple[str | None, str]:
    """The served languages that two codes mean; no source: it is detected."""
    own = None if source == "auto" else languages.source(source)
    if own is None and source != "auto":
        raise BadRequest(f"{source} is not supported")
    wanted = languages.target(target) or (own if own and own == languages.source(target) else None)
    if wanted is None:
        raise BadRequest(f"{target} is not supported")
    if own is not None and own != wanted and languages.model(own, wanted) is None:
        raise BadRequest(
            f"{language_name(wanted)} ({wanted}) is not available as a target language from "
            f"{language_name(own)} ({own})"
        )
    return own, wanted


class LibreTranslator:
    """The texts of one request, translated."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.service, self.limits = service, settings.limits

    async def __call__(self, fields: LibreFields) -> dict[str, Any]:
        q, source, target = fields.required("q", "source", "target")
        count, form = fields.alternative_count, fields.format or "text"
        texts = q if isinstance(q, list) else [q]
        self._check(texts, count)
        languages = ServedLanguages(self.service)
        own, wanted = check_languages(languages, source, target)
        if form not in ("text", "html"):
            raise BadRequest(f"{form} format is not supported")
        found = [languages.detect_source(text, wanted) for text in texts] if own is None else []
        sources = [one.language for one in found] if own is None else [own] * len(texts)
        translated = await self._translate(texts, sources, wanted, form, count)
        best = [ranked[0] for ranked in translated]
        result: dict[str, Any] = {"translatedText": best}
        if own is None:
            detected = [{"confidence": round(100 * one.confidence, 1), "language": one.language} for one in found]
            result["detectedLanguage"] = detected
        if count:
            others = [list(dict.fromkeys(ranked[1:])) for ranked in translated]
            result["alternatives"] = [
                [one for one in row if one != first] for first, row in zip(best, others, strict=True)
            ]
        return result if isinstance(q, list) else {name: value[0] for name, value in result.items()}

    def _check(self, texts: list[str], alternatives: int) -> None:
        if alternatives > (most := self.limits.n_best - 1):
            raise BadRequest(f"Invalid request: alternatives parameter must be <= {most}")
        for size, limit in ((len(texts), self.limits.items), (sum(map(len, texts)), self.limits.characters)):
            if size > limit:
                raise BadRequest(f"Invalid request: request ({size}) exceeds text limit ({limit})")

    async def _translate(
        self, texts: list[str], sources: list[str], target: str, form: str, alternatives: int
    ) -> list[list[str]]:
        """The translations of each text, best first. The texts of a language are one request."""
        results: dict[int, list[str]] = {}

        async def translate(source: str) -> None:
            rows = [row for row, one in enumerate(sources) if one == source]
            request = TranslationRequest(target, source, n_best=alternatives + 1)
            if form == "html":
                for row in rows:
                    document = parse_document(texts[row], ".html")
                    results[row] = [str(await translate_document(self.service, document, request, self.limits))]
                return
            found = await translate_texts(self.service, [texts[row] for row in rows], request)
            results.update({row: [one.text for one in ranked] for row, ranked in zip(rows, found, strict=True)})

        await asyncio.gather(*(translate(source) for source in dict.fromkeys(sources)))
        return [results[row] for row in range(len(texts))]


class TranslatedFiles:
    """Translated files until they are downloaded, in a folder that all workers of this machine share."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir(), f"transduce-files-{os.getuid()}")

    def add(self, name: str, content: bytes) -> str:
        """Stores a file under a name that nobody can guess."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise ServiceError
        for old in self.folder.iterdir():
            if time.time() - old.stat().st_mtime > FILE_SECONDS:
                old.unlink(missing_ok=True)
        stored = f"{secrets.token_hex(16)}.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[-80:]}"
        (self.folder / stored).write_bytes(content)
        return stored

    def read(self, name: str) -> bytes | None:
        if re.fullmatch(r"[0-9a-f]{32}\.[A-Za-z0-9_.-]{1,80}", name) is None:
            raise BadRequest("Invalid filename")
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None


async def translate_upload(service: Service, settings: ServerSettings, request: Request) -> tuple[str, bytes]:
    """The name and the translated content of an uploaded file."""
    fields = await read_fields(request)
    form = await request.form()
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise BadRequest("Invalid request: missing file parameter")
    source, target = fields.required("source", "target")
    if not file.filename:
        raise BadRequest("Invalid request: empty file")
    extension = Path(file.filename).suffix.lower()
    if extension not in FORMATS:
        raise BadRequest("Invalid request: file format not supported")
    languages = ServedLanguages(service)
    own, wanted = check_languages(languages, source, target)
    try:
        content = (await file.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("Invalid request: the file is not UTF-8 text") from None
    document = parse_document(content, extension)
    if own is None:
        text = " ".join(sentence for row in document.sentences[:64] for sentence in row)
        own = languages.detect_source(text, wanted).language
    found = await translate_document(service, document, TranslationRequest(wanted, own), settings.limits)
    name = Path(file.filename.replace("\\", "/")).name
    return f"{name[: -len(extension)]}_{wanted}{extension}", str(found).encode()


def render_error(error: ServiceError) -> Response:
    status, message = error.status, error.message
    if isinstance(error, KeyMissing):
        message = "Please contact the server operator to get an API key"
    elif isinstance(error, InvalidKey):
        message = "Invalid API key"
    elif isinstance(error, Overloaded):
        message = f"Slowdown: {message}"
    elif isinstance(error, LimitExceeded) and status == 400:
        message = f"Invalid request: {message}"
    elif error.reason == "model":
        status = 400
    return JSONResponse({"error": message}, status)


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": LibreError} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
}
_TEXT = {"type": "string"}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _body(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of parameters that may be JSON, a form, or in the query string."""
    form = {name: (_TEXT if "anyOf" in one else one) for name, one in properties.items()} | {"api_key": _TEXT}
    schemas = {
        "application/json": {"type": "object", "properties": properties | {"api_key": _TEXT}, "required": required},
        "application/x-www-form-urlencoded": {"type": "object", "properties": form, "required": required},
    }
    return {"requestBody": {"content": {kind: {"schema": schema} for kind, schema in schemas.items()}}}


_TRANSLATE = _body(
    ["q", "source", "target"],
    q=_TEXTS,
    source={"type": "string", "example": "auto"},
    target=_TEXT,
    format={"type": "string", "enum": ["text", "html"], "default": "text"},
    alternatives={"type": "integer", "minimum": 0, "default": 0},
)
_FILE_SCHEMA = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "source": _TEXT, "target": _TEXT},
    "required": ["file", "source", "target"],
}
_FILE = {"requestBody": {"content": {"multipart/form-data": {"schema": _FILE_SCHEMA}}}}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(tags=["LibreTranslate"], responses=ERRORS)
    add_text_routes(router, service, settings)
    add_file_routes(router, service, settings)
    add_frontend_routes(router, service, settings)
    return router


def add_text_routes(router: APIRouter, service: Service, settings: ServerSettings) -> None:
    translator, names = LibreTranslator(service, settings), ("q", "s", "source", "target")

    @router.post(
        "/translate", response_model=LibreTranslation, response_model_exclude_unset=True, openapi_extra=_TRANSLATE
    )
    async def translate(request: Request) -> Any:
        return await translator(await read_fields(request))

    @router.post("/detect", response_model=list[DetectedLanguageBody], openapi_extra=_body(["q"], q=_TEXTS))
    async def detect(request: Request) -> Any:
        (q,) = (await read_fields(request)).required("q")
        text = " ".join(q) if isinstance(q, list) else q
        found = [one for one in ServedLanguages(service).detect(text) if one.confidence >= 0.01]
        return [{"confidence": round(100 * one.confidence, 1), "language": one.language} for one in found[:5]]

    @router.get("/languages", response_model=list[LibreLanguage])
    async def languages() -> Any:
        rows = ServedLanguages(service).targets.items()
        return [{"code": code, "name": language_name(code), "targets": targets} for code, targets in rows]

    @router.post(
        "/suggest",
        response_model=SuccessBody,
        openapi_extra=_body([*names], **dict.fromkeys(names, _TEXT)),
    )
    async def suggest(request: Request) -> Any:
        fields = await read_fields(request)
        given = dict(zip(names, fields.required(*names), strict=True))
        if settings.suggestions is None:
            raise Disabled("Suggestions are disabled on this server.")
        with open(settings.suggestions, "a", encoding="utf-8") as file:
            file.write(json.dumps(given, ensure_ascii=False) + "\n")
        return {"success": True}


class FileMissing(ServiceError):  # noqa: N818
    status, reason = 404, "invalid"


class Disabled(ServiceError):  # noqa: N818
    status, reason = 403, "disabled"


def add_file_routes(router: APIRouter, service: Service, settings: ServerSettings) -> None:
    files = TranslatedFiles()

    @router.post("/translate_file", response_model=FileBody, openapi_extra=_FILE)
    async def translate_file(request: Request) -> Any:
        name = files.add(*await translate_upload(service, settings, request))
        return {"translatedFileUrl": str(request.url_for("download_file", name=name))}

    @router.get("/download_file/{name}", response_class=Response, responses={200: {"content": {"text/*": {}}}})
    async def download_file(name: str) -> Response:
        content = files.read(name)
        if content is None:
            raise FileMissing("Filename does not exist")
        own = name.partition(".")[2]
        kind = MEDIA_TYPES.get(Path(own).suffix, "text/html")
        # A page of a stranger must not run in the origin of this server.
        headers = {"Content-Disposition": f'attachment; filename="{own}"', "X-Content-Type-Options": "nosniff"}
        return Response(content, media_type=kind, headers=headers)


def add_frontend_routes(router: APIRouter, service: Service, settings: ServerSettings) -> None:
    @router.get("/frontend/settings", response_model=SettingsBody)
    async def frontend_settings() -> Any:
        targets = ServedLanguages(service).targets
        source = next(iter(targets), "auto")
        target = next(iter(targets.get(source, ())), source)
        return {
            "charLimit": settings.limits.characters,
            "frontendTimeout": 500,
            "apiKeys": bool(settings.keys),
            "keyRequired": bool(settings.keys),
            "suggestions": settings.suggestions is not None,
            "filesTranslation": True,
            "supportedFilesFormat": list(FORMATS),
            "language": {
                "source": {"code": source, "name": language_name(source)},
                "target": {"code": target, "name": language_name(target)},
            },
        }

    @router.get("/spec", response_model=dict[str, Any])
    async def spec(request: Request) -> Any:
        return request.app.openapi()


INTERFACE = Interface(
    "LibreTranslate",
    create_router,
    ("/translate", "/detect", "/languages", "/translate_file", "/download_file/", "/suggest", "/frontend/", "/spec"),
    render_error,
    key_fields=("api_key", "apiKey"),
    missing_key_status=400,
)
