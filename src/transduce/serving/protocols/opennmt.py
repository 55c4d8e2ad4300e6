"""OpenNMT REST interface: /translator/translate with word alignments, /translator/models, /translator/health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from transduce.serving.service import (
    BadRequest,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Interface,
    ModelInfo,
    ModelNotFound,
    Service,
    ServiceError,
)

if TYPE_CHECKING:
    from transduce.serving.application import ServerSettings


class OpenNMTInput(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    src: str
    id: int = 0  # of the model: its place among the served models, or 100 and more, as the configurations of OpenNMT
    n_best: int = Field(1, ge=1)


class OpenNMTOutput(BaseModel):
    src: str
    tgt: str
    n_best: int
    pred_score: float
    align: list[str] | None = None


class OpenNMTModel(BaseModel):
    model_id: int
    name: str
    loaded: Literal[True] = True
    timeout: int = -1
    opt: dict[str, Any] = {}


class HealthBody(BaseModel):
    status: Literal["ok"] = "ok"


class OpenNMTError(BaseModel):
    error: str
    status: Literal["error"] = "error"


def render_error(error: ServiceError) -> Response:
    return JSONResponse({"error": error.message, "status": "error"}, error.status)


def select_model(models: list[ModelInfo], number: int) -> str:
    """The model of a number: 0, 1, ... or 100, 101, ...: its place among the served models."""
    place = number - 100 if number >= 100 else number
    if not 0 <= place < len(models):
        raise ModelNotFound(f"No such model '{number}'")
    return models[place].name


def alignment(one: GeneratedText) -> list[str] | None:
    """Links of words as Pharaoh writes them, `0-0 1-2`."""
    if one.alignment is None:
        return None
    return [" ".join(f"{source}-{target}" for source, target in one.alignment)]


def outputs(result: GenerationResult, inputs: list[OpenNMTInput], n_best: int) -> list[list[OpenNMTOutput]]:
    """For each rank the outputs of all inputs."""
    ranks: list[list[OpenNMTOutput]] = []
    for rank in range(max(len(ranked) for ranked in result.outputs)):
        rows = zip(inputs, result.outputs, strict=True)
        found = [(given, ranked[min(rank, len(ranked) - 1)]) for given, ranked in rows]
        ranks.append(
            [
                OpenNMTOutput(src=given.src, tgt=one.text, n_best=n_best, pred_score=one.score, align=alignment(one))
                for given, one in found
            ]
        )
    return ranks


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenNMTError} for status in (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
}


def create_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(prefix="/translator", tags=["OpenNMT"], responses=ERRORS)

    @router.post("/translate", response_model=list[list[OpenNMTOutput]], response_model_exclude_none=True)
    async def translate(inputs: list[OpenNMTInput]) -> Any:
        if not inputs:
            raise BadRequest("there is nothing to translate")
        model, n_best = select_model(service.models(), inputs[0].id), inputs[0].n_best
        request = GenerationRequest(
            tuple(one.src for one in inputs), model=model, n_best=n_best, wants=frozenset({"alignment"})
        )
        return outputs(await service.generate(request), inputs, n_best)

    @router.get("/models", response_model=list[OpenNMTModel])
    async def models() -> Any:
        return [OpenNMTModel(model_id=place, name=one.name) for place, one in enumerate(service.models())]

    @router.get("/health", response_model=HealthBody)
    async def health() -> Any:
        return HealthBody()

    return router


INTERFACE = Interface("OpenNMT", create_router, ("/translator/",), render_error)
