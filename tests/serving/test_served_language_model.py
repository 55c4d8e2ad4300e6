"""A decoder-only model of Hugging Face behind the server: the continuation of the library, without the prompt."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from huggingface_fixtures import make

import transduce
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
    assert client.get("/v1/transduce/models").json()["models"][0]["capabilities"] == ["generate", "stream"]
    stopped = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS, "stop": ["w7"]}).json()
    assert stopped["choices"][0]["text"] == expected.split("w7")[0]  # that of the prompt stops nothing


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    lines = client.post(path, json=body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_streams_have_the_tokens_after_the_prompt_one_by_one(written: tuple[TestClient, str]) -> None:
    client, expected = written
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    texts = [one["choices"][0]["text"] for one in events(client, "/v1/completions", body)]
    assert texts == [*(f" {word}" for word in expected.split()), ""]
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}
    found = events(client, "/generate_stream", body)
    assert ["".join(one["token"]["text"] for one in found), found[-1]["generated_text"]] == [expected, expected]
    assert len(found) == found[-1]["details"]["generated_tokens"] == TOKENS
    found = events(client, "/v1/transduce", {"input": [PROMPT, ""], "max_length": TOKENS, "stream": True})
    for number, prompt in enumerate((PROMPT, "")):
        own = [one for one in found if one["source"] == number]
        whole = client.post("/v1/transduce", json={"input": prompt, "max_length": TOKENS}).json()["results"][0][0]
        assert "".join(one["text"] for one in own) == own[-1]["output"]["text"] == whole["text"]
        assert own[-1]["output"]["score"] == pytest.approx(whole["score"])


def test_a_stream_of_bytes_has_whole_characters(tmp_path: Path) -> None:
    """Tokens are bytes: the text of a token is written when its character is complete."""
    lines = "".join(f"{one}\n" for one in ("äöü", "日本語", "naïve", "😀😀", "Ω≈ç√") * 20)
    (tmp_path / "texts.txt").write_text(lines, encoding="utf-8")
    data = {"train": str(tmp_path / "texts.txt"), "dev": str(tmp_path / "texts.txt"), "format": "text"}
    decoder = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "ff_width": 32}
    training = {"steps": 30, "batch_tokens": 512, "validate_every": 30, "optimiser": {"learning_rate": 0.01}}
    recipe = {"data": data, "tokens": {"target": {"kind": "bytes"}}, "model": {"encoder": None, "decoder": decoder}}
    transduce.train({**recipe, "training": training}, tmp_path / "run")
    service = ModelService([(load(tmp_path / "run"), ModelSpec("bytes", "bytes"))])
    with TestClient(create_app(service, ServerSettings())) as client:
        body = {"input": "", "max_length": 24, "temperature": 1.0, "seed": 3}
        texts = list[str]()
        for seed in range(12):
            *tokens, last = events(client, "/v1/transduce", {**body, "seed": seed, "stream": True})
            texts += [one["text"] for one in tokens]
            whole = client.post("/v1/transduce", json={**body, "seed": seed}).json()["results"][0][0]["text"]
            assert "".join(one["text"] for one in (*tokens, last)) == whole
        assert any(len(one.encode()) > 1 for one in texts)  # a character of several tokens
        assert "" in texts
    service.close()
