"""Models of images and of recordings behind the server: uploads, interfaces of other servers, bombs, first decode."""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import transduce
from transduce.inference import Model, load
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.model_service import ModelService
from transduce.serving.models import ModelSpec
from transduce.synthetic import write_files

SOURCES: dict[str, dict[str, Any]] = {
    "shapes": {"picture": {"kind": "image", "size": 32}},
    "sung-digits": {"sound": {"kind": "audio", "rate": 8000, "mels": 20}},
}
FRONTS: dict[str, dict[str, Any]] = {
    "shapes": {"kind": "patches", "patch_size": 8},
    "sung-digits": {"kind": "frame_stacking"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


def small_model(folder: Path, data: str) -> Model:
    """Two updates: enough to be asked."""
    write_files(data, folder / data, 12, 1)
    recipe = {
        "data": {
            "train": str(folder / data / "pairs.tsv"),
            "sources": SOURCES[data],
            "cache": str(folder / "cache"),
            "dev_size": 4,
        },
        "tokens": {"target": {"kind": "words"}},
        "model": {
            "encoder": {"kind": "identity", "width": 16, "front": FRONTS[data]},
            "decoder": {"kind": "recurrent", "width": 16, "context": "bahdanau"},
        },
        "training": {"steps": 2, "batch_tokens": 400, "validate_every": 2, "checkpoint_every": 2},
        "generation": {"beam": 2, "max_length": 5},
        "evaluation": {"metrics": ["exact"], "resamples": 2},
    }
    transduce.train(recipe, folder / f"{data}-run")
    return load(folder / f"{data}-run")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Model]:
    return {data: small_model(folder, data) for data in SOURCES}


@pytest.fixture(scope="module")
def client(models: dict[str, Model]) -> Iterator[TestClient]:
    specs = {"shapes": ModelSpec("x", "eye"), "sung-digits": ModelSpec("y", "ear")}
    service = ModelService([(models[data], spec) for data, spec in specs.items()])
    with TestClient(create_app(service, ServerSettings(), metrics=service.metrics)) as found:
        yield found
    service.close()


def first_file(folder: Path, data: str) -> Path:
    return folder / data / (folder / data / "pairs.tsv").read_text().split("\t")[0]


@pytest.mark.parametrize(("data", "name"), [("shapes", "eye"), ("sung-digits", "ear")])
def test_uploads_are_answered_like_files(
    client: TestClient, models: dict[str, Model], folder: Path, data: str, name: str
) -> None:
    path = first_file(folder, data)
    (expected,) = models[data].generate([str(path)], nbest=2)
    request = json.dumps({"model": name, "n_best": 2})
    answer = client.post("/v1/transduce", files={"file": (path.name, path.read_bytes())}, data={"request": request})
    assert [one["text"] for one in answer.json()["results"][0]] == [one.text for one in expected.nbest]
    other = client.post("/v1/transduce", json={"input": str(path), "model": name})
    assert (other.status_code, other.json()["error"]["type"]) == (400, "unsupported")  # no file of the server is read


def test_transcriptions_and_captions_in_other_interfaces(
    client: TestClient, models: dict[str, Model], folder: Path
) -> None:
    sound, picture = first_file(folder, "sung-digits"), first_file(folder, "shapes")
    heard = models["sung-digits"].generate([str(sound)])[0].text
    seen = models["shapes"].generate([str(picture)])[0].text
    answer = client.post("/v1/audio/transcriptions", files={"file": sound.open("rb")}, data={"model": "whisper-1"})
    assert answer.json()["text"] == heard
    assert client.post("/models/ear", content=sound.read_bytes()).json() == {"text": heard}
    assert client.post("/models/eye", content=picture.read_bytes()).json() == [{"generated_text": seen}]


def png(side: int) -> bytes:
    """A PNG of a few hundred bytes that says it is huge."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def long_flac() -> bytes:
    """The header of a FLAC file that says it has a day of silence."""
    samples = 24 * 3600 * 8000
    stream = struct.pack(">HH3s3s", 4096, 4096, b"\0" * 3, b"\0" * 3)
    stream += ((8000 << 44) | (0 << 41) | (15 << 36) | samples).to_bytes(8, "big") + bytes(16)
    return b"fLaC" + bytes([0x80]) + len(stream).to_bytes(3, "big") + stream + bytes(100)


@pytest.mark.parametrize(
    ("model", "name", "content", "words"),
    [
        ("eye", "bomb.png", png(60_000), "too large"),
        ("eye", "bomb.png", png(9_000), "too large"),
        ("eye", "broken.png", b"nothing", "image"),
        ("ear", "bomb.flac", long_flac(), "too long"),
        ("ear", "broken.wav", b"nothing", "audio"),
    ],
)
def test_bombs_and_broken_files_are_refused(
    client: TestClient, model: str, name: str, content: bytes, words: str
) -> None:
    assert len(content) < 2000
    answer = client.post("/v1/transduce", files={"file": (name, content)}, data={"request": f'{{"model": "{model}"}}'})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert words in message
    assert tempfile.gettempdir() not in message


def test_compressed_bodies_are_not_expanded(client: TestClient) -> None:
    body = zlib.compress(b'{"input": "' + b"a" * 10_000_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "deflate"}
    assert client.post("/v1/transduce", content=body, headers=headers).status_code == 400


def test_models_of_files_decode_before_they_are_ready(models: dict[str, Model]) -> None:

    service = ModelService([(models[data], ModelSpec(data, data)) for data in models])
    asyncio.run(service.warm_up())
    for data in models:
        assert service.metrics.sources.labels(data)._value.get() == 1
    service.close()
