"""A run and lines in, an output a line out: generate; and shortlist, which makes that faster."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.options import (
    Beam,
    Device,
    Lines,
    Output,
    OwnParts,
    RunArgument,
    Settings,
    open_run,
    read_settings,
    written_to,
)
from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.inference import Model, Prediction


def read_sources(model: Model, file: str) -> Iterator[str]:
    """The lines of a file, or of standard input. What a line of a file names is found from the folder of that file."""
    from transduce.data.readers.corpus import read_lines, resolve_paths

    reads = next((corpus.reads for corpus in model.recipe.data.train), ())
    folder = Path() if file == "-" else Path(file).parent
    return (resolve_paths(line, folder, reads) for line in read_lines(file))


def generate(
    run: RunArgument,
    file: Lines = "-",
    output: Output = None,
    beam: Beam = None,
    nbest: Annotated[int | None, typer.Option(help="How many hypotheses a line --json gives.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw instead of searching.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line: text, tokens, scores, n-best.")] = False,
    align: Annotated[bool, typer.Option("--align", help="Word links instead of text: 0-0 1-2.")] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="`source TAB output`: lines to train a student on.")] = False,
    prefix: Annotated[str | None, typer.Option(help="Text that every output must begin with.")] = None,
    from_nothing: Annotated[
        int, typer.Option(min=0, help="A language model writes so many texts from <s> on; no input is read.")
    ] = 0,
    settings: Settings = None,
    precision: Annotated[
        str, typer.Option(help="On a CPU: auto and fp32 give what was trained; bf16 and int8 round the weights.")
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="So many batches at a time, on one core each.")] = 1,
    draft: Annotated[
        Path | None, typer.Option(help="A quick run with the same tokens: it proposes, greedy search is as it was.")
    ] = None,
    shortlist: Annotated[
        Path | None, typer.Option(help="Only tokens that a source may need: a file of `transduce shortlist`.")
    ] = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Write an output for every line of input: one line in, one line out, in order.

    Examples:

        echo "3. März 2026" | transduce generate runs/demo

        transduce generate runs/demo input.txt --output out.txt --beam 5

        transduce generate runs/demo input.txt --json --nbest 3 --set length_penalty=0.6

        transduce generate runs/large input.txt --precision int8 --workers 2

        transduce generate runs/large input.txt --pairs --output taught.tsv

        transduce generate runs/large input.txt --set strategy=greedy --draft runs/small

        transduce generate runs/large input.txt --precision int8 --shortlist few.safetensors

    Where sources are files, a line names one; a file of that kind, or a folder of them, may stand in place of lines.

        transduce generate runs/captions photo.jpg

        transduce generate runs/captions photos/ --pairs

    A language model takes each line as the beginning of a text, and writes beginning and continuation; an empty line
    begins from nothing. Line feeds inside an output become spaces, but for --json and --from-nothing.

        echo "To be" | transduce generate runs/book --set temperature=0.8

        transduce generate runs/book --from-nothing 3
    """
    from transduce.inference import in_chunks
    from transduce.inference.shortlist import Shortlist

    model = open_run(run, device, own_parts, precision)
    chosen = read_settings(settings, beam=beam, nbest=nbest, strategy="sample" if sample else None)
    model.settings(**chosen)  # a wrong name or value is told before anything is read
    quick = None if draft is None else open_run(draft, device, own_parts, precision)
    few = None if shortlist is None else Shortlist.load(shortlist)
    if pairs and (json or align or from_nothing or model.sourceless):
        raise InputError("--pairs writes sources and outputs, and nothing else", remedy="leave out one of the two")
    inputs = max((corpus.inputs for corpus in model.recipe.data.train), default=1)
    form = "json" if json else "links" if align else "pairs" if pairs else "whole" if from_nothing else "text"
    lines = _lines(model, file, from_nothing)
    outputs = Outputs(form, file, inputs)
    with written_to(output, "" if from_nothing else file) as stream:
        for chunk in in_chunks(lines):
            begun = None if prefix is None else [prefix] * len(chunk)
            found = model.generate(chunk, prefixes=begun, workers=workers, draft=quick, shortlist=few, **chosen)
            if json or align:
                model.reread(found)  # all at once, where asking one by one would be slow
            stream.writelines(outputs.line(one) + "\n" for one in found)
            stream.flush()
    outputs.tell()


