"""Tensor shapes of a model: every tensor by name, shape letters, sizes and meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from transduce.autoconfig import recipe_for
from transduce.errors import InputError
from transduce.explain.shape_recorder import (
    ShapeRecorder,
    ShapeRow,
    ShapeTable,
    Sizes,
    choose_sizes,
    describe_module,
    with_attention_sizes,
)
from transduce.flow import BOS, EOS, SPECIALS, Batch, Padded, Step
from transduce.model import DecoderOnly, EmbeddingModel, Transducer
from transduce.recipe import ModelRecipe, Recipe
from transduce.recipe.build import build_model, complete_recipe, count_parameters
from transduce.recipe.registry import check_user_code
from transduce.run import Run
from transduce.storage import replace_file

FRAMES = 8  # frames of a sequence source for each position of a text source: a front end may merge several


def explain_shapes(recipe: Recipe, vocabularies: tuple[int, int] | None = None) -> list[ShapeRow]:
    """Every tensor of one teacher-forced batch and of one generation step, with a random batch and random weights."""
    recipe = complete_recipe(recipe)
    sizes = choose_sizes(recipe.model, vocabularies)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build_model(recipe.model, *(vocabularies or (sizes["V"], sizes["V"]))).eval()
        batch = _make_batch(recipe.model, sizes, vocabularies)
        if {"front", "parts"} & set(recipe.model.encoder or {}):
            sizes["S"] = model.encoder(batch).values.size(1)  # type: ignore[operator]
        if isinstance(model, EmbeddingModel):
            rows = _embedding(model, batch, sizes)
        else:
            rows = _training(model, batch, sizes) + _generation(model, batch, sizes)
    parts = [*model.named_children(), ("model", model)]
    for name, part in parts:
        number, note = count_parameters(part), ": in total, shared parameters counted once" if part is model else ""
        rows.append(ShapeRow("parameters", name, str(number), (number,), describe_module(part) + note))
    return rows


def shapes_of(source: str, overrides: Sequence[str] = (), *, trust_user_code: bool = False) -> list[ShapeRow]:
    """The same for a recipe file, a file of pairs, or a run directory with its own vocabularies.

    A recipe may come from anywhere: code that it names must be allowed.
    """
    if not Path(source).is_dir():
        recipe = recipe_for(source, overrides)
        check_user_code(recipe, source, trusted=trust_user_code, overrides=overrides)
        return explain_shapes(recipe)
    run = Run(Path(source))
    recipe = run.recipe()
    check_user_code(recipe, source, trusted=trust_user_code)
    if overrides:
        raise InputError(
            "the settings of a run cannot be changed",
            where=source,
            remedy=f"give {run.recipe_file} to change {overrides[0]}",
        )
    tokenizers = run.tokenizers()
    return explain_shapes(recipe, (tokenizers[0].size, tokenizers[1].size))


def _make_batch(model: ModelRecipe, sizes: Sizes, vocabularies: tuple[int, int] | None) -> Batch:
    source_size, target_size = vocabularies or (sizes["V"], sizes["V"])
    target = _ids(sizes["B"], sizes["T"] + 1, target_size)
    target[:, 0], target[:, -1] = BOS, EOS
    spec = model.encoder or {}
    sources = {name: _source(part, sizes, source_size) for name, part in spec.get("parts", {"": spec}).items()}
    extra = {name: source for name, source in sources.items() if name}
    return Batch(next(iter(sources.values())), Padded(target, torch.ones_like(target, dtype=torch.bool)), extra)


def _ids(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(min(len(SPECIALS), vocabulary - 1), vocabulary, (rows, length))


def _source(spec: Mapping[str, Any], sizes: Sizes, vocabulary: int) -> Padded:
    """Token ids; with a front end, the rows that it reads: frames, or all rows of an array of fixed shape."""
    if "front" not in spec:
        values = _ids(sizes["B"], sizes["S"], vocabulary)
        mask = torch.ones_like(values, dtype=torch.bool)
        mask[1:, -1] = False  # all rows but the first have one padded position
        return Padded(values.masked_fill(~mask, 0), mask)
    shape = tuple(spec["front"]["shape"])
    length, row = (shape[0], shape[1:]) if len(shape) > 1 else (FRAMES * sizes["S"], shape)
    values = torch.randn(sizes["B"], length, *row)
    return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))


def _training(model: Transducer, batch: Batch, sizes: Sizes) -> list[ShapeRow]:
    recorder = ShapeRecorder(model)
    with recorder:
        step: Step = model(batch, with_attention=True)
    now = {name: size for name, size in sizes.items() if name not in ("N", "R")}
    now["U"] = sizes["T"] + (sizes["S"] if isinstance(model, DecoderOnly) else 0)
    table = ShapeTable("training", with_attention_sizes(now, step))
    assert batch.source is not None
    for name, source in (batch.extra or {"source": batch.source}).items():
        meaning = "rows of the front end" if source.values.is_floating_point() else "ids x1 .. xm </s>"
        table.add("batch", f"{name}.values", "B S", source.values, meaning)
        table.add("batch", f"{name}.mask", "B S", source.mask, "True: not padding")
    table.add("batch", "decoder_inputs.values", "B T", batch.decoder_inputs.values, "the target without its last token")
    table.add("batch", "labels.values", "B T", batch.labels.values, "the target without its first token")
    table.add("batch", "labels.mask", "B T", batch.labels.mask, "True: not padding")
    if isinstance(encoder := getattr(model, "encoder", None), nn.Module):
        memory = encoder(batch, with_attention=True)
        table.add("memory", "values", "B S D", memory.values, "encoder output")
        table.add("memory", "mask", "B S", memory.mask, "True: not padding")
        table.add("memory", "summary", "B D", memory.summary, "fixed-length summary vector")
        table.add("memory", "attention", "B L H S S", memory.attention, "self-attention weights of the encoder")
    table.add_step(recorder, step)
    return table.rows_with_key()


def _embedding(model: EmbeddingModel, batch: Batch, sizes: Sizes) -> list[ShapeRow]:
    """One batch; an embedding model has no generation step. The target takes the path of the source, or its own."""
    assert batch.source is not None
    recorder = ShapeRecorder(model)
    with recorder:
        model.embed(batch.source)
    vectors = model(batch)
    now = {name: size for name, size in sizes.items() if name not in ("N", "R", "U")}
    table = ShapeTable("training", {**now, "U": sizes["T"], "D'": vectors.source.size(-1)})
    table.add("batch", "source.values", "B S", batch.source.values, "ids x1 .. xm </s>")
    table.add("batch", "source.mask", "B S", batch.source.mask, "True: not padding")
    table.add("batch", "labels.values", "B T", batch.labels.values, "the target without its <s>, encoded like a source")
    memory = model.encoder(batch)
    table.add("memory", "values", "B S D", memory.values, "encoder output, the input of the head")
    table.add("memory", "mask", "B S", memory.mask, "True: not padding")
    table.add_modules(recorder)
    table.add("vectors", "source", "B D", vectors.source, "one vector per text")
    table.add("vectors", "target", "B D", vectors.target, "the vector of the paired text")
    return table.rows_with_key()


def _generation(model: Transducer, batch: Batch, sizes: Sizes) -> list[ShapeRow]:
    state = model.start(batch).repeat(sizes["N"])
    tokens = torch.full((sizes["R"], sizes["U"]), BOS)
    state = model.advance(tokens[:, 1:], state).state
    recorder = ShapeRecorder(model)
    with recorder:
        step = model.advance(tokens[:, :1], state, with_attention=True)
    prompt = sizes["S"] if isinstance(model, DecoderOnly) else 0
    now = {**sizes, "T": 1, "U": sizes["U"] + prompt}
    table = ShapeTable("generation", with_attention_sizes(now, step))
    table.add("batch", "tokens", "R T", tokens[:, :1], "the last token of every hypothesis")
    table.add_step(recorder, step)
    return table.rows_with_key()


def show_rows(rows: Sequence[ShapeRow], console: Console) -> None:
    """Prints one table per section; modules are indented by their path."""
    for section in dict.fromkeys(row.section for row in rows):
        lettered = section != "parameters" and not section.endswith("letters")
        table = Table(title=section, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in ("name", "letters", "sizes", "meaning") if lettered else ("name", "sizes", "meaning"):
            table.add_column(column, style="cyan" if column == "letters" else None, overflow="fold")
        before: list[str] = []
        for row in (row for row in rows if row.section == section):
            name, before = _indent(row.name, before) if section.endswith("modules") else (row.name, before)
            sizes = " ".join(f"{size:,}" for size in row.sizes)
            table.add_row(escape(name), *([row.letters] if lettered else []), sizes, escape(row.meaning))
        console.print(table, "", highlight=False)


def _indent(name: str, before: list[str]) -> tuple[str, list[str]]:
    """A name without the prefix it shares with the previous name, indented by the length of that prefix."""
    path, colon, field = name.partition(":")
    parts = path.split(".")
    differing = (i for i, (new, old) in enumerate(zip(parts, before, strict=False)) if new != old)
    same = next(differing, min(len(parts), len(before)))
    return "  " * same + ".".join(parts[same:]) + colon + field, parts


def save_rows(rows: Sequence[ShapeRow], path: Path) -> None:
    replace_file(path, (json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n").encode())
