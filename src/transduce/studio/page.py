"""Saved page of a view: the answers that it has asked for, in one file that needs no server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from transduce.explain.html import offline_page
from transduce.studio.runs import Studio


class PageRequest(BaseModel):
    """What a tab shows: its title, its address and the answers that it has received."""

    title: str = Field(max_length=1000)
    fragment: str = Field(max_length=100_000)
    answers: dict[str, Any]


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.post("/page")
    def page(request: PageRequest) -> Response:
        content = offline_page(request.title, {"fragment": request.fragment, "answers": request.answers})
        headers = {"content-disposition": 'attachment; filename="transduce.html"'}
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    return routes
