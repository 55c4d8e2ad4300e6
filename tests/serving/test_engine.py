"""The engine: outputs without regard to neighbours, priorities, fairness, deadlines, cancelling, overload, reload."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_fixtures import CPUSearchGraph

from transduce.decoding.continuous_batching import OpenSearch
from transduce.inference import Model, load
from transduce.inference.generation import Searcher
from transduce.inference.protected_spans import KINDS
from transduce.inference.terminology import Constraints
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.serving.engine import Engine
from transduce.serving.metrics import Metrics
from transduce.serving.model_service import EngineOptions, ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.service import (
    CALLER,
    BadRequest,
    Caller,
    DeadlineExceeded,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    LimitExceeded,
    Limits,
    Media,
    ModelNotFound,
    Overloaded,
    Unsupported,
)
from transduce.serving.task_queue import FairQueue, QueuedRow, Task

TEXTS = ["red green blue", "blue", "green green red blue red", "black white", "white red", "blue green black"] * 3
Serve = Callable[..., ModelService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Services over loaded models, which are closed at the end."""
    started: list[ModelService] = []

    def start(*models: Model, limits: Limits | None = None, **options: Any) -> ModelService:
        named = [(model, ModelSpec(f"path{number}", f"model{number}")) for number, model in enumerate(models)]
        started.append(ModelService(named, limits, options=EngineOptions(**options)))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def captured(attention_run: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose steps are captured and launched as on a GPU."""
    monkeypatch.setattr(Searcher, "native", None)
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    model = load(attention_run)
    model.searcher.graphs = SearchGraphs()
    return model


@pytest.fixture(scope="module")
def words(attention_run: Path) -> Model:
    return load(attention_run)


@pytest.fixture(scope="module")
def characters(transformer_run: Path) -> Model:
    return load(transformer_run)


def requests(**options: Any) -> list[GenerationRequest]:
    return [GenerationRequest((text,), **options) for text in TEXTS]


async def gathered(service: ModelService, wanted: list[GenerationRequest]) -> list[Any]:
    async def late(number: int, request: GenerationRequest) -> Any:
        await asyncio.sleep(0.001 * (number % 7))  # they arrive in the middle of others
        return await service.generate(request)

    return await asyncio.gather(*(late(number, one) for number, one in enumerate(wanted)))


MIXED = [
    {},
    {"beam_size": 1},
    {"n_best": 3},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 3, "n_best": 2, "seed": 5},
    {"max_length": 3},
    {"prefixes": ("RED",)},
    {"required": ("RED",)},
    {"repetition_penalty": 1.5},
]


@pytest.mark.parametrize("run", ["attention_run", "transformer_run", "bottleneck_run"])
def test_outputs_do_not_depend_on_the_neighbours(run: str, request: pytest.FixtureRequest, serve: Serve) -> None:
    """Requests with different settings, in flight at once, get what each gets alone, and what `generate` gives."""
    model = load(request.getfixturevalue(run))
    wanted = [replace(one, **option) for option in MIXED for one in requests()[:4]]
    service = serve(model, max_batch=8)
    together = asyncio.run(gathered(service, wanted))
    single = serve(model, max_batch=1)
    for one, found in zip(wanted[::3], together[::3], strict=True):
        assert [row.text for row in asyncio.run(single.generate(one)).outputs[0]] == [
            row.text for row in found.outputs[0]
        ], one
    for one, found in zip(wanted, together, strict=True):
        changes: dict[str, Any] = {"beam": one.beam_size, "nbest": one.n_best, "max_length": one.max_length}
        changes |= {"repetition_penalty": one.repetition_penalty, "prefixes": one.prefixes or None}
        if one.required:
            changes["constraints"] = [Constraints(one.required)]
        if one.temperature:
            changes |= {"strategy": "sample", "temperature": one.temperature, "top_k": one.top_k, "seed": one.seed}
            changes["beam"] = one.n_best
        (offline,) = model.generate(one.sources, **changes)
        assert [row.text for row in found.outputs[0]] == [row.text for row in offline.nbest]
        assert found.best[0].score == pytest.approx(offline.score, abs=1e-3)


@pytest.mark.parametrize("computing", [False, True], ids=["fast device", "slow device"])
def test_outputs_are_made_while_captured_steps_are_computed(
    captured: Model, words: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch, computing: bool
) -> None:
    """More clients than slots, beside a stream and requests that fail: all outputs are those of `generate`."""
    looks = cycle([computing, computing, False])
    monkeypatch.setattr(OpenSearch, "computing", property(lambda _: next(looks)))
    wanted = [one.text for one in words.generate(TEXTS)]
    service = serve(captured, max_batch=8)

    async def ask(text: str) -> list[str]:
        return [(await service.generate(GenerationRequest((text,)))).best[0].text for _ in range(3)]

    async def listen() -> str:
        return "".join([one.text async for one in service.stream(GenerationRequest((TEXTS[2],)))])

    async def fail() -> None:
        with pytest.raises(DeadlineExceeded):
            await service.generate(GenerationRequest((TEXTS[0],), deadline=1e-9))

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(ask, TEXTS), listen(), fail())

    *found, streamed, _ = asyncio.run(all_of_them())
    assert found == [[text] * 3 for text in wanted]
    assert streamed == wanted[2]
    assert captured.searcher.graphs is not None
    assert captured.searcher.graphs.replayed
    assert service.load == 0


def test_a_task_that_comes_while_a_device_computes_enters_before_the_next_steps(
    captured: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has just read the output of an earlier one."""
    service, launched, entered = serve(captured), list[OpenSearch](), list[bool]()
    launch, add, texts = OpenSearch.launch, OpenSearch.add, [TEXTS[0]] * 6

    def computing(search: OpenSearch) -> bool:
        """The device computes until the second request has entered, or for some seconds."""
        return len(entered) < 2 and time.monotonic() < until

    def recorded(search: OpenSearch, *arguments: Any) -> bool:
        entered.append(search.launches > 0)
        return add(search, *arguments)

    def launching(search: OpenSearch) -> bool:
        launched.append(search)
        return launch(search)

    async def both() -> list[GenerationResult]:
        first = asyncio.create_task(service.generate(GenerationRequest(tuple(texts[:1]))))
        while not launched:
            await asyncio.sleep(0.001)
        return [await service.generate(GenerationRequest(tuple(texts[1:]))), await first]

    until = time.monotonic() + 20
    monkeypatch.setattr(OpenSearch, "computing", property(computing))
    monkeypatch.setattr(OpenSearch, "add", recorded)
    monkeypatch.setattr(OpenSearch, "launch", launching)
    found = asyncio.run(both())
    assert entered[:2] == [False, True]
    assert time.monotonic() < until
    assert [one.text for result in found for one in result.best] == [captured.generate(texts[:1])[0].text] * 6


def test_sources_that_cannot_enter_beside_others_hold_nobody_up(
    captured: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs of those that have ended are made meanwhile, and the others enter when the search is empty."""
    service, refused, add = serve(captured, max_batch=4), list[int](), OpenSearch.add

    def refusing(search: OpenSearch, numbers: Any, request: Any) -> bool:
        if not search.active:
            search.refills = True
            return add(search, numbers, request)
        refused.extend(numbers)
        search.refills = False
        return False

    async def all_of_them() -> list[GenerationResult]:
        waiting = [service.generate(GenerationRequest((text,))) for text in TEXTS]
        return await asyncio.wait_for(asyncio.gather(*waiting), 60)

    monkeypatch.setattr(OpenSearch, "add", refusing)
    found = asyncio.run(all_of_them())
    assert refused
    assert [one.best[0].text for one in found] == [one.text for one in captured.generate(TEXTS)]


@pytest.mark.parametrize("failing", ["launch", "advance", "take_results"])
def test_a_captured_search_that_fails_is_dropped(
    captured: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The client learns of the error though no other task follows, and the next request is answered."""
    service, request = serve(captured), GenerationRequest((TEXTS[0],))

    def fail(_: OpenSearch) -> None:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(OpenSearch, failing, fail)
        with pytest.raises(RuntimeError, match="the device failed"):
            asyncio.run(asyncio.wait_for(service.generate(request), 60))
    assert asyncio.run(service.generate(request)).best[0].text == captured.generate([TEXTS[0]])[0].text


def test_an_event_loop_is_woken_once_for_tasks_that_end_together(words: Model) -> None:
    class Loop(asyncio.SelectorEventLoop):
        calls = 0

        def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
            self.calls += 1
            return super().call_soon_threadsafe(*arguments, **options)

    loop, ended = Loop(), list[int]()
    engine = Engine("model", words, Metrics())

    def submit() -> None:
        for number in range(5):
            task = Task(lambda: ([], words.settings()), lambda found: 0, lambda *_, n=number: ended.append(n), loop)  # type: ignore[misc]
            engine.submit(task)

    engine.call(submit)
    engine.stop()
    engine.join()
    assert loop.calls == 1
    assert not ended
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert ended == [0, 1, 2, 3, 4]


def test_samples_are_those_of_generate(words: Model, serve: Serve) -> None:
    request = GenerationRequest(tuple(TEXTS), temperature=1.3, seed=11)
    found = asyncio.run(serve(words).generate(request))
    offline = words.generate(TEXTS, strategy="sample", temperature=1.3, seed=11)
    assert [one.text for one in found.best] == [one.text for one in offline]


def test_long_texts_markup_and_placeholders_are_put_together_again(characters: Model, serve: Serve) -> None:
    service = serve(characters)
    long = "  ".join(["red green blue."] * 12)
    texts = [long, "see <b>red</b> at http://a.example/x for {name}"]
    found = asyncio.run(service.generate(GenerationRequest(tuple(texts), protect=True)))
    offline = characters.generate(texts, protect=KINDS)
    assert [one.text for one in found.best] == [one.text for one in offline]
    assert "{name}" in found.best[1].text
    assert "http://a.example/x" in found.best[1].text
    page = "<p>red <b>green</b> blue</p><hr><p>blue</p>"
    html = asyncio.run(service.generate(GenerationRequest((page,), format="html"))).best[0].text
    assert html.startswith("<p>")
    assert "</p><hr><p>" in html
    assert html.count("<b>") == 1


def test_tokens_of_a_page_are_counted(words: Model, serve: Serve) -> None:
    """As if its sentences had come as texts: in the result, and in the metrics."""
    service, texts = serve(words), ["red green blue", "blue"]
    counters = service.metrics.sources, service.metrics.source_tokens, service.metrics.tokens

    def counted(*sources: str, **options: Any) -> tuple[list[GeneratedText], list[float]]:
        before = [one.labels("model0")._value.get() for one in counters]
        found = asyncio.run(service.generate(GenerationRequest(sources, **options))).best
        return found, [one.labels("model0")._value.get() - start for one, start in zip(counters, before, strict=True)]

    outputs, (_, *plain) = counted(*texts)
    (page,), (sources, *markup) = counted(f"<p>{texts[0]}</p><hr><p>{texts[1]}</p>", format="html")
    assert (sources, markup) == (1, plain)
    assert markup == [page.source_token_count, page.token_count]
    assert min(markup) > 0
    assert page.tokens == outputs[0].tokens + outputs[1].tokens
    assert page.score == pytest.approx(sum(one.score for one in outputs), abs=1e-4)
    (cut,), _ = counted(f"<p>{texts[0]}</p>", format="html", max_length=1)
    assert (page.finish_reason, cut.finish_reason) == ("stop", "length")


@pytest.mark.parametrize("beam", [1, 4])
def test_streams_join_to_the_output(characters: Model, serve: Serve, beam: int) -> None:
    service = serve(characters)
    long = " ".join(["red green blue."] * 8)

    async def read(text: str) -> tuple[str, Any]:
        events = [one async for one in service.stream(GenerationRequest((text,), beam_size=beam))]
        return "".join(one.text for one in events), events

    async def read_all() -> list[Any]:
        return await asyncio.gather(*map(read, (*TEXTS[:5], long)))

    for text, (joined, events) in zip((*TEXTS[:5], long), asyncio.run(read_all()), strict=True):
        output = asyncio.run(service.generate(GenerationRequest((text,), beam_size=beam))).best[0]
        assert joined == output.text
        assert tuple(one.token for one in events[:-1]) == output.tokens
        assert events[-1].final == output
        assert len([one for one in events if one.text]) > 1


def test_wants_are_computed(words: Model, serve: Serve) -> None:
    request = GenerationRequest(("red green",), wants=frozenset({"alignment", "attention", "explanation"}))
    output = asyncio.run(serve(words).generate(request)).best[0]
    (offline,) = words.generate(["red green"])
    assert list(output.alignment or ()) == offline.alignment
    assert output.attention is not None
    assert output.explanation is not None
    assert output.source_token_count == 2
    plain = asyncio.run(serve(words).generate(replace(request, wants=frozenset()))).best[0]
    assert (plain.alignment, plain.attention, plain.explanation) == (None, None, None)


def test_stop_texts_end_an_output(words: Model, serve: Serve) -> None:
    service = serve(words)
    whole = asyncio.run(service.generate(GenerationRequest(("red green blue",)))).best[0].text
    word = whole.split()[-1]
    cut = asyncio.run(service.generate(GenerationRequest(("red green blue",), stop=(word,)))).best[0]
    assert cut.text == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sources": ("a",) * 9}, LimitExceeded),
        ({"sources": ("a" * 101,)}, LimitExceeded),
        ({"beam_size": 5}, LimitExceeded),
        ({"n_best": 5}, LimitExceeded),
        ({"max_length": 51}, LimitExceeded),
        ({"deadline": 61.0}, LimitExceeded),
        ({"prefixes": ("a", "b")}, BadRequest),
        ({"sources": ()}, BadRequest),
        ({"model": "other"}, ModelNotFound),
    ],
)
def test_limits(words: Model, serve: Serve, changes: dict[str, Any], error: type[Exception]) -> None:
    service = serve(words, limits=Limits(items=8, characters=100, beam_size=4, n_best=4, output_tokens=50))
    with pytest.raises(error):
        asyncio.run(service.generate(replace(GenerationRequest(("red",)), **changes)))


