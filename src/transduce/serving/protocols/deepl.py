"""DeepL interface, version 2: /v2/translate, /v2/languages, /v2/usage."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from transduce.inference.documents import Document, parse_html, parse_xml
from transduce.serving.protocols.translation import (
    ServedLanguages,
    TranslationRequest,
    language_name,
    translate_document,
    translate_texts,
)
from transduce.serving.service import CALLER, BadRequest, Interface, InvalidKey, KeyMissing, Service, ServiceError

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings

UNLIMITED = 10**12  # characters; what DeepL states where an account has no limit
VARIANTS = {"en": ("EN-GB", "EN-US"), "pt": ("PT-BR", "PT-PT")}  # of target languages; the bare codes are deprecated
TAG_LISTS = ("splitting_tags", "non_splitting_tags", "ignore_tags")


class DeepLFields(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    text: list[str] = Field(min_length=1)
    target_lang: str = Field(min_length=2, max_length=32)
    source_lang: str | None = Field(None, max_length=32)
    context: str | None = None  # accepted; sentences are translated without it
    split_sentences: Literal["0", "1", "nonewlines"] | None = None
    preserve_formatting: bool = False
    formality: Literal["default", "more", "less", "prefer_more", "prefer_less"] = "default"
    glossary_id: str | None = None
    show_billed_characters: bool = False
    tag_handling: Literal["xml", "html"] | None = None
    splitting_tags: list[str] = []
    ignore_tags: list[str] = []
    model_type: Literal["quality_optimized", "latency_optimized", "prefer_quality_optimized"] | None = None


class DeepLTranslation(BaseModel):
    detected_source_language: str
    text: str
    billed_characters: int | None = None
    model_type_used: str | None = None


class DeepLTranslations(BaseModel):
    translations: list[DeepLTranslation]


class DeepLLanguage(BaseModel):
    language: str
    name: str
    supports_formality: bool | None = None


class DeepLUsage(BaseModel):
    character_count: int
    character_limit: int


class DeepLError(BaseModel):
    message: str


class GlossaryNotFound(ServiceError):  # noqa: N818
    status, reason = 404, "invalid"


def render_error(error: ServiceError) -> Response:
    status = 400 if error.reason == "model" else error.status
    message = "Authorization failure" if isinstance(error, (KeyMissing, InvalidKey)) else error.message
    return JSONResponse({"message": message}, status)


async def read_fields(request: Request) -> dict[str, Any]:
    """The parameters of the query string and of a JSON or form body; the official client has a body in GET requests."""
    given: dict[str, Any] = dict(request.query_params)
    if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        form = await request.form()
        given |= {name: form.getlist(name) if name == "text" else form[name] for name in form}
    elif body := await request.body():
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None
        if not isinstance(content, dict):
            raise BadRequest("the body is not a JSON object")
        given |= content
    for name in TAG_LISTS:
        if isinstance(given.get(name), str):
            given[name] = given[name].split(",")
    if isinstance(given.get("text"), str):
        given["text"] = [given["text"]]
    return given


def parse_fields(given: dict[str, Any]) -> DeepLFields:
    try:
        fields = DeepLFields.model_validate(given)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        known = f"Value for '{name}' not supported." if name in given else f"Parameter '{name}' not specified."
        raise BadRequest(known) from None
    if fields.formality in ("more", "less"):
        raise BadRequest("'formality' is not supported for given 'target_lang'.")
    if fields.glossary_id:
        raise GlossaryNotFound("Glossary not found")
    return fields


def parse_tags(text: str, fields: DeepLFields) -> Document:
    """A text with HTML or XML tags as a document."""
    if fields.tag_handling == "html":
        return Document(tuple(parse_html(text)), "html")
    segments = parse_xml(text, splitting=fields.splitting_tags, ignored=fields.ignore_tags)
    return Document(tuple(segments), "xml")


class DeepLTranslator:
    """The texts of one request, translated, and the characters that each client has sent."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.service, self.limits = service, settings.limits
        self.characters: Counter[str] = Counter()

    async def __call__(self, fields: DeepLFields) -> DeepLTranslations:
        languages = ServedLanguages(self.service)
        target = languages.target(fields.target_lang.lower())
        if target is None:
            raise BadRequest("Value for 'target_lang' not supported.")
        source = None if not fields.source_lang else languages.source(fields.source_lang.lower())
        if fields.source_lang and (source is None or not (source == target or languages.model(source, target))):
            raise BadRequest("Value for 'source_lang' not supported.")
        sources = [source or languages.detect_source(text, target).language for text in fields.text]
        found = await self._translate(fields, sources, target)
        self._count(sum(map(len, fields.text)))
        rows = zip(fields.text, sources, found, strict=True)
        return DeepLTranslations(translations=[self._translation(fields, *row) for row in rows])

    def _count(self, characters: int) -> None:
        client = CALLER.get().client
        if client not in self.characters and len(self.characters) >= 10_000:
            del self.characters[next(iter(self.characters))]
        self.characters[client] += characters

    def _translation(self, fields: DeepLFields, text: str, source: str, output: str) -> DeepLTranslation:
        body: dict[str, Any] = {"detected_source_language": source.upper(), "text": output}
        if fields.show_billed_characters:
            body["billed_characters"] = len(text)
        if fields.model_type is not None:
            body["model_type_used"] = fields.model_type.removeprefix("prefer_")
        return DeepLTranslation(**body)

    async def _translate(self, fields: DeepLFields, sources: list[str], target: str) -> list[str]:
        results: dict[int, str] = {}

        async def translate(source: str) -> None:
            rows = [row for row, one in enumerate(sources) if one == source]
            request = TranslationRequest(target, source)
            if fields.tag_handling is not None:
                for row in rows:
                    document = parse_tags(fields.text[row], fields)
                    results[row] = str(await translate_document(self.service, document, request, self.limits))
                return
            found = await translate_texts(self.service, [fields.text[row] for row in rows], request)
            results.update({row: ranked[0].text for row, ranked in zip(rows, found, strict=True)})

        await asyncio.gather(*(translate(source) for source in dict.fromkeys(sources)))
        return [results[row] for row in range(len(sources))]


