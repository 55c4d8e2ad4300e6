"""Server-sent events: the tokens of a stream as lines `data: ...`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import cast

from starlette.responses import StreamingResponse

from transduce.serving.service import ServiceError, TokenEvent

Write = Callable[[TokenEvent], Iterable[str]]


async def event_response(
    events: AsyncIterator[TokenEvent],
    write: Write,
    write_error: Callable[[ServiceError], str],
    *,
    end: Iterable[str] = (),
) -> StreamingResponse:
    """The events as a response. An error before the first one is raised, so that it has a status of its own."""
    stream = cast("AsyncGenerator[TokenEvent]", events)
    first = await anext(stream, None)

    async def body() -> AsyncIterator[str]:
        event = first
        try:
            async with aclosing(stream):
                while event is not None:
                    for data in write(event):
                        yield f"data: {data}\n\n"
                    event = await anext(stream, None)
            for data in end:
                yield f"data: {data}\n\n"
        except ServiceError as error:
            yield f"data: {write_error(error)}\n\n"

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