def test_a_model_of_text_takes_no_files(words: Model, serve: Serve) -> None:
    with pytest.raises(Unsupported):
        asyncio.run(serve(words).generate(GenerationRequest((Media(b"", "image"),))))


def test_vectors_are_those_of_the_model(words: Model, serve: Serve) -> None:
    found = asyncio.run(serve(words).embed(TEXTS[:4]))
    assert np.allclose(found, words.embed(TEXTS[:4]))


def place(client: str, number: int, priority: int = 0) -> QueuedRow:
    task = Task(lambda: ([], None), lambda found: found, lambda *_: None, client=client, priority=priority)  # type: ignore[arg-type,return-value]
    return QueuedRow(task, number, ("", 0, 0), None)  # type: ignore[arg-type]


def test_clients_take_turns_within_a_priority() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(place("busy", number))
    queue.push(place("late", 10))
    queue.push(place("urgent", 20, priority=1))
    assert [one.number for one in queue.take(lambda _: True)] == [20, 0, 10, 1, 2]
    assert len(queue) == 0


def test_a_refused_row_does_not_hold_up_other_clients() -> None:
    queue = FairQueue()
    for number, client in enumerate("aab"):
        queue.push(place(client, number))
    assert [one.number for one in queue.take(lambda one: one.task.client == "b")] == [2]
    assert [one.number for one in queue.take(lambda _: True)] == [0, 1]