def language_list(languages: ServedLanguages, kind: str) -> list[DeepLLanguage]:
    if kind == "source":
        return [DeepLLanguage(language=code.upper(), name=language_name(code)) for code in languages.targets]
    codes = dict.fromkeys(one for row in languages.targets.values() for one in row)
    listed = [variant for code in codes for variant in VARIANTS.get(code, (code.upper(),))]
    return [
        DeepLLanguage(language=code, name=language_name(_locale(code)), supports_formality=False) for code in listed
    ]


def _locale(code: str) -> str:
    base, _, region = code.partition("-")
    return f"{base.lower()}-{region}" if region else base.lower()


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": DeepLError} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
}
_SCHEMA = DeepLFields.model_json_schema(ref_template="#/components/schemas/{model}")
_BODY = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": _SCHEMA} for kind in ("application/json", "application/x-www-form-urlencoded")},
    }
}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["DeepL"], responses=ERRORS)
    translator = DeepLTranslator(service, settings)

    @router.post("/translate", response_model=DeepLTranslations, response_model_exclude_unset=True, openapi_extra=_BODY)
    async def translate(request: Request) -> Any:
        return await translator(parse_fields(await read_fields(request)))

    async def languages(request: Request) -> Any:
        kind = (await read_fields(request)).get("type", "source")
        if kind not in ("source", "target"):
            raise BadRequest("Value for 'type' not supported.")
        return language_list(ServedLanguages(service), kind)

    async def usage() -> Any:
        return DeepLUsage(character_count=translator.characters[CALLER.get().client], character_limit=UNLIMITED)

    kinds = {"name": "type", "in": "query", "schema": {"type": "string", "enum": ["source", "target"]}}
    for method in ("GET", "POST"):
        options: dict[str, Any] = {"methods": [method], "operation_id": f"deepl_languages_{method}"}
        router.add_api_route(
            "/languages",
            languages,
            response_model=list[DeepLLanguage],
            response_model_exclude_none=True,
            openapi_extra={"parameters": [kinds]},
            **options,
        )
        options["operation_id"] = f"deepl_usage_{method}"
        router.add_api_route("/usage", usage, response_model=DeepLUsage, **options)
    return router


INTERFACE = Interface("DeepL", create_router, ("/v2/",), render_error, ("auth_key",), missing_key_status=403)
