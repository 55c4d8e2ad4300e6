"""Service over loaded models: requests to tasks of an engine, a cache of outputs, reloading."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from transduce.errors import InputError
from transduce.flow import EOS, Hypothesis
from transduce.inference.documents import parse_document, translate_document
from transduce.inference.long_sources import separator
from transduce.inference.model import Model
from transduce.inference.prediction import Prediction
from transduce.inference.protected_spans import KINDS
from transduce.recipe import GenerationRecipe
from transduce.serving.engine import Engine
from transduce.serving.engine_searcher import EngineSearcher, steps_alone
from transduce.serving.metrics import Metrics
from transduce.serving.models import (
    ModelSpec,
    check_limits,
    constraints,
    continuation,
    describe,
    document_text,
    generated_texts,
    prompt_tokens,
    sample_source,
    search_settings,
    source_files,
    tagged_texts,
)
from transduce.serving.service import (
    CALLER,
    BadRequest,
    DeadlineExceeded,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    LimitExceeded,
    Limits,
    ModelInfo,
    Service,
    TokenEvent,
    Unsupported,
)
from transduce.serving.task_queue import Cancelled, Task

FLOW_THREADS = 16  # requests at the same time that are more than one search: HTML, protected spans, recordings
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the bytes of a character: the next token may end it
KNOWN_SETTINGS = 256  # of which the checked settings are remembered
PLAIN = frozenset({"tokens", "scores"})  # wants that need no further computation


@dataclass(frozen=True)
class EngineOptions:
    """How the models of a service are run."""

    max_batch: int = 64  # sources that are searched at the same time, of one model
    cache_entries: int = 0  # outputs that are remembered for equal requests; 0: none
    load: Callable[[ModelSpec], Model] | None = None  # loads a model again


class OutputCache:
    """Outputs of equal sources with equal settings, the least recently used dropped first."""

    def __init__(self, entries: int) -> None:
        self.entries, self._outputs = entries, OrderedDict[Any, tuple[GeneratedText, ...]]()

    def get(self, key: Any) -> tuple[GeneratedText, ...] | None:
        found = self._outputs.get(key)
        if found is not None:
            self._outputs.move_to_end(key)
        return found

    def put(self, key: Any, outputs: tuple[GeneratedText, ...]) -> None:
        self._outputs[key] = outputs
        self._outputs.move_to_end(key)
        while len(self._outputs) > self.entries:
            self._outputs.popitem(last=False)


class Served:
    """A model that is served, with its engine."""

    def __init__(self, model: Model, spec: ModelSpec, metrics: Metrics, limits: Limits, options: EngineOptions) -> None:
        self.model, self.spec, self.info, self.limits = model, spec, describe(model, spec), limits
        self.engine = Engine(spec.name, model, metrics, max_batch=options.max_batch, max_queued=limits.queued)
        self.cache = OutputCache(options.cache_entries)
        counted = metrics.sources, metrics.source_tokens, metrics.tokens
        self._counters = [one.labels(spec.name) for one in counted]  # finding them takes longer than counting
        self._settings: OrderedDict[Any, tuple[GenerationRecipe, bool]] = OrderedDict()
        self._users, self._retired = 0, False

    def __enter__(self) -> Served:
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        self._stop_unused()

    def retire(self) -> None:
        """Stops the engine when the requests that use this model have been answered."""
        self._retired = True
        self._stop_unused()

    def _stop_unused(self) -> None:
        if self._retired and not self._users:
            self.engine.stop()

    def count(self, outputs: Sequence[Sequence[GeneratedText]]) -> None:
        """Counts answered sources, their tokens and those of their best outputs."""
        best = [ranked[0] for ranked in outputs]
        counts = len(best), sum(one.source_token_count for one in best), sum(one.token_count for one in best)
        for counter, count in zip(self._counters, counts, strict=True):
            counter.inc(count)

    def settings(self, request: GenerationRequest) -> tuple[GenerationRecipe, bool]:
        """The checked settings of a request, and whether it is one search over lines of text.

        Checking takes longer than a step of a small model, so the latest settings are remembered.
        """
        changes = search_settings(request, self.model, self.limits)
        key = tuple(sorted(changes.items()))
        if key not in self._settings:
            settings = self.model.settings(**changes)
            steps = settings.strategy_kind != "mbr" and steps_alone(self.engine.searcher, settings)
            self._settings[key] = settings, steps and not settings.protect
            while len(self._settings) > KNOWN_SETTINGS:
                self._settings.popitem(last=False)
        settings, plain = self._settings[key]
        more = request.format == "html" or request.required or request.banned
        return settings, plain and not more and self.info.modality == "text"


@dataclass(frozen=True)
class CheckedRequest:
    """A request with its model and settings."""

    request: GenerationRequest
    served: Served
    settings: GenerationRecipe
    steps: bool  # True: it is nothing but steps over lines of text, whose tokens can be streamed

    @property
    def plain(self) -> bool:
        """Whether it is one search over lines of text: the prompts of language models are prefixes of their outputs."""
        return self.steps and not self.served.model.sourceless


class ModelService(Service):
    """Models in this process."""

    def __init__(
        self,
        models: Sequence[tuple[Model, ModelSpec]],
        limits: Limits | None = None,
        *,
        metrics: Metrics | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.limits, self.metrics, self.options = limits or Limits(), metrics or Metrics(), options or EngineOptions()
        self._served = {spec.name: self._serve(model, spec) for model, spec in models}
        if len(self._served) < len(models):
            raise InputError("two models have the same name", remedy="write NAME=RUN")
        self._flows = ThreadPoolExecutor(FLOW_THREADS, "flow")

    def _serve(self, model: Model, spec: ModelSpec) -> Served:
        return Served(model, spec, self.metrics, self.limits, self.options)

    def models(self) -> list[ModelInfo]:
        return [one.info for one in self._served.values()]

    @property
    def load(self) -> int:
        """Sources that wait or are searched."""
        return sum(one.engine.load for one in self._served.values())

    async def warm_up(self) -> None:
        """A real decode with every model, so that kernels are compiled and caches filled before the first request."""
        for one in self._served.values():
            await self._warm_up(one)

    async def _warm_up(self, served: Served) -> None:
        source = sample_source(served.info.modality)
        if "generate" in served.info.capabilities and source is not None:
            request = GenerationRequest((source,), max_length=min(8, self.limits.output_tokens))
            with suppress(BadRequest):  # a model of precomputed features, which reads no such file
                await self._outputs(CheckedRequest(request, served, *served.settings(request)))
        elif "embed" in served.info.capabilities:
            await asyncio.to_thread(served.engine.call, lambda: served.model.embed(["a"]))

    async def reload(self, name: str | None = None) -> None:
        """Loads models again from their paths. Requests that were accepted end with the old weights."""
        if self.options.load is None:
            raise Unsupported("the models of this server cannot be loaded again")
        for old in [one for one in self._served.values() if name in (None, one.info.name)]:
            model = await asyncio.to_thread(self.options.load, old.spec)
            new = self._serve(model, old.spec)
            await self._warm_up(new)
            self._served[old.spec.name] = new
            old.retire()
            self.metrics.reloads.labels(old.spec.name).inc()

    def close(self) -> None:
        """Stops all engines when their tasks are done, and waits for them."""
        for one in self._served.values():
            one.engine.stop()
        for one in self._served.values():
            one.engine.join()
        self._flows.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        checked = self._checked(request)
        with checked.served as served:
            if not self.options.cache_entries or request.wants - PLAIN or served.info.modality != "text":
                return GenerationResult(served.info.name, await self._outputs(checked))
            return await self._cached(checked)

    async def _cached(self, checked: CheckedRequest) -> GenerationResult:
        """Outputs from the cache, and those of the other sources. Samples depend on the place of a source."""
        request, served = checked.request, checked.served
        asked = replace(request, sources=(), prefixes=(), wants=frozenset(), deadline=None, priority=0)
        prefixes = request.prefixes or ("",) * len(request.sources)
        sampled = checked.settings.strategy_kind == "sample"
        keys = [
            (asked, source, prefix, number if sampled else 0)
            for number, (source, prefix) in enumerate(zip(request.sources, prefixes, strict=True))
        ]
        known = [served.cache.get(key) for key in keys]
        missing = [number for number, one in enumerate(known) if one is None]
        if sampled and missing:
            missing = list(range(len(keys)))
        self.metrics.cache_hits.labels(served.info.name).inc(len(keys) - len(missing))
        self.metrics.cache_misses.labels(served.info.name).inc(len(missing))
        if missing:
            some = replace(request, sources=tuple(request.sources[number] for number in missing))
            if request.prefixes:
                some = replace(some, prefixes=tuple(prefixes[number] for number in missing))
            for number, outputs in zip(missing, await self._outputs(replace(checked, request=some)), strict=True):
                known[number] = outputs
                served.cache.put(keys[number], outputs)
        found = tuple(one for one in known if one is not None)
        return GenerationResult(served.info.name, found, len(keys) - len(missing))

    def _checked(self, request: GenerationRequest) -> CheckedRequest:
        """A request that can be served; others are refused."""
        check_limits(request, self.limits)
        info = self.model(request.model, request.source_language, request.target_language)
        if "generate" not in info.capabilities:
            raise Unsupported(f"the model {info.name!r} does not generate")
        if not request.sources:
            raise BadRequest("no source was given")
        texts = [isinstance(one, str) for one in request.sources]
        if info.modality != "text" and any(texts):
            raise Unsupported(f"this model reads {info.modality} files, which are uploaded")
        if info.modality == "text" and not all(texts):
            raise Unsupported("this model reads text")
        served = self._served[info.name]
        return CheckedRequest(request, served, *served.settings(request))

    async def _outputs(self, checked: CheckedRequest) -> tuple[tuple[GeneratedText, ...], ...]:
        if checked.plain:
            return tuple(await self._run(PlainRequest(checked)))
        return await self._flow(checked.request, checked.served)

    async def _run(self, plain: PlainRequest, on_tokens: Any = None) -> Any:
        """Awaits a task of an engine. A cancelled wait cancels the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        task = self._task(plain.request, plain.prepare, plain.finish, done)
        task.loop, task.texts, task.count, task.on_tokens = loop, plain.texts, len(plain.texts), on_tokens
        plain.served.engine.submit(task)
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                plain.served.engine.cancel(task)

    def _task(self, request: GenerationRequest, prepare: Any, finish: Any, done: Any) -> Task:
        seconds = min(request.deadline or self.limits.request_seconds, self.limits.request_seconds)
        task = Task(prepare, finish, done, deadline=time.monotonic() + seconds)
        caller = CALLER.get()
        task.client, task.priority, task.trace = caller.client, request.priority, caller.trace
        return task

    async def _flow(
        self, request: GenerationRequest, served: Served, on_tokens: Any = None
    ) -> tuple[tuple[GeneratedText, ...], ...]:
        """A request that is more than one search runs in a thread of its own, which waits for its searches."""
        flow = Flow(request, served, self._task, on_tokens)
        seconds = min(request.deadline or self.limits.request_seconds, self.limits.request_seconds)
        running = asyncio.get_running_loop().run_in_executor(self._flows, flow.run, CALLER.get())
        try:
            async with asyncio.timeout(seconds + 1):  # the searches end at the deadline itself
                found = await asyncio.shield(running)
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            flow.cancel()
        served.count(found)
        return found

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        checked = self._checked(replace(request, n_best=1))
        with checked.served:
            for number, source in enumerate(request.sources):
                one = replace(checked.request, sources=(source,), prefixes=request.prefixes[number : number + 1])
                async for event in self._stream_one(replace(checked, request=one)):
                    yield replace(event, source=number)

    async def _stream_one(self, checked: CheckedRequest) -> AsyncIterator[TokenEvent]:
        if not checked.steps or checked.request.stop:
            (outputs,) = await self._outputs(checked)
            yield TokenEvent(outputs[0].text)
            yield TokenEvent("", final=outputs[0])
            return
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[TokenEvent | None]()  # None: the end
        plain = PlainRequest(checked)
        writer = TokenWriter(plain) if checked.plain else ContinuationWriter(checked)

        def on_tokens(part: int, certain: list[tuple[int, float]], ended: bool) -> None:
            for event in writer.write(part, certain, ended):
                loop.call_soon_threadsafe(queue.put_nowait, event)

        if checked.plain:
            running = asyncio.ensure_future(self._run(plain, on_tokens))
        else:
            running = asyncio.ensure_future(self._flow(checked.request, checked.served, on_tokens))
        running.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            (outputs,) = await running
            if rest := writer.rest(outputs[0].text):
                yield TokenEvent(rest)
            yield TokenEvent("", final=outputs[0])
        finally:
            running.cancel()

    async def embed(self, texts: Sequence[str], model: str | None = None) -> list[list[float]]:
        info = self.model(model)
        if "embed" not in info.capabilities:
            raise Unsupported(f"the model {info.name!r} does not embed")
        for name, most, given in (
            ("items", self.limits.items, len(texts)),
            ("characters", self.limits.characters, sum(map(len, texts))),
        ):
            if given > most:
                raise LimitExceeded(name, most, given)
        with self._served[info.name] as served:
            found = await asyncio.to_thread(served.engine.call, lambda: served.model.embed(list(texts)))
        return [[float(value) for value in row] for row in found]