class Slow:
    """Holds the thread of an engine between two steps, until it is released."""

    def __init__(self, engine: Engine) -> None:
        self.release, holding = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            self.release.wait(20)

        threading.Thread(target=engine.call, args=(hold,), daemon=True).start()
        assert holding.wait(20)


def engine_of(service: ModelService) -> Engine:
    return next(iter(service._served.values())).engine


def test_a_full_queue_refuses_with_a_time(words: Model, serve: Serve) -> None:
    service = serve(words, limits=Limits(queued=4))
    slow = Slow(engine_of(service))

    async def load_up() -> tuple[list[Any], int]:
        waiting = [asyncio.ensure_future(service.generate(one)) for one in requests()[:4]]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded) as refused:
            await service.generate(requests()[0])
        slow.release.set()
        return await asyncio.gather(*waiting), refused.value.retry_after or 0

    answered, retry_after = asyncio.run(load_up())
    assert len(answered) == 4
    assert 1 <= retry_after <= 60
    assert service.load == 0


def test_a_deadline_ends_a_request_and_frees_its_slot(words: Model, serve: Serve) -> None:
    service = serve(words)
    slow = Slow(engine_of(service))

    async def wait() -> None:
        late = asyncio.ensure_future(service.generate(replace(requests()[0], deadline=0.01)))
        await asyncio.sleep(0.05)
        slow.release.set()
        with pytest.raises(DeadlineExceeded):
            await late

    asyncio.run(wait())
    assert service.load == 0


