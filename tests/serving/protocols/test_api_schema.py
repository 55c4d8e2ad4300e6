"""Requests drawn from the OpenAPI description (schemathesis): no 5xx, and answers that the description allows.

API_FUZZ_CASES is the number of requests (96), API_FUZZ_RECORD a file for their counts; `make fuzz-api` sets both.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

import transduce
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.model_service import ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.service import Limits

pytestmark = pytest.mark.slow
CASES = int(os.environ.get("API_FUZZ_CASES", "96"))
LIMITS = Limits(characters=500, items=8, n_best=3, beam_size=3, output_tokens=20)


def draw(operation: Any, mode: Any, count: int, attempt: Callable[[Any], None]) -> None:
    """Sends `count` requests of an operation."""

    @seed(int(os.environ.get("API_FUZZ_SEED", "20")))
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        attempt(case)

    with suppress(Unsatisfiable):  # a route without parameters has no wrong ones
        send()


def test_requests_of_the_description(attention_run: Path, tmp_path: Path) -> None:
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis import checks as known

    service = ModelService([(transduce.load(attention_run), ModelSpec.parse(f"colours={attention_run}@en-de"))], LIMITS)
    app = create_app(service, ServerSettings(limits=LIMITS, jobs_folder=tmp_path))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    checks = [
        known.not_a_server_error,
        known.status_code_conformance,
        known.content_type_conformance,
        known.response_schema_conformance,
    ]
    statuses: dict[str, Counter[int]] = {}

    def attempt(case: Any) -> None:
        response = case.call()
        statuses.setdefault(f"{case.method} {case.path}", Counter())[response.status_code] += 1
        if response.status_code == 504 and isinstance(case.body, dict) and "deadline" in case.body:
            return  # the client asked for less time than the answer takes
        case.validate_response(response, checks=checks)

    operations = [one.ok() for one in schema.get_all_operations()]
    writing = [one for one in operations if one.method.upper() == "POST"]  # the others have little to vary
    for operation in operations:
        share = max(CASES // (2 * len(writing)), 1) if operation in writing else 1
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            draw(operation, mode, share, attempt)
    assert len(statuses) == len(operations)
    total = sum((one for one in statuses.values()), Counter[int]())
    assert all(status < 500 or status == 504 for status in total)
    if record := os.environ.get("API_FUZZ_RECORD"):
        rows = {name: {str(status): one[status] for status in sorted(one)} for name, one in sorted(statuses.items())}
        content = {"cases": total.total(), "statuses": rows}
        Path(record).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
