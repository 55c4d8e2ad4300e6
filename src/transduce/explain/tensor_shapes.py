"""Shapes: a recipe in, every tensor of its model out, by name, shape in letters, sizes and meaning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from transduce.autoconfig import recipe_for
from transduce.build import build_model, complete_recipe, count_parameters
from transduce.errors import InputError
from transduce.explain.shape_recorder import Recorder, Row, Scribe, Sizes, choose_sizes, say, with_attention
from transduce.flow import BOS, EOS, SPECIALS, Batch, Padded, Step
from transduce.model import DecoderOnly, EmbeddingModel, Transducer
from transduce.recipe import Recipe
from transduce.recipe.registry import user_classes
from transduce.run import Run
from transduce.storage import replace_file


def explain_shapes(recipe: Recipe, vocabularies: tuple[int, int] | None = None) -> list[Row]:
    """Every tensor of one teacher-forced batch and of one generation step, made up; nothing is read or trained."""
    recipe = complete_recipe(recipe)
    sizes = choose_sizes(recipe.model, vocabularies)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build_model(recipe.model, *(vocabularies or (sizes["V"], sizes["V"]))).eval()
        batch = _make_batch(model, sizes, vocabularies)
        if isinstance(model, EmbeddingModel):
            rows = _embedding(model, batch, sizes)
        else:
            rows = _training(model, batch, sizes) + _generation(model, batch, sizes)
    parts = [*model.named_children(), ("model", model)]
    for name, part in parts:
        number, all_of_it = count_parameters(part), ": all of it, shared numbers counted once" if part is model else ""
        rows.append(Row("parameters", name, str(number), (number,), say(part) + all_of_it))
    return rows


def shapes_of(source: str, overrides: Sequence[str] = ()) -> list[Row]:
    """The same for a recipe file, a file of pairs or a run directory, whose own vocabularies are taken."""
    if not Path(source).is_dir():
        return explain_shapes(recipe_for(source, overrides))
    run = Run(Path(source))
    recipe = run.recipe()
    if own := user_classes(recipe):  # a run may come from anywhere: its code is not run
        raise InputError(f"this run needs code of its own: {', '.join(own)}", where=source, remedy="give its recipe")
    if overrides:
        raise InputError("a run is as it is", where=source, remedy=f"give {run.recipe_file} to change {overrides[0]}")
    tokenizers = run.tokenizers()
    return explain_shapes(recipe, (tokenizers[0].size, tokenizers[1].size))


def _make_batch(model: Transducer, sizes: Sizes, vocabularies: tuple[int, int] | None) -> Batch:
    def ids(length: int, vocabulary: int) -> Tensor:
        return torch.randint(min(len(SPECIALS), vocabulary - 1), vocabulary, (sizes["B"], length))

    source_size, target_size = vocabularies or (sizes["V"], sizes["V"])
    source, target = ids(sizes["S"], source_size), ids(sizes["T"] + 1, target_size)
    target[:, 0], target[:, -1] = BOS, EOS
    mask = torch.ones_like(source, dtype=torch.bool)
    mask[1:, -1] = False  # all rows but the first are padded by one
    return Batch(Padded(source.masked_fill(~mask, 0), mask), Padded(target, torch.ones_like(target, dtype=torch.bool)))


def _training(model: Transducer, batch: Batch, sizes: Sizes) -> list[Row]:
    recorder = Recorder(model)
    with recorder:
        step: Step = model(batch, with_attention=True)
    now = {name: size for name, size in sizes.items() if name not in ("N", "R")}
    now["U"] = sizes["T"] + (sizes["S"] if isinstance(model, DecoderOnly) else 0)
    scribe = Scribe("training", with_attention(now, step))
    assert batch.source is not None
    scribe.add("batch", "source.values", "B S", batch.source.values, "ids x1 .. xm </s>")
    scribe.add("batch", "source.mask", "B S", batch.source.mask, "True: a real token")
    scribe.add(
        "batch", "inputs.values", "B T", batch.decoder_inputs.values, "the target without its last: what is read"
    )
    scribe.add("batch", "gold.values", "B T", batch.labels.values, "the target without its first: what must be said")
    scribe.add("batch", "gold.mask", "B T", batch.labels.mask, "True: a real token")
    if isinstance(encoder := getattr(model, "encoder", None), nn.Module):
        memory = encoder(batch, with_attention=True)
        scribe.add("memory", "values", "B S D", memory.values, "what attention reads")
        scribe.add("memory", "mask", "B S", memory.mask, "True: a real row")
        scribe.add("memory", "summary", "B D", memory.summary, "the one vector of the bottleneck")
        scribe.add("memory", "attention", "B L H S S", memory.attention, "the encoder's own attention")
    scribe.tell(recorder, step)
    return scribe.finish()


def _embedding(model: EmbeddingModel, batch: Batch, sizes: Sizes) -> list[Row]:
    """Vectors are not spoken: there is a batch and no generation step. Both sides take the way told of the source."""
    assert batch.source is not None
    recorder = Recorder(model)
    with recorder:
        model.embed(batch.source)
    found = model(batch)
    now = {name: size for name, size in sizes.items() if name not in ("N", "R", "U")}
    scribe = Scribe("training", {**now, "U": sizes["T"], "D'": found.source.size(-1)})
    scribe.add("batch", "source.values", "B S", batch.source.values, "ids x1 .. xm </s>")
    scribe.add("batch", "source.mask", "B S", batch.source.mask, "True: a real token")
    scribe.add("batch", "gold.values", "B T", batch.labels.values, "the target without its <s>: read as a source is")
    memory = model.encoder(batch)
    scribe.add("memory", "values", "B S D", memory.values, "what the head reads")
    scribe.add("memory", "mask", "B S", memory.mask, "True: a real row")
    scribe.tell_modules(recorder)
    scribe.add("vectors", "source", "B D", found.source, "one vector a text")
    scribe.add("vectors", "target", "B D", found.target, "its partner, which training brings close")
    return scribe.finish()


def _generation(model: Transducer, batch: Batch, sizes: Sizes) -> list[Row]:
    state = model.start(batch).repeat(sizes["N"])
    tokens = torch.full((sizes["R"], sizes["U"]), BOS)
    state = model.advance(tokens[:, 1:], state).state
    recorder = Recorder(model)
    with recorder:
        step = model.advance(tokens[:, :1], state, with_attention=True)
    prompt = sizes["S"] if isinstance(model, DecoderOnly) else 0
    now = {**sizes, "T": 1, "U": sizes["U"] + prompt}
    scribe = Scribe("generation", with_attention(now, step))
    scribe.add("batch", "tokens", "R T", tokens[:, :1], "the token chosen last, of every hypothesis")
    scribe.tell(recorder, step)
    return scribe.finish()


def show_rows(rows: Sequence[Row], console: Console) -> None:
    """One table a section; modules are indented by their path."""
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
    """What is new in a name after the one before it, set in by what is not."""
    path, colon, place = name.partition(":")
    parts = path.split(".")
    differing = (i for i, (new, old) in enumerate(zip(parts, before, strict=False)) if new != old)
    same = next(differing, min(len(parts), len(before)))
    return "  " * same + ".".join(parts[same:]) + colon + place, parts


def save_rows(rows: Sequence[Row], path: Path) -> None:
    replace_file(path, (json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n").encode())
