"""Interfaces on the wire: answers field by field, and every documented error with its code and text."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from protocol_fixtures import LIMITS, MODELS, ReverseService, reverse_client

from transduce.serving.protocols import INTERFACES
from transduce.serving.service import (
    DeadlineExceeded,
    InvalidKey,
    KeyMissing,
    Limits,
    ModelInfo,
    Overloaded,
    ServiceError,
)

EN_DE = {"source": "en", "target": "de"}
OVERLOADED, LATE, BROKEN = Overloaded("too busy"), DeadlineExceeded(), ServiceError()
SERVICE = ReverseService()
CLIENT, KEYED = reverse_client(service=SERVICE), reverse_client("key")


def post(path: str, body: Any = None, **options: Any) -> Any:
    response = CLIENT.post(path, json=body, **options)
    assert response.status_code == 200, response.text
    return response.json()


def events(path: str, body: Any) -> list[Any]:
    """The data of the events of a stream; what is no JSON as a text."""
    response = CLIENT.post(path, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data:").strip() for line in response.text.split("\n\n") if line]
    return [json.loads(line) if line.startswith("{") else line for line in lines]


# LibreTranslate


def test_parameters_are_json_form_multipart_or_query() -> None:
    fields = {"q": "red blue", **EN_DE}
    parts = {name: (None, value) for name, value in fields.items()}
    for options in ({"json": fields}, {"data": fields}, {"params": fields}, {"files": parts}):
        assert CLIENT.post("/translate", **options).json() == {"translatedText": "BLUE RED"}  # type: ignore[arg-type]


def test_translate_answers_arrays_detection_and_alternatives() -> None:
    q = ["the house is red", "das Haus ist nicht rot"]
    found = post("/translate", {"q": q, "source": "auto", "target": "de", "alternatives": 2})
    assert found["translatedText"] == ["RED IS HOUSE THE", "das Haus ist nicht rot"]  # German is German already
    assert [one["language"] for one in found["detectedLanguage"]] == ["en", "de"]
    assert all(50 < one["confidence"] <= 100 for one in found["detectedLanguage"])
    assert found["alternatives"] == [["RED IS HOUSE THE!", "RED IS HOUSE THE!!"], []]
    single = post("/translate", {"q": q[0], "source": "auto", "target": "de", "alternatives": "1"})
    assert single == {name: value[0][:1] if name == "alternatives" else value[0] for name, value in found.items()}


def test_html_keeps_tags_attributes_and_entities() -> None:
    q = '<p class="x">one <b>two</b> &amp; three</p><img src="a.png"><br>'
    found = post("/translate", {"q": q, **EN_DE, "format": "html"})
    assert found == {"translatedText": '<p class="x">THREE &amp; <b>TWO</b> ONE</p><img src="a.png"><br>'}


def test_languages_detection_settings_and_specification() -> None:
    assert CLIENT.get("/languages").json()[0] == {"code": "en", "name": "English", "targets": ["de"]}
    assert CLIENT.post("/detect", data={"q": "the house is red"}).json()[0]["language"] == "en"
    settings = CLIENT.get("/frontend/settings").json()
    assert settings["charLimit"] == LIMITS.characters
    assert settings["keyRequired"] is False
    assert settings["language"]["target"] == {"code": "de", "name": "German"}
    assert "/translate" in CLIENT.get("/spec").json()["paths"]


SRT = "1\n00:00:01,000 --> 00:00:02,500\nred blue\n\n2\n00:00:03,000 --> 00:00:04,000\ngreen\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.srt", SRT, SRT.replace("red blue", "BLUE RED").replace("green", "GREEN")),
        ("a.txt", "Red blue. Green.\n\nBlack.\n", "BLUE. RED GREEN.\n\nBLACK.\n"),
        ("../../a b.html", "<p>red blue</p>", "<p>BLUE RED</p>"),
    ],
)
def test_files_are_translated_and_downloaded(name: str, content: str, expected: str) -> None:
    response = CLIENT.post("/translate_file", files={"file": (name, content)}, data={"source": "auto", "target": "de"})
    assert response.status_code == 200, response.text
    found = CLIENT.get(response.json()["translatedFileUrl"])
    assert found.text == expected
    assert found.headers["content-disposition"].startswith("attachment")
    assert "/.." not in response.json()["translatedFileUrl"]


def test_suggestions_are_appended_to_the_file_of_the_server(tmp_path: Any) -> None:
    path = tmp_path / "suggestions.jsonl"
    client = reverse_client(suggestions=path)
    fields = {"q": "red", "s": "ROT", **EN_DE}
    assert client.post("/suggest", data=fields).json() == {"success": True}
    assert client.get("/frontend/settings").json()["suggestions"] is True
    assert json.loads(path.read_text(encoding="utf-8")) == fields


# OpenAI


def test_completions_have_all_fields() -> None:
    body = {"model": "reverse", "prompt": ["a b", "c"], "n": 2, "logprobs": 1, "echo": True}
    found = post("/v1/completions", body)
    assert [one["text"] for one in found["choices"]] == ["a bB A", "a bB A!", "cC", "cC!"]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    assert found["choices"][0]["logprobs"]["tokens"] == ["B", "A", "</s>"]
    assert found["object"] == "text_completion"
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}


def test_chat_reads_the_last_message_of_the_user() -> None:
    SERVICE.requests.clear()
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "user", "content": [{"type": "text", "text": "red blue"}]},
        {"role": "assistant", "content": "BLUE"},
    ]
    found = post("/v1/chat/completions", {"messages": messages, "logprobs": True})
    assert found["choices"][0]["message"]["content"] == "BLUE RED"
    assert found["choices"][0]["logprobs"]["content"][0]["bytes"] == list(b"BLUE")
    assert SERVICE.requests[0].prefixes == ("BLUE",)


def test_chat_reads_images_and_recordings() -> None:
    data = base64.b64encode(b"123").decode()
    for model, part in (
        ("eye", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}),
        ("ear", {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}),
    ):
        body = {"model": model, "messages": [{"role": "user", "content": [part]}]}
        assert post("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "3 bytes"


def test_streams_of_completions_join_to_the_text() -> None:
    *chunks, usage, done = events(
        "/v1/completions", {"prompt": ["a b", "c"], "stream": True, "stream_options": {"include_usage": True}}
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["B A", "C"]
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 10, "[DONE]")
    *chunks, done = events("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}], "stream": True})
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "B A"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({one["id"] for one in chunks}) == 1


def test_models_and_embeddings() -> None:
    assert [one["id"] for one in CLIENT.get("/v1/models").json()["data"]] == [one.name for one in MODELS]
    assert CLIENT.get("/v1/models/reverse").json()["object"] == "model"
    found = post("/v1/embeddings", {"input": ["ab", "c"], "model": "reverse", "encoding_format": "base64"})
    assert struct.unpack("<3f", base64.b64decode(found["data"][0]["embedding"])) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("text", "3 bytes\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,500\none\n\n2\n00:00:01,500 --> 00:01:01,000\ntwo\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none\n\n00:00:01.500 --> 00:01:01.000\ntwo\n"),
        ("json", '{"text":"3 bytes"}'),
    ],
)
def test_transcriptions_in_every_format(kind: str, expected: str) -> None:
    data = {"model": "whisper-1", "response_format": kind}
    assert CLIENT.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"123")}, data=data).text == expected


# DeepL


def test_deepl_bills_characters_and_detects() -> None:
    body = {"text": ["the house is red"], "target_lang": "DE", "show_billed_characters": True}
    expected = {"detected_source_language": "EN", "text": "RED IS HOUSE THE", "billed_characters": 16}
    client = reverse_client()
    assert client.post("/v2/translate", json=body).json() == {"translations": [expected]}
    form = {"text": ["red", "blue green"], "target_lang": "en-us", "source_lang": "de"}
    found = client.post("/v2/translate", data=form).json()["translations"]
    assert [one["text"] for one in found] == ["RED", "GREEN BLUE"]
    assert client.get("/v2/usage").json() == {"character_count": 29, "character_limit": 10**12}


def test_deepl_keeps_xml_tags() -> None:
    text = '<doc><p id="1">one <i>two</i></p><code>kept here</code><p>three</p></doc>'
    body = {"text": [text], "target_lang": "DE", "source_lang": "EN", "tag_handling": "xml"}
    found = post("/v2/translate", body | {"splitting_tags": ["doc", "p"], "ignore_tags": ["code"]})
    expected = '<doc><p id="1"><i>TWO</i> ONE</p><code>kept here</code><p>THREE</p></doc>'
    assert found["translations"][0]["text"] == expected


def test_deepl_lists_languages() -> None:
    assert [one["language"] for one in CLIENT.get("/v2/languages").json()] == ["EN", "DE"]
    targets = CLIENT.request("GET", "/v2/languages", data={"type": "target"}).json()
    assert [one["language"] for one in targets] == ["DE", "EN-GB", "EN-US"]
    assert targets[2]["name"] == "English (United States)"


# OpenNMT, TGI, Hugging Face


def test_opennmt_answers_by_rank_with_alignments() -> None:
    found = post("/translator/translate", [{"id": 100, "src": "a b", "n_best": 2}, {"src": "c"}])
    assert [[one["tgt"] for one in rank] for rank in found] == [["B A", "C"], ["B A!", "C!"]]
    first = found[0][0]
    assert first == {"src": "a b", "tgt": "B A", "n_best": 2, "pred_score": -1.5, "align": ["1-0 0-1"]}
    assert CLIENT.get("/translator/health").json() == {"status": "ok"}
    assert CLIENT.get("/translator/models").json()[1]["name"] == "back"


def test_tgi_generates_with_details_and_streams() -> None:
    body = {"inputs": "a b", "parameters": {"details": True, "best_of": 2, "do_sample": True, "seed": 3}}
    found = post("/generate", body)
    details = found["details"]
    assert (found["generated_text"], details["finish_reason"], details["generated_tokens"]) == ("B A", "eos_token", 3)
    assert details["best_of_sequences"][0]["generated_text"] == "B A!"
    *chunks, last = events("/generate_stream", {"inputs": "a b", "parameters": {"return_full_text": True}})
    assert "".join(one["token"]["text"] for one in chunks) == "B A"
    assert all(one["generated_text"] is None for one in chunks)
    assert (last["token"]["special"], last["generated_text"]) == (True, "a bB A")
    assert last["details"]["generated_tokens"] == 3
    assert CLIENT.get("/info").json()["model_id"] == "reverse"


@pytest.mark.parametrize(
    ("path", "inputs", "expected"),
    [
        ("/models/reverse", "a b", [{"translation_text": "B A"}]),
        ("/models/reverse", ["a b", "c"], [{"translation_text": "B A"}, {"translation_text": "C"}]),
        ("/", "a b", [{"translation_text": "B A"}]),
        ("/pipeline/summarization", "a b", [{"summary_text": "B A"}]),
        ("/models/writer", "a b", [{"generated_text": "B A"}]),
        ("/pipeline/feature-extraction", "a b", [[3.0, 3.0, 4.0]]),
        ("/models/eye", "MTIz", [{"generated_text": "3 bytes"}]),
        ("/models/ear/pipeline/automatic-speech-recognition", "MTIz", {"text": "3 bytes"}),
    ],
)
def test_hugging_face_tasks(path: str, inputs: Any, expected: Any) -> None:
    assert post(path, {"inputs": inputs, "parameters": {}}) == expected


def test_hugging_face_reads_files_as_they_are() -> None:
    found = CLIENT.post("/models/ear", content=b"\xff\x00", headers={"content-type": "audio/wav"}).json()
    assert found == {"text": "2 bytes"}
    body = {"inputs": "MTIz", "parameters": {"return_timestamps": True}}
    assert post("/models/ear", body)["chunks"][1] == {"text": "two", "timestamp": [1.5, 61]}


# Errors


def refusal(path: str, body: Any) -> tuple[int, Any]:
    response = CLIENT.post(path, json=body)
    return response.status_code, response.json()


RED = {"q": "red", **EN_DE}
MANY = {"q": ["a"] * (LIMITS.items + 1), **EN_DE}
LONG = {"q": "a" * (LIMITS.characters + 1), **EN_DE}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/translate", {**EN_DE}, 400, "Invalid request: missing q parameter"),
        ("/translate", {"q": "", **EN_DE}, 400, "Invalid request: missing q parameter"),
        ("/translate", {"q": "a", "target": "de"}, 400, "Invalid request: missing source parameter"),
        ("/translate", {"q": "a", "source": "en"}, 400, "Invalid request: missing target parameter"),
        ("/translate", {"q": "a", "source": "zz", "target": "de"}, 400, "zz is not supported"),
        ("/translate", {"q": "a", "source": "en", "target": "zz"}, 400, "zz is not supported"),
        ("/translate", {"q": "a", **EN_DE, "format": "pdf"}, 400, "pdf format is not supported"),
        ("/translate", {**RED, "alternatives": "x"}, 400, "Invalid request: alternatives parameter is not a number"),
        ("/translate", {**RED, "alternatives": 9}, 400, "Invalid request: alternatives parameter must be <= 3"),
        ("/translate", {"q": {"a": 1}, **EN_DE}, 400, "Invalid request: q parameter is not valid"),
        ("/translate", {"q": "\ud800", **EN_DE}, 400, "the body is no valid Unicode"),
        ("/translate", [1], 400, "Invalid JSON format"),
        ("/translate", MANY, 400, "Invalid request: request (9) exceeds text limit (8)"),
        ("/translate", LONG, 400, "Invalid request: request (1001) exceeds text limit (1000)"),
        ("/translate", {"q": "a" * 5000, **EN_DE}, 413, "body bytes: at most 4,000, not 5,041"),
        ("/detect", {}, 400, "Invalid request: missing q parameter"),
        ("/suggest", {"q": "a", "s": "b", **EN_DE}, 403, "Suggestions are disabled on this server."),
        ("/suggest", {"q": "a", **EN_DE}, 400, "Invalid request: missing s parameter"),
        ("/translate_file", None, 400, "Invalid request: missing file parameter"),
    ],
)  # fmt: skip
def test_libretranslate_errors(path: str, body: Any, status: int, message: str) -> None:
    content = json.dumps(body).encode() if body is not None else b""  # httpx refuses half of a surrogate pair
    found = CLIENT.post(path, content=content, headers={"content-type": "application/json"})
    assert (found.status_code, found.json()) == (status, {"error": message})


@pytest.mark.parametrize(
    ("name", "content", "status", "message"),
    [
        ("a.pdf", b"x", 400, "Invalid request: file format not supported"),
        ("a.txt", b"\xff\xfe\x00", 400, "Invalid request: the file is not UTF-8 text"),
        ("a.txt", b"x" * 4000, 413, None),
    ],
)
def test_libretranslate_file_errors(name: str, content: bytes, status: int, message: str | None) -> None:
    response = CLIENT.post("/translate_file", files={"file": (name, content)}, data=EN_DE)
    assert response.status_code == status
    assert message is None or response.json() == {"error": message}


@pytest.mark.parametrize("name", ["nothing.txt", "0" * 32 + ".txt", "..%2f..%2fetc%2fpasswd"])
def test_only_translated_files_are_downloaded(name: str) -> None:
    response = CLIENT.get(f"/download_file/{name}")
    assert response.status_code in (400, 404)
    assert set(response.json()) == {"error"}


OPENAI = {"model": "reverse", "prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "none", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/completions", {"model": "reverse"}, 400, None),
        ("/v1/completions", {**OPENAI, "prompt": [1, 2]}, 400, None),
        ("/v1/completions", {**OPENAI, "temperature": 3}, 400, None),
        ("/v1/completions", {**OPENAI, "logit_bias": {"5": 1}}, 400, None),
        ("/v1/completions", {**OPENAI, "suffix": "x"}, 400, None),
        ("/v1/completions", {**OPENAI, "n": 2, "stream": True}, 400, None),
        ("/v1/completions", {**OPENAI, "model": "none", "stream": True}, 404, "model_not_found"),
        ("/v1/chat/completions", {"messages": []}, 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}]}, 400, None),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, 400, None),
    ],
)  # fmt: skip
def test_openai_errors(path: str, body: Any, status: int, code: str | None) -> None:
    found, content = refusal(path, body)
    assert (found, content["error"]["code"], content["error"]["type"]) == (status, code, "invalid_request_error")
    assert set(content["error"]) == {"message", "type", "param", "code"}


DE = {"text": ["a"], "target_lang": "DE"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"target_lang": "DE"}, 400, "Parameter 'text' not specified."),
        ({"text": ["a"]}, 400, "Parameter 'target_lang' not specified."),
        ({"text": ["a"], "target_lang": "ZZ"}, 400, "Value for 'target_lang' not supported."),
        ({"text": ["a"], "target_lang": "DE", "source_lang": "ZZ"}, 400, "Value for 'source_lang' not supported."),
        ({**DE, "formality": "more"}, 400, "'formality' is not supported for given 'target_lang'."),
        ({"text": ["a"], "target_lang": "DE", "tag_handling": "md"}, 400, "Value for 'tag_handling' not supported."),
        ({"text": ["a"], "target_lang": "DE", "glossary_id": "g"}, 404, "Glossary not found"),
    ],
)  # fmt: skip
def test_deepl_errors(body: Any, status: int, message: str) -> None:
    assert refusal("/v2/translate", body) == (status, {"message": message})


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/generate", {"inputs": ""}, 422, "validation"),
        ("/generate", {"inputs": "a", "parameters": {"temperature": 0}}, 422, "validation"),
        ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json"}}}, 422, "validation"),
        ("/generate_stream", {"inputs": "a", "parameters": {"best_of": 2}}, 422, "validation"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "none"}}, 404, "model"),
        ("/generate", {"inputs": "a" * 5000}, 413, "validation"),
    ],
)
def test_tgi_errors(path: str, body: Any, status: int, expected: str) -> None:
    found, content = refusal(path, body)
    assert (found, content["error_type"]) == (status, expected)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/models/none", {"inputs": "a"}, 404),
        ("/models/reverse", {}, 400),
        ("/models/reverse", {"inputs": 3}, 400),
        ("/models/reverse", {"inputs": "a", "parameters": {"tgt_lang": "zz"}}, 400),
        ("/models/reverse", {"inputs": "a", "parameters": {"num_beams": 0}}, 400),
        ("/models/eye", {"inputs": "no base64!"}, 400),
        ("/models/reverse/pipeline/image-to-text", {"inputs": "MTIz"}, 400),
        ("/pipeline/none", {"inputs": "a"}, 400),
        ("/translator/translate", [], 400),
        ("/translator/translate", [{"id": 77, "src": "a"}], 404),
    ],
)
def test_hugging_face_and_opennmt_errors(path: str, body: Any, status: int) -> None:
    found, content = refusal(path, body)
    assert found == status
    assert isinstance(content["error"], str)


REQUESTS: dict[str, tuple[str, Any]] = {
    "LibreTranslate": ("/translate", {"q": "a", **EN_DE}),
    "OpenAI": ("/v1/completions", OPENAI),
    "DeepL": ("/v2/translate", {"text": ["a"], "target_lang": "DE", "source_lang": "EN"}),
    "OpenNMT": ("/translator/translate", [{"src": "a"}]),
    "TGI": ("/generate", {"inputs": "a"}),
    "Hugging Face": ("/models/reverse", {"inputs": "a"}),
}
FORMS = {  # name -> the message within a body
    "LibreTranslate": lambda body: body["error"],
    "OpenAI": lambda body: body["error"]["message"],
    "DeepL": lambda body: body["message"],
    "OpenNMT": lambda body: body["error"],
    "TGI": lambda body: body["error"],
    "Hugging Face": lambda body: body["error"],
}
STATUS = {  # of an overloaded server, a passed deadline, an internal error, a missing key, a wrong key
    "LibreTranslate": (429, 504, 500, 400, 403),
    "OpenAI": (429, 504, 500, 401, 401),
    "DeepL": (429, 504, 500, 403, 403),
    "OpenNMT": (429, 504, 500, 401, 403),
    "TGI": (429, 424, 424, 401, 403),
    "Hugging Face": (429, 504, 500, 401, 403),
}


@pytest.mark.parametrize("name", [one.name for one in INTERFACES])
def test_every_interface_has_the_errors_of_the_server_in_its_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = REQUESTS[name]
    for status, error in zip(STATUS[name], (OVERLOADED, LATE, BROKEN), strict=False):
        monkeypatch.setattr(SERVICE, "error", error)
        response = CLIENT.post(path, json=body)
        assert response.status_code == status
        assert isinstance(FORMS[name](response.json()), str)
        assert ("retry-after" in response.headers) == (status == 429)
    for status, headers in zip(STATUS[name][3:], ({}, {"authorization": "Bearer wrong"}), strict=True):
        response = KEYED.post(path, json=body, headers=headers)
        assert response.status_code == status
        assert isinstance(FORMS[name](response.json()), str)
    assert KEYED.post(path, json=body, headers={"authorization": "Bearer key"}).status_code == 200


def test_libretranslate_reads_the_key_of_a_field() -> None:
    client, fields = KEYED, {"q": "a", **EN_DE}
    for name in ("api_key", "apiKey"):
        assert client.post("/translate", json={**fields, name: "key"}).status_code == 200
        assert client.post("/translate", params={**fields, name: "key"}).status_code == 200
    missing = "Please contact the server operator to get an API key"
    assert client.post("/translate", json=fields).json() == {"error": missing}
    assert client.post("/translate", json={**fields, "api_key": "x"}).json() == {"error": "Invalid API key"}


def test_models_of_unknown_languages_take_any_code() -> None:
    client = reverse_client(service=ReverseService([ModelInfo("any", "translation")]), limits=Limits())
    fields = {"q": "a b", "source": "xx", "target": "yy"}
    assert client.post("/translate", json=fields).json() == {"translatedText": "B A"}
    assert client.get("/languages").json() == []
    found = client.post("/translate", json={"q": "a b", "source": "auto", "target": "yy"}).json()
    assert found["detectedLanguage"] == {"confidence": 0.0, "language": "und"}


def test_render_errors_shows_the_message_only() -> None:
    for interface in INTERFACES:
        for error in (OVERLOADED, LATE, BROKEN, KeyMissing(), InvalidKey()):
            assert b"Traceback" not in interface.render_error(error).body
