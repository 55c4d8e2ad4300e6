"""A trained run and its lines: places of a search filled again, the same in batches, and transformers in batches.

Natural lengths on one GPU, from text to text: `python -m benchmarks.natural RUN SOURCE REFERENCE --device cuda`. All
have so many places, or lines a batch, sorted by length, and share our tokenizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import OURS, Contestant, Measured, measure
from transduce.decoding.continuous_batching import plan_searches
from transduce.flow import EOS
from transduce.inference import Model, load
from transduce.interop.huggingface.weights import export_rows
from transduce.recipe import GenerationRecipe

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
Lines = list[list[int]]  # ids of each, in order


def run(
    folder: Path, texts: list[str], beam: int, places: int, repeats: int, device: torch.device, clock: str = "wall"
) -> tuple[list[Measured], dict[str, list[str]]]:
    """What was measured, and the lines that each contestant wrote, by its name and precision."""
    rows: list[Measured] = []
    written: dict[str, list[str]] = {}
    for precision, kind in PRECISIONS.items():
        model = load(folder, device=str(device), precision=precision)  # type: ignore[arg-type]
        settings = model.settings(strategy="beam" if beam > 1 else "greedy", beam=beam)
        sources = model.source_encoding.encode(texts)
        ways: dict[str, Callable[[], Lines]] = {
            OURS: partial(refilled, model, sources, settings, places),
            "ours, batches": partial(batched, model, sources, settings, places),
            "transformers": partial(theirs, peer(folder, device, kind), model, sources, settings, places),
        }
        said: dict[str, Lines] = {}

        def timed(name: str, way: Callable[[], Lines], said: dict[str, Lines] = said) -> int:
            said[name] = way()
            return sum(map(len, said[name]))

        found = [Contestant(name, partial(timed, name, way)) for name, way in ways.items()]
        setting = f"natural {len(texts)} lines beam {beam} {precision}"
        rows += measure(setting, found, device, repeats, clock)
        for name, lines in said.items():
            same = sum(a == b for a, b in zip(lines, said[OURS], strict=True)) / len(lines)
            print(f"beam {beam} {precision}: {same:.1%} of the lines of {name} are ours refilled", flush=True)
            ids = [line[:-1] if line[-1:] == [EOS] else line for line in lines]
            written[f"{precision} {name}"] = [model.target.decode(one) for one in ids]
    return rows, written


def refilled(model: Model, sources: list[Any], settings: GenerationRecipe, places: int) -> Lines:
    searcher, results = model.searcher, dict[int, list[int]]()
    lengths = [len(source) for source in sources]
    for one in plan_searches(lengths, places * max(lengths), places):
        wanted = [searcher.wanted(rows, sources, None, settings, range(len(sources))) for rows in one.groups]
        rows = [row for group in one.groups for row in group]
        found = searcher.refilled(wanted, settings, one.slots)
        results.update({row: list(line[0].ids) for row, line in zip(rows, found, strict=True)})
    return [results[row] for row in range(len(sources))]


def in_batches(sources: list[Any], size: int) -> list[list[int]]:
    """Rows of like length together, the longest first."""
    order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def batched(model: Model, sources: list[Any], settings: GenerationRecipe, places: int) -> Lines:
    results: dict[int, list[int]] = {}
    for rows in in_batches(sources, places):
        found = model.searcher.sources([sources[row] for row in rows], None, settings, rows)
        results.update({row: list(line[0].ids) for row, line in zip(rows, found, strict=True)})
    return [results[row] for row in range(len(sources))]


def peer(folder: Path, device: torch.device, kind: torch.dtype) -> Any:
    """What `transduce export --to huggingface` made of the run, opened by transformers."""
    from transformers import AutoModelForSeq2SeqLM

    from transduce.interop.export import export

    with tempfile.TemporaryDirectory() as place:
        export(folder, Path(place) / "model", "huggingface")
        found = AutoModelForSeq2SeqLM.from_pretrained(Path(place) / "model", dtype=kind)
    return found.to(device).eval()


@torch.inference_mode()
def theirs(other: Any, model: Model, sources: list[Any], settings: GenerationRecipe, places: int) -> Lines:
    order = export_rows(model.source, model.network.state_dict())
    numbers = torch.tensor(order.ids, device=model.device)
    back = {number: ours for ours, number in enumerate(order.ids)}
    results: dict[int, list[int]] = {}
    for rows in in_batches(sources, places):
        asked = model.searcher.wanted(rows, sources, None, settings, range(len(sources)))
        batch = asked.batch.to(model.device)
        assert batch.source is not None
        ids = other.generate(
            input_ids=numbers[batch.source.values],
            attention_mask=batch.source.mask.long(),
            num_beams=settings.beam if settings.strategy == "beam" else 1,
            do_sample=False,
            early_stopping=False,
            length_penalty=settings.length_penalty,
            max_new_tokens=int(asked.longest.max()),
            max_length=None,
        )
        for row, line in zip(rows, ids[:, 1:].tolist(), strict=True):
            ours = [back[number] for number in line]
            results[row] = ours[: ours.index(EOS) + 1] if EOS in ours else ours
    return [results[row] for row in range(len(sources))]
