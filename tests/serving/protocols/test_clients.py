"""Clients of other servers against a server with a trained model: `red blue` -> `BLUE RED`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

import transduce
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.model_service import ModelService
from transduce.serving.models import ModelSpec

pytestmark = pytest.mark.slow
KEY = "colour-key"
GUIDE = Path(__file__).parents[3] / "docs" / "serving-protocols.md"


@pytest.fixture(scope="module")
def start(attention_run: Path) -> Iterator[Callable[..., str]]:
    """Starts servers in threads, on ports that the system chooses."""
    import uvicorn

    service = ModelService([(transduce.load(attention_run), ModelSpec.parse(f"colours={attention_run}@en-de"))])
    servers: list[tuple[Any, threading.Thread]] = []

    def serve(*keys: str) -> str:
        config = uvicorn.Config(create_app(service, ServerSettings(keys)), port=0, log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield serve
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def url(start: Callable[..., str]) -> str:
    return start()


@pytest.fixture(scope="module")
def locked(start: Callable[..., str]) -> str:
    """A server that needs a key."""
    return start(KEY)


def test_libretranslatepy(url: str, locked: str) -> None:
    from libretranslatepy import LibreTranslateAPI

    client = LibreTranslateAPI(url)
    assert client.translate("red blue", "en", "de") == "BLUE RED"
    assert client.translate("red blue", "auto", "de") == "BLUE RED"
    assert client.detect("the house is red")[0]["language"] == "en"
    assert client.languages() == [{"code": "en", "name": "English", "targets": ["de"]}]
    assert LibreTranslateAPI(locked, KEY).translate("red blue", "en", "de") == "BLUE RED"
    for own, status in ((None, 400), ("wrong", 403)):
        with pytest.raises(urllib.error.HTTPError) as error:
            LibreTranslateAPI(locked, own).translate("red blue", "en", "de")
        assert error.value.code == status


def test_deep_translator(url: str, locked: str) -> None:
    from deep_translator import LibreTranslator
    from deep_translator.exceptions import AuthorizationException

    client = LibreTranslator(source="en", target="de", api_key="any", custom_url=f"{url}/")
    assert client.translate("red blue") == "BLUE RED"
    assert client.translate_batch(["red blue", "green"]) == ["BLUE RED", "GREEN"]
    lines = 850  # more than 8 kB in the query string
    assert client.translate("\n\n".join(["red blue"] * lines)) == "\n\n".join(["BLUE RED"] * lines)
    with pytest.raises(AuthorizationException):
        LibreTranslator(source="en", target="de", api_key="wrong", custom_url=f"{locked}/").translate("red")


def test_deepl(url: str, locked: str) -> None:
    import deepl

    client = deepl.Translator(KEY, server_url=locked)
    found = client.translate_text("red blue", source_lang="EN", target_lang="DE")
    assert (found.text, found.detected_source_lang, found.billed_characters) == ("BLUE RED", "EN", 8)
    assert [one.text for one in client.translate_text(["red blue", "green"], target_lang="DE")] == ["BLUE RED", "GREEN"]
    tagged = client.translate_text("<p>red <b>blue</b></p>", source_lang="EN", target_lang="DE", tag_handling="html")
    assert tagged.text == "<p><b>BLUE</b> RED</p>"
    assert [one.code for one in client.get_source_languages()] == ["EN"]
    assert [(one.code, one.supports_formality) for one in client.get_target_languages()] == [("DE", False)]
    assert client.get_usage().character.count == 8 + 13 + 22
    with pytest.raises(deepl.AuthorizationException):
        deepl.Translator("wrong", server_url=locked).get_usage()
    with pytest.raises(deepl.DeepLException, match="target_lang"):
        client.translate_text("red", target_lang="FR")


def test_openai(url: str, locked: str) -> None:
    import openai

    client = openai.OpenAI(api_key=KEY, base_url=f"{locked}/v1", max_retries=0)
    assert [one.id for one in client.models.list()] == ["colours"]
    found = client.completions.create(model="colours", prompt=["red blue", "green"])
    assert [one.text for one in found.choices] == ["BLUE RED", "GREEN"]
    assert found.usage is not None
    assert found.usage.completion_tokens == 5
    messages: Any = [{"role": "user", "content": "red blue"}]
    chat = client.chat.completions.create(model="colours", messages=messages)
    assert chat.choices[0].message.content == "BLUE RED"
    parts = list(client.chat.completions.create(model="colours", messages=messages, stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in parts) == "BLUE RED"
    texts = client.completions.create(model="colours", prompt="red blue", stream=True)
    assert "".join(one.choices[0].text for one in texts) == "BLUE RED"
    first, second = (one.embedding for one in client.embeddings.create(model="colours", input=["red", "red"]).data)
    assert len(first) > 1
    assert first == pytest.approx(second)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="red")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="colours", prompt="red", temperature=9)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="wrong", base_url=f"{locked}/v1").models.list()


def test_huggingface_hub(url: str, locked: str) -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError, ValidationError

    client = InferenceClient(model=f"{locked}/models/colours", token=KEY)
    assert client.translation("red blue").translation_text == "BLUE RED"
    assert client.translation("red blue", src_lang="en", tgt_lang="de").translation_text == "BLUE RED"
    summariser = InferenceClient(f"{url}/pipeline/summarization", token="")
    assert summariser.summarization("red blue").summary_text == "BLUE RED"
    writer = InferenceClient(f"{url}/models/colours/pipeline/text-generation", token="")
    assert writer.text_generation("red blue") == "BLUE RED"
    tokens = [one.token for one in writer.text_generation("red blue", stream=True, details=True)]
    assert "".join(one.text for one in tokens if not one.special) == "BLUE RED"
    details = writer.text_generation("red blue", details=True)
    assert details.details is not None
    assert (details.details.generated_tokens, details.details.finish_reason) == (3, "eos_token")
    assert InferenceClient(f"{url}/pipeline/feature-extraction", token="").feature_extraction("red").shape[0] == 1
    chat = InferenceClient(f"{url}/v1", token="").chat_completion([{"role": "user", "content": "red blue"}])
    assert chat.choices[0].message.content == "BLUE RED"
    with pytest.raises(HfHubHTTPError):
        InferenceClient(model=f"{url}/models/other", token="").translation("red")
    with pytest.raises(ValidationError):
        InferenceClient(f"{url}/generate", token="").text_generation("")


def guide_blocks(languages: str) -> list[tuple[str, str]]:
    pattern = rf"^```({languages})\n(.*?)^```"
    return re.findall(pattern, GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def documented() -> list[tuple[str, Any]]:
    """The commands of the guide, each with the answer that follows it."""
    blocks = guide_blocks("sh|json")
    rows = [(command, answer) for (_, command), (kind, answer) in pairwise(blocks) if kind == "json"]
    assert len(rows) == sum(kind == "sh" for kind, _ in blocks)
    return rows


def send(command: str, folder: Path) -> str:
    """What curl prints. Without curl, the same request of httpx."""
    if shutil.which("curl"):
        done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout
    words, fields, headers, files, url = shlex.split(command), {}, {}, {}, ""  # type: ignore[var-annotated]
    body = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = after.partition(":" if word == "-H" else "=")
        if word == "-H":
            headers[name] = value.strip()
        elif word == "-d" and not after.startswith(("{", "[")):
            fields |= dict(part.split("=", 1) for part in after.split("&"))
        elif word == "-d":
            body = after
        elif word == "-F" and value.startswith("@"):
            files[name] = (value[1:], (folder / value[1:]).read_bytes())
        elif word == "-F":
            fields[name] = value
        url = word if word.startswith("http") else url
    if body is None and not fields and not files:
        return httpx.get(url, headers=headers).text
    return httpx.post(url, content=body, data=fields or None, files=files or None, headers=headers).text


def covers(expected: Any, found: Any) -> bool:
    """Whether an answer is the documented one; `...` stands for anything."""
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(covers(expected[name], found[name]) for name in expected)
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(covers, expected, found))
    if isinstance(expected, str) and expected.endswith("..."):
        return str(found).startswith(expected[:-3])
    return bool(expected == found)


def test_commands_of_the_guide(url: str, tmp_path: Path) -> None:
    (tmp_path / "film.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nred blue\n", encoding="utf-8")
    commands = documented()
    assert len(commands) >= 10
    for command, answer in commands:
        found = send(command.replace("http://127.0.0.1:8000", url), tmp_path)
        assert covers(json.loads(answer), json.loads(found)), (command, found)


def test_programs_of_the_guide(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _, program in guide_blocks("py"):
        exec(compile(program.replace("http://127.0.0.1:8000", url), "guide", "exec"), {})
        assert capsys.readouterr().out == "BLUE RED\n"


def test_the_first_five_minutes_of_the_guide_to_serving(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = GUIDE.with_name("serving.md").read_text(encoding="utf-8").partition("## Models")[0]
    guide = (
        guide.replace("http://localhost:8000", url).replace("localhost:8000", url).replace("14 March 2021", "red blue")
    )
    whole, streamed = re.findall(r"^curl (?:.*\\\n)*.*", guide, re.MULTILINE)
    best, second = json.loads(send(whole, tmp_path))["results"][0]
    assert (best["text"], best["alignment"]) == ("BLUE RED", [[0, 1], [1, 0]])
    assert best["score"] >= second["score"]
    assert len(best["token_scores"]) == 3
    events = [json.loads(line.removeprefix("data: ")) for line in send(streamed, tmp_path).splitlines() if line]
    assert "".join(one["text"] for one in events) == events[-1]["output"]["text"] == "BLUE RED"
    (program,) = re.findall(r"^```py\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    exec(compile(program.replace('model="demo"', 'model="colours"'), "guide", "exec"), {})
    assert capsys.readouterr().out == "BLUE RED\n"
