"""Continuous batching against static batches, ours and those of transformers, with a trained model on a GPU.

`python -m benchmarks.natural_lengths RUN SOURCE REFERENCE --device cuda`, from text to text. All have the same number
of slots or rows of a batch, sort by length and share our tokenizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import OURS, Implementation, Measurement, measure
from transduce.decoding.continuous_batching import plan_searches
from transduce.flow import EOS
from transduce.inference import Model, load
from transduce.interop.huggingface.weights import export_rows
from transduce.recipe import GenerationRecipe

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
Lines = list[list[int]]  # token ids of each line, in order


def run(
    folder: Path, texts: list[str], beam: int, slots: int, repeats: int, device: torch.device, clock: str = "wall"
) -> tuple[list[Measurement], dict[str, list[str]]]:
    """Measurements, and the output of each implementation by precision and name."""
    rows: list[Measurement] = []
    written: dict[str, list[str]] = {}
    for precision, kind in PRECISIONS.items():
        model = load(folder, device=str(device), precision=precision)  # type: ignore[arg-type]
        settings = model.settings(strategy="beam" if beam > 1 else "greedy", beam=beam)
        sources = model.source_encoding.encode(texts)
        methods: dict[str, Callable[[], Lines]] = {
            OURS: partial(continuous, model, sources, settings, slots),
            "ours, batches": partial(static_batches, model, sources, settings, slots),
            "transformers": partial(theirs, peer(folder, device, kind), model, sources, settings, slots),
        }
        outputs: dict[str, Lines] = {}

        def timed(name: str, method: Callable[[], Lines], outputs: dict[str, Lines] = outputs) -> int:
            outputs[name] = method()
            return sum(map(len, outputs[name]))

        found = [Implementation(name, partial(timed, name, method)) for name, method in methods.items()]
        setting = f"natural {len(texts)} lines beam {beam} {precision}"
        rows += measure(setting, found, device, repeats, clock)
        for name, lines in outputs.items():
            same = sum(a == b for a, b in zip(lines, outputs[OURS], strict=True)) / len(lines)
            print(f"beam {beam} {precision}: {same:.1%} of the lines of {name} equal ours", flush=True)
            ids = [line[:-1] if line[-1:] == [EOS] else line for line in lines]
            written[f"{precision} {name}"] = [model.target.decode(one) for one in ids]
    return rows, written


def continuous(model: Model, sources: list[Any], settings: GenerationRecipe, slots: int) -> Lines:
    searcher, results = model.searcher, dict[int, list[int]]()
    lengths = [len(source) for source in sources]
    for one in plan_searches(lengths, slots * max(lengths), slots):
        wanted = [searcher.request(rows, sources, None, settings, range(len(sources))) for rows in one.groups]
        rows = [row for group in one.groups for row in group]
        found = searcher.search_continuously(wanted, settings, one.slots)
        results.update({row: list(line[0].ids) for row, line in zip(rows, found, strict=True)})
    return [results[row] for row in range(len(sources))]


def in_batches(sources: list[Any], size: int) -> list[list[int]]:
    """Rows sorted by length, the longest first."""
    order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def static_batches(model: Model, sources: list[Any], settings: GenerationRecipe, slots: int) -> Lines:
    results: dict[int, list[int]] = {}
    for rows in in_batches(sources, slots):
        found = model.searcher.search_sources([sources[row] for row in rows], None, settings, rows)
        results.update({row: list(line[0].ids) for row, line in zip(rows, found, strict=True)})
    return [results[row] for row in range(len(sources))]


def peer(folder: Path, device: torch.device, kind: torch.dtype) -> Any:
    """The run exported by `transduce export --to huggingface` and loaded by transformers."""
    from transformers import AutoModelForSeq2SeqLM

    from transduce.interop.export import export

    with tempfile.TemporaryDirectory() as temporary:
        export(folder, Path(temporary) / "model", "huggingface")
        found = AutoModelForSeq2SeqLM.from_pretrained(Path(temporary) / "model", dtype=kind)
    return found.to(device).eval()


@torch.inference_mode()
def theirs(other: Any, model: Model, sources: list[Any], settings: GenerationRecipe, slots: int) -> Lines:
    order = export_rows(model.source, model.network.state_dict())
    numbers = torch.tensor(order.ids, device=model.device)
    back = {number: ours for ours, number in enumerate(order.ids)}
    results: dict[int, list[int]] = {}
    for rows in in_batches(sources, slots):
        search_input = model.searcher.request(rows, sources, None, settings, range(len(sources)))
        batch = search_input.batch.to(model.device)
        assert batch.source is not None
        ids = other.generate(
            input_ids=numbers[batch.source.values],
            attention_mask=batch.source.mask.long(),
            num_beams=settings.beam if settings.strategy == "beam" else 1,
            do_sample=False,
            early_stopping=False,
            length_penalty=settings.length_penalty,
            max_new_tokens=int(search_input.max_lengths.max()),
            max_length=None,
        )
        for row, line in zip(rows, ids[:, 1:].tolist(), strict=True):
            ours = [back[number] for number in line]
            results[row] = ours[: ours.index(EOS) + 1] if EOS in ours else ours
    return [results[row] for row in range(len(sources))]