class PlainRequest:
    """A request that is one search over lines of text. `prepare` and `finish` run in the thread of the engine."""

    def __init__(self, checked: CheckedRequest) -> None:
        self.request, self.served, self.settings = checked.request, checked.served, checked.settings
        self.texts = tagged_texts(self.request, self.served.model, [str(one) for one in self.request.sources])

    def prepare(self) -> Any:
        model = self.served.model
        self.lines = model.encode_lines(self.texts, self.request.prefixes or None, None, self.settings)
        lines = self.lines
        return self.served.engine.rows(lines.sources, lines.prefixes, self.settings, lines.numbers), self.settings

    def finish(self, found: list[list[Hypothesis]]) -> tuple[tuple[GeneratedText, ...], ...]:
        predictions = self.served.model.predict_lines(self.texts, self.lines, self.settings, found)
        outputs = tuple(generated_texts(one, self.request) for one in predictions)
        self.served.count(outputs)
        return outputs


class TokenWriter:
    """The text of a stream while its tokens become certain. The parts of a long source are written in order."""

    def __init__(self, plain: PlainRequest) -> None:
        self._plain, self._text, self._own = plain, "", ""
        self._part, self._given = 0, 0  # the part that is written, and its tokens so far
        self._certain: dict[int, tuple[list[tuple[int, float]], bool]] = {}

    def write(self, part: int, certain: list[tuple[int, float]], ended: bool) -> list[TokenEvent]:
        """The events of tokens that can be written now."""
        events, self._certain[part] = list[TokenEvent](), (certain, ended)
        while self._part in self._certain:
            certain, ended = self._certain[self._part]
            for count in range(self._given + 1, len(certain) + 1):
                events.append(self._event(certain[:count], last=ended and count == len(certain)))
            self._given = max(self._given, len(certain))
            if not ended:
                break
            self._part, self._given, self._own = self._part + 1, 0, ""
        return events

    def _event(self, certain: list[tuple[int, float]], *, last: bool) -> TokenEvent:
        model, parts = self._plain.served.model, self._plain.lines.parts
        unknown = model.source_encoding.oov_words(parts[self._part].text)
        now = model.target.decode([token for token, _ in certain if token != EOS], unknown)
        now = now if last else now.rstrip(INCOMPLETE)
        added = now[len(self._own) :] if now.startswith(self._own) else ""
        before = parts[self._part - 1].source if self._part else ""
        lead = separator(self._text, before, added) if added and not self._own else ""
        self._own += added
        self._text += lead + added
        return TokenEvent(lead + added, model.target.piece(certain[-1][0]), certain[-1][1])

    def rest(self, text: str) -> str:
        """What the events have not given of an output."""
        return text[len(self._text) :] if text.startswith(self._text) else ""