def _lines(model: Model, file: str, from_nothing: int) -> Iterator[str]:
    from transduce.modalities.source_encoding import TextSourceEncoding

    if from_nothing and not model.sourceless:
        raise InputError("this model needs a source", where="--from-nothing", remedy="give lines to read")
    if from_nothing:
        return iter([""] * from_nothing)
    named = model.reading.found(file)  # the file is a source itself, or a folder of them
    if not named and not isinstance(model.reading, TextSourceEncoding) and Path(file).is_dir():
        raise InputError(
            "nothing in this folder is a source of this model",
            where=file,
            remedy="give a folder of files like those that it was trained on, or a file of lines",
        )
    return iter(named) if named else read_sources(model, file)


@dataclass
class Outputs:
    """What is written of each prediction, and what of them is told at the end."""

    form: str  # text, whole (line feeds and all), json, links or pairs
    file: str
    inputs: int  # columns of a source
    number: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def line(self, one: Prediction) -> str:
        from transduce.cli.display import as_json, as_line
        from transduce.explain.alignment import pharaoh

        self.number += 1
        self.counts["empty lines"] += not one.tokens
        self.counts["sources cut to `max_source_length`"] += one.source_cut
        self.counts["outputs cut at the greatest length"] += not one.complete
        if self.form == "json":
            return as_json(one)
        if self.form == "links":
            self.counts["lines without attention, so without links"] += bool(one.tokens) and one.attention is None
            return pharaoh(one.alignment)
        if self.form == "pairs":
            return pair_line(one.source, as_line(one.text), self.inputs, f"{self.file}:{self.number}")
        return one.text if self.form == "whole" else as_line(one.text)

    def tell(self) -> None:
        for what, count in self.counts.items():
            if count:
                print(f"{what}: {count:,}", file=sys.stderr)


def shortlist(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="Where the list is written: a safetensors file.")],
    likeliest: Annotated[int, typer.Option(min=1, help="Target tokens for each source token.")] = 100,
    frequent: Annotated[int, typer.Option(min=0, help="Target tokens that every line may use.")] = 100,
    lines: Annotated[int, typer.Option(min=1, help="Training pairs that are read at most.")] = 100_000,
    own_parts: OwnParts = False,
) -> None:
    """Write which target tokens each source token may need, for a faster `generate --shortlist FILE`.

    Word translation probabilities are learned from the training pairs of the run (IBM model 1).

    Example:

        transduce shortlist runs/large few.safetensors

        transduce generate runs/large input.txt --shortlist few.safetensors
    """
    from transduce.data.prepare import train_store
    from transduce.inference.shortlist import OutputRows, make_shortlist

    model = open_run(run, "cpu", own_parts)
    OutputRows(model.network)  # one that cannot use a list is told so before it is made
    if not model.recipe.data.train:
        raise InputError("this run names no training pairs", where=str(run), remedy="give a run that was trained here")
    tokenizers = (model.source, model.target)
    made = make_shortlist(
        train_store(model.recipe, tokenizers), tokenizers, likeliest=likeliest, frequent=frequent, lines=lines
    )
    made.save(file)
    print(file)


def pair_line(source: str, output: str, inputs: int, where: str) -> str:
    """`source TAB output`. A tab that would be read as the end of a column is refused: escaped, it would be learned.

    `inputs` is how many columns make a source of the teacher; the student reads them with the same `inputs`.
    """
    if source.count("\t") != inputs - 1 and source.strip():
        raise InputError(
            f"{source.count(chr(9))} tabs in a source of {inputs} columns",
            where=where,
            remedy="a tab ends a column: take it out of the text, or generate with --json",
        )
    if "\t" in output:
        raise InputError("the output holds a tab, which would end a column", where=where, remedy="generate with --json")
    return f"{source}\t{output}"