def test_work_is_cancelled_when_the_client_leaves(words: Model, serve: Serve) -> None:
    service = serve(words)
    slow = Slow(engine_of(service))

    async def leave() -> None:
        left = asyncio.ensure_future(service.generate(requests()[0]))
        await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left

    asyncio.run(leave())
    slow.release.set()
    engine_of(service).call(lambda: None)
    engine_of(service).call(lambda: None)  # a whole turn of the loop lies between
    assert service.load == 0
    assert service.metrics.cancelled.labels("model0")._value.get() == 1


def test_urgent_requests_pass_the_queue(words: Model, serve: Serve) -> None:
    service = serve(words, max_batch=1)
    slow = Slow(engine_of(service))
    order: list[str] = []

    async def ask(name: str, client: str, priority: int) -> None:
        CALLER.set(Caller(client))
        await service.generate(GenerationRequest((f"{name} red",), priority=priority))
        order.append(name)

    async def ask_all() -> None:
        asked = [ask("a1", "a", 0), ask("a2", "a", 0), ask("a3", "a", 0), ask("b1", "b", 0), ask("u", "c", 5)]
        waiting = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(0.01)
        slow.release.set()
        await asyncio.gather(*waiting)

    asyncio.run(ask_all())
    assert order == ["u", "a1", "b1", "a2", "a3"]