class ContinuationWriter:
    """The text of the stream of a language model: what follows the prompt, whose tokens come first."""

    def __init__(self, checked: CheckedRequest) -> None:
        self._model, self._text = checked.served.model, ""
        self._given = self._prompt = prompt_tokens(self._model, str(checked.request.sources[0]), checked.settings)

    def write(self, part: int, certain: list[tuple[int, float]], ended: bool) -> list[TokenEvent]:
        """The events of tokens that can be written now."""
        counts = range(self._given + 1, len(certain) + 1)
        self._given = max(self._given, len(certain))
        return [self._event(certain[:count]) for count in counts]

    def _event(self, certain: list[tuple[int, float]]) -> TokenEvent:
        target, ids = self._model.target, [token for token, _ in certain if token != EOS]
        now = target.decode(ids)[len(target.decode(ids[: self._prompt])) :].rstrip(INCOMPLETE)
        added = now[len(self._text) :] if now.startswith(self._text) else ""
        self._text += added
        return TokenEvent(added, target.piece(certain[-1][0]), certain[-1][1])

    def rest(self, text: str) -> str:
        """What the events have not given of an output."""
        return text[len(self._text) :] if text.startswith(self._text) else ""


class Flow:
    """A request that is more than one search: documents, protected spans, uploads, constraints, language models."""

    def __init__(
        self, request: GenerationRequest, served: Served, task: Callable[..., Task], on_tokens: Any = None
    ) -> None:
        self.request, self.served, self._task, self._on_tokens = request, served, task, on_tokens
        self._lock, self._tasks, self._cancelled = threading.Lock(), list[Task](), False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            for task in self._tasks:
                if not task.closed:
                    self.served.engine.cancel(task)

    def _submit(self, task: Task) -> None:
        own = self._task(self.request, task.prepare, task.finish, task.done)
        own.on_tokens = self._on_tokens
        with self._lock:
            if self._cancelled:
                raise Cancelled
            self._tasks.append(own)
        self.served.engine.submit(own)

    def run(self, caller: Any) -> tuple[tuple[GeneratedText, ...], ...]:
        CALLER.set(caller)
        view = self.served.model.searching_with(EngineSearcher(self.served.engine, self._submit))
        settings = search_settings(self.request, view, self.served.limits)
        with source_files(self.request.sources, self.served.info.modality) as texts:
            texts = tagged_texts(self.request, view, texts)
            if self.request.format == "html":
                return tuple((_translate_html(view, text, settings),) for text in texts)
            options: dict[str, Any] = {"constraints": constraints(self.request)}
            if self.request.prefixes:
                options["prefixes"] = self.request.prefixes
            found: list[Prediction] = view.generate(texts, **options, **settings)
            if view.sourceless:
                counts = [prompt_tokens(view, text, view.settings(**settings)) for text in texts]
                found = list(map(continuation, found, texts, counts))
            if self.request.wants - PLAIN:
                self.served.engine.call(lambda: view.explain_predictions([one for one in found if one.tokens]))
            outputs = [generated_texts(one, self.request) for one in found]
            if view.sourceless:
                outputs = [
                    tuple(replace(one, source_token_count=count) for one in ranked)
                    for ranked, count in zip(outputs, counts, strict=True)
                ]
            return tuple(outputs)


def _translate_html(model: Model, text: str, settings: dict[str, Any]) -> GeneratedText:
    sentences = list[Prediction]()

    def generate(texts: list[str]) -> list[Prediction]:
        found = model.generate(texts, **settings)
        sentences.extend(found)
        return found

    settings = {"protect": KINDS, **settings}
    document = translate_document(model, parse_document(text, ".html"), generate=generate, **settings)
    return document_text(str(document), sentences)
