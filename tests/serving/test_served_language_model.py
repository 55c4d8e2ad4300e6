"""A decoder-only model of Hugging Face behind the server: the continuation of the library, without the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from huggingface_fixtures import make

from transduce.inference import load
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.model_service import ModelService
from transduce.serving.models import ModelSpec

pytestmark = pytest.mark.slow  # imports transformers
PROMPT, TOKENS = "w4 w7", 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str]]:
    """A client, and what the library writes after the prompt."""
    folder: Path = tmp_path_factory.mktemp("gpt2")
    library: Any = make("gpt2", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = library.generate(input_ids=torch.tensor([[23, 4, 7]]), max_new_tokens=TOKENS, do_sample=False)[0, 3:]
    service = ModelService([(load(folder, device="cpu"), ModelSpec(str(folder), "writer"))])
    with TestClient(create_app(service, ServerSettings())) as client:
        yield client, "".join(f" w{number}" for number in ids.tolist())
    service.close()


def test_completions_have_no_prompt_unless_it_is_asked_for(written: tuple[TestClient, str]) -> None:
    client, expected = written
    body = {"model": "writer", "prompt": PROMPT, "max_tokens": TOKENS}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": TOKENS, "total_tokens": TOKENS + 2}
    assert client.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]["text"] == PROMPT + expected


def test_other_interfaces_continue_too(written: tuple[TestClient, str]) -> None:
    client, expected = written
    parameters: dict[str, Any] = {"max_new_tokens": TOKENS}
    asked = {"inputs": PROMPT, "parameters": parameters}
    assert client.post("/generate", json=asked).json()["generated_text"] == expected
    parameters["return_full_text"] = True
    assert client.post("/generate", json=asked).json()["generated_text"] == PROMPT + expected
    body = {"input": PROMPT, "max_length": TOKENS, "n_best": 2, "wants": ["tokens", "scores"]}
    best, second = client.post("/v1/transduce", json=body).json()["results"][0]
    for one in (best, second):
        assert len(one["tokens"]) == len(one["token_scores"]) == TOKENS
        assert one["score"] == pytest.approx(sum(one["token_scores"]))
    stopped = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS, "stop": ["w7"]}).json()
    assert stopped["choices"][0]["text"] == expected.split("w7")[0]  # that of the prompt stops nothing
