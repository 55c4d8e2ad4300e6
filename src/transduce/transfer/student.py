"""Student of a trained run: recipe and training data of word- and sequence-level distillation (Kim & Rush 2016)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from transduce.data.prepare import prepare_data
from transduce.data.row_selection import chunks
from transduce.errors import InputError
from transduce.flow import Example
from transduce.inference import Model, load
from transduce.recipe import Recipe, override, parse
from transduce.run import Run
from transduce.storage import json_line, make_folder, open_text
from transduce.training.resolve import resolve

Level = Literal["word", "sequence", "both"]
LEVELS = ("word", "sequence", "both")
WINDOW = 2000  # sources that are generated for at once


def first_run(teacher: str) -> Run:
    """The run of a teacher; of an ensemble, its first member."""
    run = Run(Path(teacher.partition(",")[0]))
    members = run.members()
    return Run(members[0]) if members else run


def student_recipe(
    teacher: str, folder: Path, level: Level, data: str | None, overrides: Sequence[str], console: Console
) -> Recipe:
    """The recipe of the teacher (of an ensemble: of its first member), for a student that learns from the teacher.

    `word`: the loss is the divergence from the distributions of the teacher, mixed with cross-entropy. `sequence`: the
    targets are the outputs of the teacher, written to `folder/distilled`; the development set keeps its references.
    """
    if level not in LEVELS:
        raise InputError(f"unknown level {level!r}", where="--level", remedy=", ".join(LEVELS))
    origin = first_run(teacher)
    content = origin.recipe().model_dump(mode="json")
    content["init"], seed = {"tokens": str(origin.folder)}, content["training"]["seed"]
    if data is not None:
        content["data"] = override(content, [f"data.train={data}"])["data"]
    if content["data"]["dev_seed"] is None:  # the pairs that the teacher has not seen are held out again
        content["data"]["dev_seed"] = seed
    objective: dict[str, Any] = {"kind": "cross_entropy"}
    if level != "sequence":
        objective = {"kind": "distillation", "teacher": teacher}
    content["training"] |= {"objective": objective, "adapters": None, "freeze": []}
    recipe = parse(override(content, overrides), where="key=value")
    return recipe if level == "word" else _with_outputs(resolve(recipe), teacher, folder, console)


def _with_outputs(recipe: Recipe, teacher: str, folder: Path, console: Console) -> Recipe:
    """The recipe with the outputs of the teacher as training targets, written unless they are there already."""
    if recipe.data.format == "text":
        raise InputError("sequence-level distillation needs sources", where=teacher, remedy="use --level word")
    written = {name: folder / "distilled" / f"{name}.jsonl" for name in ("train", "dev")}
    if not all(path.is_file() for path in written.values()):
        make_folder(folder / "distilled")
        model = load(teacher, device=recipe.training.device)
        data = prepare_data(recipe, (model.source, model.target))
        rows = (int(row) for chunk in chunks(data.rows) for row in chunk)
        outputs = _outputs(model, (data.train.example(row) for row in rows), len(data.rows), console)
        _write(written["dev"], data.dev_examples())
        _write(written["train"], outputs)  # last: it is read when both are complete
    columns = _columns(recipe.data.train[0].source_columns)
    sets = {name: [{"path": str(path.absolute()), "columns": columns}] for name, path in written.items()}
    content = recipe.model_dump(mode="json")
    return parse({**content, "data": {**content["data"], **sets, "augmentation": None}})


def _outputs(model: Model, examples: Iterator[Example], total: int, console: Console) -> Iterator[Example]:
    """Each example with the output of the model as its target. Truncated and empty outputs are counted and left out."""
    dropped = done = 0
    while window := list(islice(examples, WINDOW)):
        predictions = model.generate([example.source for example in window])
        for example, one in zip(window, predictions, strict=True):
            if one.complete and one.text:
                yield Example(example.source, one.text)
            else:
                dropped += 1
        done += len(window)
        console.print(f"the teacher has generated {done:,} of {total:,} targets", highlight=False)
    if dropped:
        console.print(f"outputs left out because they are empty or were cut: {dropped:,}", highlight=False)


def _columns(sources: int) -> list[str]:
    names = ["source"] if sources == 1 else [f"source{number + 1}" for number in range(sources)]
    return [*names, "target"]


def _write(path: Path, examples: Iterable[Example]) -> None:
    with open_text(path) as stream:
        for example in examples:
            parts = example.source.split("\t")
            stream.write(json_line(dict(zip(_columns(len(parts)), [*parts, example.target], strict=True))) + "\n")
