"""Bulk generation: `generate --backend`, over shards of the input in processes or on Ray, exactly once each.

    <output>.parts/  settings.json        options, state of the run and of the input files
                     000000-....input     lines of a shard, while a worker generates it
                     000000.output        outputs of a shard
                     000000.done.json     their number and hash; written last

The outputs are joined in order and the folder is removed; with `--by-shard` the output is a folder of shards with a
manifest instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from transduce.cli.options import STANDARD_INPUT, forget_models, keep_models
from transduce.data.readers.corpus import CorpusPart, numbered_texts, split_corpus
from transduce.data.readers.files import stored_lines
from transduce.data.readers.remote import file_state
from transduce.data.sharded_work import Backend, cluster, mark_done, records, run_tasks, unfinished, work_folder
from transduce.errors import InputError
from transduce.parsing import read_json
from transduce.recipe import Corpus, parse
from transduce.storage import open_atomic, open_text, replace_file

MANIFEST = "manifest.json"
OWN = ("backend", "workers", "shard_lines", "by_shard", "output", "file", "first_line")  # options that change no output
WEIGHTS = ("*.safetensors", "*.json", "*.yml", "*.yaml")


def generate_shards(options: Mapping[str, Any]) -> None:
    """Does what the command `generate` does, shard by shard. After an interruption the same command continues."""
    given = dict(options)
    files, output = _input_files(given["file"]), _output(given)
    folder = output.with_name(f"{output.name}.parts")
    if given["by_shard"] and (output / MANIFEST).is_file():
        raise InputError("this folder is complete", where=str(output), remedy="write to another folder")
    parts = [part for file in files for part in split_corpus(Corpus(path=file, format="lines"), given["shard_lines"])]
    work = ShardGeneration(str(folder.absolute()), _plain(given), tuple(parts))
    backend, gpus = cast("Backend", given["backend"]), 1 if str(given["device"]).startswith("cuda") else 0
    with work_folder(folder, _settings(given, files)):
        tasks = unfinished(folder, range(len(parts)))
        before = len(parts) - len(tasks)
        with cluster(backend, given["workers"]):
            run_tasks(
                work,
                tasks,
                workers=given["workers"],
                backend=backend,
                gpus=gpus,
                done=lambda count: print(f"shards: {before + count:,} of {len(parts):,}", file=sys.stderr),
            )
        forget_models()
        _publish(folder, output, len(parts), options)


def _input_files(name: str) -> list[str]:
    """The files that a name or a pattern stands for."""
    if name == STANDARD_INPUT:
        raise InputError("shards are of files", where="--backend", remedy="write standard input to a file first")
    corpora = parse({"data": {"train": name, "format": "text"}}).data.train
    if any(corpus.path is None for corpus in corpora):
        raise InputError("two files, where one was expected", where=name, remedy="give a name without a comma")
    return [str(corpus.absolute().path) for corpus in corpora]


def _output(given: Mapping[str, Any]) -> Path:
    if given["output"] is None:
        raise InputError("shards are joined in a file", where="--backend", remedy="give --output")
    if given["unconditional"] or given["wait_k"] or given["alignatt"] or given["stream_output"] or given["document"]:
        remedy = "leave out --unconditional, --document, --stream, --wait-k and --alignatt"
        raise InputError("shards have one output for each input line", where="--backend", remedy=remedy)
    return Path(given["output"])


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command for one shard. Workers have folders of their own, so files have absolute names."""
    kept = {name: value for name, value in given.items() if name not in OWN}
    for name, value in kept.items():
        if isinstance(value, Path):
            kept[name] = Path(",".join(str(_absolute(one)) for one in str(value).split(",")))
    return kept


def _absolute(path: str) -> Path:
    return Path(path).absolute() if Path(path).exists() else Path(path)  # the name of a model on the Hub is no file


def _settings(given: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    named = {name: str(value) for name, value in _plain(given).items()}
    runs = [one for name in ("run", "reverse", "language_model", "draft") for one in str(given[name] or "").split(",")]
    states = {run: _run_state(Path(run)) for run in runs if run}
    facts = {file: file_state(file) for file in files}
    return {"options": named, "runs": states, "files": facts, "shard_lines": given["shard_lines"]}


def _run_state(run: Path) -> dict[str, Any]:
    """The state of the files that hold a model."""
    files = [run] if run.is_file() else sorted(file for pattern in WEIGHTS for file in run.rglob(pattern))
    return {str(file): file_state(str(file)) for file in files}


@dataclass(frozen=True)
class ShardGeneration:
    """Generates the outputs of one shard."""

    folder: str
    options: dict[str, Any]
    parts: tuple[CorpusPart, ...]

    def __call__(self, number: int) -> None:
        from transduce.cli.generate import generate

        keep_models()
        part, folder = self.parts[number], Path(self.folder)
        path, outputs = str(part.corpus.path), folder / f"{number:06}.output"
        # A worker whose command was killed may still be at the same shard: it reads a file of its own.
        inputs = folder / f"{number:06}-{uuid4().hex}.input"
        lines = 0
        with open_text(inputs) as stream:
            for text in numbered_texts(part.rows(stored_lines(path)), path):
                stream.write(f"{text}\n")
                lines += 1
        if lines:
            try:
                generate(**self.options, file=str(inputs), output=outputs, first_line=part.first)
            except InputError as error:
                where = error.where.replace(str(inputs), path)
                raise InputError(error.problem, where=where, remedy=error.remedy) from None
        else:
            replace_file(outputs, b"")
        inputs.unlink()
        digest = hashlib.sha256(outputs.read_bytes()).hexdigest()
        mark_done(folder, number, {"input": path, "first_line": part.first, "lines": lines, "sha256": digest})


def _publish(folder: Path, output: Path, shards: int, options: Mapping[str, Any]) -> None:
    """Joins the outputs, or gives them their names; then removes what is not needed any more."""
    found = records(folder, range(shards))
    if not options["by_shard"]:
        with open_atomic(output) as stream:
            for number in range(shards):
                with open(folder / f"{number:06}.output", "rb") as part:
                    shutil.copyfileobj(part, stream)
        shutil.rmtree(folder)
        return
    ending = "jsonl" if options["json"] else "tsv" if options["pairs"] else "txt"
    entries = [{"file": f"part-{number:06}.{ending}", **record} for number, record in enumerate(found)]
    output.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(entries):
        replace_file(output / entry["file"], (folder / f"{number:06}.output").read_bytes())
    settings = read_json(folder / "settings.json", max_bytes=1 << 28)
    content = {"lines": sum(one["lines"] for one in found), "shards": entries, "settings": settings}
    replace_file(output / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(folder)
