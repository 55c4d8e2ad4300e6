"""Traces of requests: their times and counts reach an exporter, their texts do not; nothing is traced by default."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from transduce.errors import InputError
from transduce.inference import load
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.model_service import ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.telemetry import Tracing, tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def traced(attention_run: Path) -> Iterator[tuple[TestClient, Any]]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    service = ModelService([(load(attention_run), ModelSpec("run", "colours"))])
    settings = ServerSettings(("secret",), tracing=Tracing(exporter, batched=False))
    with TestClient(create_app(service, settings), headers={"Authorization": "Bearer secret"}) as client:
        yield client, exporter
    service.close()


def test_spans_have_queue_prefill_and_decode_and_no_text(traced: tuple[TestClient, Any]) -> None:
    client, exporter = traced
    exporter.clear()
    sent = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Request-ID": "mine-1"}
    answer = client.post("/v1/transduce", json={"input": ["red green", "blue"]}, headers=sent)
    assert answer.status_code == 200
    assert client.get("/health").status_code == 200  # probes leave no span
    spans = {one.name: one for one in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/transduce", "generate", "queue", "prefill", "decode"}
    request, generate = spans["POST /v1/transduce"], spans["generate"]
    assert {f"{one.context.trace_id:032x}" for one in spans.values()} == {TRACE}  # that of the client
    assert generate.parent.span_id == request.context.span_id
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["transduce.request_id"] == "mine-1"
    usage = answer.json()["usage"]
    counts = {name: generate.attributes[f"transduce.{name}"] for name in ("model", "sources", "output_tokens")}
    assert counts == {"model": "colours", "sources": 2, "output_tokens": usage["output_tokens"]}
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {one.parent.span_id for one in parts} == {generate.context.span_id}
    times = [
        generate.start_time,
        *(time for one in parts for time in (one.start_time, one.end_time)),
        generate.end_time,
    ]
    assert times == sorted(times)
    assert parts[0].end_time == parts[1].start_time
    assert parts[1].end_time == parts[2].start_time
    everything = " ".join(one.to_json() for one in spans.values()).lower()
    assert not any(word in everything for word in ("red", "green", "blue", "secret", "testclient"))


def test_a_request_beyond_its_deadline_has_an_error_and_no_decode(traced: tuple[TestClient, Any]) -> None:
    client, exporter = traced
    exporter.clear()
    assert client.post("/v1/transduce", json={"input": "red", "deadline": 1e-6}).status_code == 504
    spans = {one.name: one for one in exporter.get_finished_spans()}
    assert "decode" not in spans
    assert spans["generate"].attributes["error.type"] == "DeadlineExceeded"
    assert not spans["POST /v1/transduce"].status.is_ok


def test_nothing_is_traced_unless_an_endpoint_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing(None, {}) is None
    assert ServerSettings().tracing is None
    for made in (
        tracing("http://127.0.0.1:9", {}),
        tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}),
    ):
        assert isinstance(made, Tracing)
        made.close()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InputError, match="OpenTelemetry") as missing:
        tracing("http://127.0.0.1:9", {})
    assert "transduce[telemetry]" in str(missing.value)
