"""Synthetic pairs from texts and the outputs of a model: back-translation, self-training, distillation.

Back-translation pairs the output of a model from target to source with the text that it read (Sennrich et al. 2016).
Self-training and sequence-level distillation pair a text with the output of a model from source to target; the student
of a run learns from such pairs of its own sources, or from distributions. Every window of texts becomes one file, so
that an interrupted command continues with the next window.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from transduce.data.filters import PairHashSet
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import in_windows, numbered_texts, read_windows
from transduce.data.readers.files import stored_lines
from transduce.data.row_selection import chunks
from transduce.errors import InputError
from transduce.inference import Model, Prediction, load
from transduce.parsing import read_json
from transduce.recipe import Recipe, override, parse
from transduce.run import Run
from transduce.storage import json_line, make_folder, open_text, replace_file, single_line
from transduce.training.resolve import resolve

Level = Literal["word", "sequence", "both"]
LEVELS = ("word", "sequence", "both")


@dataclass(frozen=True)
class PairOptions:
    """What becomes of generated pairs."""

    forward: bool = False  # True: the text is the source and the output the target
    tag: str = ""  # before every synthetic source (Caswell et al. 2019)
    max_ratio: float = 5.0  # of the lengths of both sides in characters
    mixed: str = ""  # a TSV of real pairs, which the output contains too
    upsample: int = 1  # copies of the real pairs
    filtered: bool = True  # False: only empty and truncated outputs are left out

    def pair(self, prediction: Prediction) -> tuple[str, str]:
        """Source and target."""
        text, output = prediction.source, prediction.text
        source, target = (text, output) if self.forward else (output, text)
        return f"{self.tag} {source}" if self.tag else source, target

    def reason(self, prediction: Prediction) -> str | None:
        """Why a pair is left out; None: it is not."""
        text, output = prediction.source.strip(), prediction.text.strip()
        if not text or not output:
            return "empty"
        if not prediction.complete or prediction.source_cut:
            return "cut at the maximum length"
        if not self.filtered:
            return None
        if text == output:
            return "copies"
        if "\t" in text or "\t" in output:
            return "with a tab"
        if max(len(text), len(output)) > self.max_ratio * min(len(text), len(output)):
            return "beyond the length ratio"
        return None


STUDENT = PairOptions(forward=True, filtered=False)


def write_synthetic_pairs(
    model: Model, text: str, output: Path, options: PairOptions, console: Console, **settings: Any
) -> Counter[str]:
    """Writes the pairs of a text file, and returns the number of pairs, kept and left out by reason."""
    if text == "-":
        raise InputError("monolingual text is a file", where="TEXT", remedy="write standard input to a file first")
    origin = {"text": _digest(text)}
    return write_pairs(model, read_windows(text), output, options, origin, console, **settings)


def write_pairs(
    model: Model,
    windows: Iterable[Sequence[str]],
    output: Path,
    options: PairOptions,
    origin: dict[str, Any],  # of the texts: other ones are not continued
    console: Console,
    **settings: Any,
) -> Counter[str]:
    """Writes pairs of texts and outputs, `source TAB target` or JSONL by the extension, and returns their counts.

    The windows of an interrupted command are in `OUTPUT.parts`, and are not generated again.
    """
    if model.sourceless:
        raise InputError("a language model does not translate", remedy="give a model that reads a source")
    folder = output.with_name(f"{output.name}.parts")
    _check_settings(folder, {**origin, "options": asdict(options), "settings": settings, "model": _model_digest(model)})
    parts, first_number = [], 0
    for number, texts in enumerate(windows):
        part = folder / f"{number:06}.jsonl"
        if not part.is_file():
            predictions = model.generate(texts, first_number=first_number, **settings)
            replace_file(part, "".join(f"{_part_line(one, options)}\n" for one in predictions))
        parts.append(part)
        first_number += len(texts)
        console.print(f"{first_number:,} lines", highlight=False)
    counts = _join(parts, output, options)
    shutil.rmtree(folder)
    return counts


def _part_line(prediction: Prediction, options: PairOptions) -> str:
    """A pair, or the reason why there is none."""
    reason = options.reason(prediction)
    return json_line({"pair": options.pair(prediction)} if reason is None else {"reason": reason})


def _join(parts: list[Path], output: Path, options: PairOptions) -> Counter[str]:
    """All parts after the real pairs; without pairs that occur before, unless pairs are not filtered."""
    counts, seen = Counter[str](), PairHashSet()
    with open_text(output) as stream:
        line = partial(_pair_line, json=output.suffix == ".jsonl")
        for _ in range(options.upsample if options.mixed else 0):
            for source, target in _real_pairs(options.mixed):
                stream.write(f"{line(source, target)}\n")
                counts["real pairs"] += 1
        for content in (json.loads(text) for part in parts for text in _read(part)):
            reason = content.get("reason")
            if reason is None and options.filtered and not seen.add(*content["pair"]):
                reason = "duplicates"
            counts[reason or "synthetic pairs"] += 1
            if reason is None:
                stream.write(f"{line(*content['pair'])}\n")
    return counts


def _real_pairs(path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_read(path), 1):
        source, _, target = line.partition("\t")
        if line.count("\t") != 1:
            raise InputError(
                f"{line.count(chr(9)) + 1} columns instead of 2",
                where=f"{path}:{number}",
                remedy="real pairs are `source TAB target`",
            )
        yield source, target


def _pair_line(source: str, target: str, *, json: bool) -> str:
    """A line of TSV, or an object of JSON with the columns of the source."""
    if not json:
        return f"{single_line(source)}\t{single_line(target)}"
    parts = source.split("\t")
    return json_line(dict(zip(_columns(len(parts)), [*parts, target], strict=True)))


def _columns(sources: int) -> list[str]:
    names = ["source"] if sources == 1 else [f"source{number + 1}" for number in range(sources)]
    return [*names, "target"]


def _read(path: str | Path) -> Iterator[str]:
    return numbered_texts(stored_lines(str(path)), str(path))


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    for _, line in stored_lines(path):
        digest.update(line + b"\n")
    return digest.hexdigest()


def _model_digest(model: Model) -> str:
    sums = [float(weight.double().sum()) for weight in model.network.state_dict().values()]
    return hashlib.sha256(f"{model!r} {sums}".encode()).hexdigest()


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """The parts of another model, text or setting are not continued."""
    path, content = folder / "settings.json", json_line(settings)
    if not path.is_file():
        make_folder(folder)
        replace_file(path, content)
    elif json_line(read_json(path, max_bytes=1 << 20)) != content:
        raise InputError(
            "these parts were made with another model, text or setting",
            where=str(folder),
            remedy="give the settings that the command began with, or remove the folder",
        )


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
        with open_text(written["dev"]) as stream:
            stream.writelines(f"{_pair_line(one.source, one.target or '', json=True)}\n" for one in data.dev_examples())
        rows = (int(row) for chunk in chunks(data.rows) for row in chunk)
        windows = in_windows(data.train.example(row).source for row in rows)
        origin = {"data": recipe.data.model_dump(mode="json")}
        # Last: both files are read when this one is complete.
        counts = write_pairs(model, windows, written["train"], STUDENT, origin, console)
        for what, count in counts.items():
            console.print(f"{what}: {count:,}", highlight=False)
    columns = _columns(recipe.data.train[0].source_columns)
    sets = {name: [{"path": str(path.absolute()), "columns": columns}] for name, path in written.items()}
    content = recipe.model_dump(mode="json")
    return parse({**content, "data": {**content["data"], **sets, "augmentation": None}})
