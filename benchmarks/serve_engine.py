"""The engine of the server beside offline generation: tokens a second with many clients in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import transduce
from benchmarks.serve_model import train_reverse
from transduce.decoding.continuous_batching import plan_searches
from transduce.inference.model import Model
from transduce.serving.model_service import EngineOptions, ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.server import tune_interpreter
from transduce.serving.service import GenerationRequest, GenerationResult, Limits
from transduce.synthetic import algorithmic

CLIENTS, REQUESTS = 256, 8  # clients, and requests of each
WORDS = (16, 24)  # of a source
LENGTH = 64  # tokens of an output: a model without training never ends one
REPEATS = 3
BASE = {"kind": "transformer", "width": 512, "layers": 6, "heads": 8, "ff_width": 2048, "dropout": 0.0}
TINY = {"kind": "transformer", "width": 64, "layers": 1, "heads": 2, "ff_width": 128, "dropout": 0.0}


def make_model(folder: Path, part: dict[str, Any], symbols: Sequence[str]) -> Model:
    """A model of these words after one update."""
    training = {"steps": 1, "batch_tokens": 512}
    pairs = max(len(symbols) // 4, 64)  # every word occurs
    options: dict[str, Any] = {"generation": {"max_length": 8}, "length": WORDS, "symbols": symbols}
    run = train_reverse(folder, part, training, pairs=pairs, **options)
    return transduce.load(run, precision="bf16" if torch.cuda.is_available() else None)


async def ask_all(service: ModelService, texts: Sequence[str], clients: int, beam: int) -> tuple[list[str], int]:
    """The outputs of all texts, each a request of its own, and their tokens."""
    outputs: list[str] = [""] * len(texts)
    tokens, numbers = 0, iter(range(len(texts)))

    async def client() -> None:
        nonlocal tokens
        for number in numbers:
            request = GenerationRequest((texts[number],), beam_size=beam, max_length=LENGTH)
            found: GenerationResult = await service.generate(request)
            outputs[number] = found.best[0].text
            tokens += found.token_count

    await asyncio.gather(*(client() for _ in range(clients)))
    return outputs, tokens


def measure_engine(folder: Path, *, tiny: bool) -> list[dict[str, Any]]:
    """Tokens a second of the engine and of `generate`, at the same number of sources at once, in turns."""
    clients, requests, words = (16, 4, 200) if tiny else (CLIENTS, REQUESTS, 8000)
    symbols = [f"w{number}" for number in range(words)]
    model = make_model(folder, TINY if tiny else BASE, symbols)
    pairs = algorithmic.generate("reverse", clients * requests, 3, length=WORDS, symbols=symbols)
    texts = [one.source for one in pairs]
    budget = clients * max(len(text.split()) for text in texts)  # of `generate`, in tokens: as many slots as the engine
    lengths = [len(one) for one in model.source_encoding.encode(texts)]
    if (slots := plan_searches(lengths, budget)[0].slots) != clients:
        raise AssertionError(f"generate searches {slots} sources at the same time, the engine {clients}")
    tune_interpreter()  # as in the process of a server
    rows = []
    for beam in (1, 4):
        service = ModelService(
            [(model, ModelSpec("engine", "engine"))],
            Limits(queued=4 * clients),
            options=EngineOptions(max_batch=clients),
        )
        speeds: dict[str, list[float]] = {"engine": [], "generate": []}
        equal = 0.0
        for repeat in range(REPEATS + 1):  # the first warms up
            begin = time.perf_counter()
            served, tokens = asyncio.run(ask_all(service, texts, clients, beam))
            middle = time.perf_counter()
            offline = model.generate(texts, beam=beam, max_length=LENGTH, batch_tokens=budget)
            end = time.perf_counter()
            if repeat:
                speeds["engine"].append(tokens / (middle - begin))
                speeds["generate"].append(sum(len(one.tokens) for one in offline) / (end - middle))
            equal = sum(one == two.text for one, two in zip(served, offline, strict=True)) / len(texts)
        service.close()
        best = {name: round(sorted(found)[len(found) // 2], 1) for name, found in speeds.items()}
        row = {"setting": f"{clients} clients, beam {beam}", "name": "engine", "tokens_per_second": best["engine"]}
        row |= {"slots": clients, "generate_tokens_per_second": best["generate"], "equal_outputs": round(equal, 4)}
        rows.append({**row, "ratio": round(best["engine"] / best["generate"], 3)})
    print(table(rows), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for the terminal."""
    lines = [f"{'':24}{'engine':>12}{'generate':>12}{'share':>9}{'equal':>9}   tokens a second"]
    for row in rows:
        speeds = f"{row['tokens_per_second']:12,.0f}{row['generate_tokens_per_second']:12,.0f}"
        lines.append(f"{row['setting']:24}{speeds}{row['ratio']:9.1%}{row['equal_outputs']:9.1%}")
    return "\n".join(lines)
