"""Traces of requests for OpenTelemetry: spans with times and counts, never with texts, keys or addresses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.serving.task_queue import Task

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE_NAME = "transduce"


class Tracing:
    """Makes the spans of requests. `exporter` receives them in a thread of its own."""

    def __init__(self, exporter: Any, *, batched: bool = True) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter) if batched else SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("transduce.serving")

    def begin(self, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> RequestTrace:
        """The span of a request, within the trace that its `traceparent` header names."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(headers)
        return RequestTrace(
            self._tracer,
            self._tracer.start_span("request", context=context, kind=SpanKind.SERVER, attributes=dict(attributes)),
        )

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one request: the request itself, and its tasks with queue, prefill and decode."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer, self._span = tracer, span

    def task(self, model: str, task: Task, error: BaseException | None) -> None:
        """Adds the times of a task that has ended. Called in the thread of its engine."""
        from opentelemetry.trace import set_span_in_context

        times = task.times
        tokens = sum(len(found[0].ids) for found in task.results.values() if found)
        counts = {"transduce.model": model, "transduce.sources": task.count, "transduce.output_tokens": tokens}
        counts |= {"error.type": type(error).__name__} if error is not None else {}
        context = set_span_in_context(self._span)
        span = self._tracer.start_span("generate", context=context, start_time=times.submitted, attributes=counts)
        context = set_span_in_context(span)
        entered, prefilled = times.entered or times.ended, times.prefilled or times.ended
        parts: Sequence[tuple[str, int, int]] = (
            ("queue", times.submitted, entered),
            ("prefill", entered, prefilled),
            ("decode", prefilled, times.ended),
        )
        for name, begin, end in parts[: 3 if times.entered else 1]:
            self._tracer.start_span(name, context=context, start_time=begin).end(end)
        span.end(times.ended)

    def end(self, route: str, method: str, status: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def tracing(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Traces that are sent to an OTLP endpoint: the given one, else that of the environment; None: there is none."""
    if endpoint is None and not any(environment.get(name) for name in ENDPOINTS):
        return None
    try:
        import opentelemetry.sdk.trace  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        problem = "traces need OpenTelemetry"
        raise InputError(problem, where="--otlp-endpoint", remedy="pip install 'transduce[telemetry]'") from None
    return Tracing(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None))