def test_a_reload_drops_no_request(words: Model, characters: Model, serve: Serve) -> None:
    service = serve(words, load=lambda spec: characters)
    before = [asyncio.run(service.generate(one)).best[0].text for one in requests()]
    slow, old = Slow(engine_of(service)), engine_of(service)

    async def reload() -> tuple[list[Any], Any]:
        waiting = [asyncio.ensure_future(service.generate(one)) for one in requests()]
        await asyncio.sleep(0.01)
        await service.reload()
        slow.release.set()
        return await asyncio.gather(*waiting), await service.generate(requests()[0])

    answered, after = asyncio.run(reload())
    assert [one.best[0].text for one in answered] == before  # of the model that had accepted them
    assert after.best[0].text == characters.generate(TEXTS[:1])[0].text
    old.join(20)
    assert not old._thread.is_alive()


def test_equal_requests_are_answered_from_the_cache(words: Model, serve: Serve) -> None:
    service = serve(words, cache_entries=4)
    request = GenerationRequest(("red", "blue green"))
    first = asyncio.run(service.generate(request))
    again = asyncio.run(service.generate(request))
    assert again.outputs == first.outputs
    assert (first.cached, again.cached) == (0, 2)
    assert service.metrics.cache_hits.labels("model0")._value.get() == 2
    asyncio.run(service.generate(GenerationRequest(tuple("abcd"))))  # the least recently used leave
    assert asyncio.run(service.generate(request)).cached == 0
    assert asyncio.run(service.generate(replace(request, beam_size=1))).cached == 0


def test_an_error_of_one_request_leaves_the_others_alone(words: Model, serve: Serve) -> None:
    service = serve(words)

    async def both() -> list[Any]:
        wrong = service.generate(GenerationRequest(("red",), required=("\ud800",)))
        return await asyncio.gather(wrong, service.generate(requests()[0]), return_exceptions=True)

    failed, answered = asyncio.run(both())
    assert isinstance(failed, Exception)
    assert answered.best[0].text
    assert service.load == 0


@pytest.mark.parametrize("at_end", [False, True])
def test_an_error_of_who_receives_tokens_ends_that_task_alone(
    words: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """As where its event loop was closed."""
    service = serve(words)
    engine = engine_of(service)
    submit = engine.submit

    def failing(task: Task) -> None:
        def on_tokens(part: int, tokens: list[tuple[int, float]], ended: bool) -> None:
            if ended or not at_end:
                raise RuntimeError("nobody listens")

        task.on_tokens = on_tokens if task.count == 2 else None
        submit(task)

    monkeypatch.setattr(engine, "submit", failing)

    async def both() -> list[Any]:
        wrong = service.generate(GenerationRequest(("red green blue", "blue white red")))
        async with asyncio.timeout(600):  # an engine that has ended answers nobody
            return await asyncio.gather(wrong, service.generate(requests()[0]), return_exceptions=True)

    failed, answered = asyncio.run(both())
    assert str(failed) == "nobody listens"
    assert answered.best[0].text
    assert service.load == 0
    assert asyncio.run(service.generate(requests()[1])).best[0].text


def test_an_engine_stops_after_its_tasks(words: Model) -> None:
    engine = Engine("words", words, Metrics())
    slow, ended = Slow(engine), list[Any]()
    engine.submit(Task(lambda: ([], words.settings()), lambda found: "done", lambda value, error: ended.append(value)))
    engine.stop()
    slow.release.set()
    engine.join(20)
    assert ended == ["done"]
