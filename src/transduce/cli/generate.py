"""Command that generates outputs: generate."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from transduce.cli.generate_lines import InputReader, OutputFormat, OutputWriter
from transduce.cli.options import (
    OUTPUT,
    PERFORMANCE,
    SEARCH,
    Beam,
    Combination,
    Device,
    InputFile,
    Intervene,
    Language,
    Output,
    Policy,
    RunsArgument,
    Sample,
    Settings,
    TrustUserCode,
    WarningsFlag,
    Weights,
    check_language,
    check_policy,
    generation_settings,
    load_ensemble,
    load_model,
    numbers,
    open_output,
    source_windows,
)
from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.inference import Model, Prediction
    from transduce.inference.shortlist import Shortlist
    from transduce.inference.terminology import Glossary

BULK = "Shards"  # panel of --help
DOCUMENTS = (".srt", ".vtt", ".html", ".htm")  # extensions of files that are not lines

NBest = Annotated[
    int | None,
    typer.Option(
        help="Hypotheses per line, one each: `NUMBER ||| TEXT ||| F0= SCORE ||| SCORE`; with --json in its object.",
        rich_help_panel=SEARCH,
    ),
]
Prefix = Annotated[str | None, typer.Option(help="Text that every output must begin with.", rich_help_panel=SEARCH)]
GlossaryFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Terms and their translations (`term TAB translation`), which outputs for these terms must contain.",
        rich_help_panel=SEARCH,
    ),
]
AvoidFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Phrases that no output may contain, one per line.", rich_help_panel=SEARCH),
]
JsonInput = Annotated[
    bool,
    typer.Option(
        "--json-input",
        help='Input lines are JSON: {"text": ..., "constraints": [...], "avoid": [...], "prefix": ...}.',
        rich_help_panel=SEARCH,
    ),
]
ReverseRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Noisy channel: a run from target to source, which scores the n-best list.",
        rich_help_panel=SEARCH,
    ),
]
LanguageModelRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Noisy channel: a language model of the target, which scores it too.",
        rich_help_panel=SEARCH,
    ),
]
ChannelWeights = Annotated[
    str,
    typer.Option(metavar="A,B", help="Weights of the reverse and the language model.", rich_help_panel=SEARCH),
]
Unconditional = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Language models: generate N texts without a prompt; no input is read.",
        rich_help_panel=SEARCH,
    ),
]
StreamFlag = Annotated[
    bool,
    typer.Option("--stream", help="Write each token as soon as all hypotheses have it.", rich_help_panel=SEARCH),
]
AlignAtt = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Simultaneous translation by attention (AlignAtt): write a token that attends to none of the last N read.",
        rich_help_panel=SEARCH,
    ),
]
WaitK = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="K",
        help="Simultaneous translation: write while the words of a line arrive, K source tokens behind.",
        rich_help_panel=SEARCH,
    ),
]
DocumentFlag = Annotated[
    bool,
    typer.Option(
        "--document",
        help="The file is running text, translated sentence by sentence; .srt, .vtt and .html files always are.",
        rich_help_panel=OUTPUT,
    ),
]
ProtectFlag = Annotated[
    bool | None,
    typer.Option(
        "--protect/--no-protect",
        help="Tags, addresses, placeholders, numbers and emoji of a source are in its output, once each. "
        "Default: in documents.",
        rich_help_panel=OUTPUT,
    ),
]
JsonOutput = Annotated[
    bool,
    typer.Option("--json", help="One JSON object per line: text, tokens, scores, n-best.", rich_help_panel=OUTPUT),
]
AlignOutput = Annotated[
    bool, typer.Option("--align", help="Word alignments instead of text: 0-0 1-2.", rich_help_panel=OUTPUT)
]
PairsOutput = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="`source TAB output`, as training pairs for sequence-level distillation.",
        rich_help_panel=OUTPUT,
    ),
]
Timestamps = Annotated[
    bool,
    typer.Option(
        "--timestamps",
        help="Speech: segments with times in seconds, `[0.00-2.48] text`; with --json in its object.",
        rich_help_panel=OUTPUT,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="auto, fp32, bf16 or int8 (on a CPU). auto: fp32 on a CPU; bf16 on a GPU where the fused decoder applies.",
        rich_help_panel=PERFORMANCE,
    ),
]
Workers = Annotated[
    int,
    typer.Option(min=1, help="Number of batches in parallel, each on one core.", rich_help_panel=PERFORMANCE),
]
BulkBackend = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Generate for shards of the input, each exactly once: in --workers processes of this machine, or on Ray. "
        "The same command continues after an interruption.",
        rich_help_panel=BULK,
    ),
]
ShardLines = Annotated[
    int, typer.Option(min=1, help="Input lines of a shard, where a file can be split.", rich_help_panel=BULK)
]
ByShard = Annotated[
    bool,
    typer.Option("--by-shard", help="The output is a folder: a file per shard, and a manifest.", rich_help_panel=BULK),
]
FirstLine = Annotated[
    int,
    typer.Option(
        min=1, help="Number of the first line, where the file is a part of a larger one.", rich_help_panel=BULK
    ),
]
DraftRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Speculative decoding: a small run with the same vocabulary. Greedy outputs do not change.",
        rich_help_panel=PERFORMANCE,
    ),
]
ShortlistFile = Annotated[
    Path | None,
    typer.Option(help="Lexical shortlist, a file of `transduce shortlist`.", rich_help_panel=PERFORMANCE),
]


def generate(
    run: RunsArgument,
    file: InputFile = "-",
    beam: Beam = None,
    nbest: NBest = None,
    sample: Sample = False,
    prefix: Prefix = None,
    glossary: GlossaryFile = None,
    avoid: AvoidFile = None,
    json_input: JsonInput = False,
    reverse: ReverseRun = None,
    language_model: LanguageModelRun = None,
    channel_weights: ChannelWeights = "1,1",
    unconditional: Unconditional = 0,
    wait_k: WaitK = None,
    alignatt: AlignAtt = None,
    stream_output: StreamFlag = False,
    to: Language = None,
    document: DocumentFlag = False,
    protect: ProtectFlag = None,
    settings: Settings = None,
    intervene: Intervene = None,
    combination: Combination = None,
    weights: Weights = None,
    output: Output = None,
    json: JsonOutput = False,
    align: AlignOutput = False,
    pairs: PairsOutput = False,
    timestamps: Timestamps = False,
    warnings: WarningsFlag = True,
    precision: Precision = "auto",
    workers: Workers = 1,
    draft: DraftRun = None,
    shortlist: ShortlistFile = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
    backend: BulkBackend = "",
    shard_lines: ShardLines = 20_000,
    by_shard: ByShard = False,
    first_line: FirstLine = 1,
) -> None:
    """Generate one output per input line, in order.

    Examples:

        echo "3. März 2026" | transduce generate runs/demo

        transduce generate runs/demo input.txt --output out.txt --beam 5

        transduce generate runs/demo input.txt --nbest 3 --set length_penalty=0.6

        transduce generate runs/de-en input.txt --set coverage_penalty=0.2

        transduce generate runs/large input.txt --precision int8 --workers 2

        transduce generate runs/large input.txt --pairs --output distilled.tsv

        transduce generate runs/large input.txt --set strategy=greedy --draft runs/small

        transduce generate runs/large input.txt --precision int8 --shortlist shortlist.safetensors

        transduce generate runs/one,runs/two input.txt --combination log_linear --weights 2,1

        transduce generate runs/demo input.txt --glossary terms.tsv --avoid words.txt

        transduce generate runs/multilingual input.txt --to de

        transduce generate runs/de-en film.srt --output film.en.srt

        transduce generate runs/de-en input.txt --protect

        transduce generate runs/de-en input.txt --intervene mask-head:cross:1.3

    If the sources of the model are files, each line names one. A single file, or a folder of files, may be given
    instead of a list.

        transduce generate runs/captions photo.jpg

        transduce generate runs/captions photos/ --pairs

        transduce generate whisper-tiny lecture.wav --timestamps

    Lines of a pipe or a terminal are answered as they come.

        tail -f log.txt | transduce generate runs/demo

    Each token as soon as it is certain:

        transduce generate runs/de-en input.txt --stream

    Words are translated while they arrive, before the line ends:

        transduce generate runs/de-en --wait-k 3

    A language model continues each line and writes prompt and continuation; an empty line is an empty prompt. Line
    feeds inside an output become spaces, except with --json and --unconditional.

        echo "To be" | transduce generate runs/book --set temperature=0.8

        transduce generate runs/book --unconditional 3

    Much text, in shards that are generated once each, also after a crash:

        transduce generate runs/en-de english.txt --output out.txt --backend local --workers 8

        transduce generate runs/en-de 's3://bucket/part-*.gz' --pairs --output folder --by-shard --backend ray
    """
    if backend:
        given = dict(locals())
        from transduce.cli.bulk_generate import generate_shards

        generate_shards(given)
        return
    model = load_ensemble(run, device, trust_user_code, combination, weights, precision)
    model = model.intervene(intervene) if intervene else model
    chosen = generation_settings(settings, beam=beam, nbest=nbest, strategy="sample" if sample else None)
    if protect is not None:
        chosen["protect"] = _protected_kinds() if protect else ()
    model.settings(**chosen)  # reports a wrong name or value before any input is read
    search, channel = dict(chosen), None
    if reverse is not None or language_model is not None:
        back = None if reverse is None else load_model(reverse, device, trust_user_code)
        alone = None if language_model is None else load_model(language_model, device, trust_user_code)
        channel = NoisyChannel(back, alone, _channel_weights(channel_weights), nbest or 1)
        chosen["nbest"] = max(nbest or 1, model.settings(**chosen).beam)
    chosen["workers"] = workers
    check_language(model, to)
    if draft is not None:
        chosen["draft"] = load_model(draft, device, trust_user_code, precision)
    if shortlist is not None:
        chosen["shortlist"] = _load_shortlist(shortlist)
    if pairs and (json or align or unconditional or model.sourceless):
        raise InputError(
            "--pairs needs a source and excludes --json, --align and --unconditional",
            where="--pairs",
            remedy="leave out one of the two",
        )
    text: OutputFormat = "multiline" if unconditional else "nbest" if nbest is not None and nbest > 1 else "text"
    if timestamps:
        chosen["timestamps"], text = True, "timestamps"
    form: OutputFormat = "json" if json else "alignment" if align else "pairs" if pairs else text
    reader = InputReader(
        file, prefix, json_input, _load_glossary(glossary), _load_avoided(avoid), to, model.source.languages
    )
    if document or Path(file).suffix.lower() in DOCUMENTS:
        _write_document(model, output, reader, chosen, channel, plain=form == "text" and not unconditional)
        return
    if (policy := check_policy(wait_k, alignatt)) is not None:
        _stream_words(model, file, output, policy, plain=form == "text" and not (unconditional or json_input))
        return
    if stream_output:
        others = (unconditional, json_input, to, draft, shortlist, channel, glossary, avoid, prefix)
        _stream_outputs(model, file, output, search, plain=form == "text" and not any(others))
        return
    windows = _windows(model, file, unconditional)
    if model.recipe.data.context and not json_input:
        from transduce.data.annotations import lines_in_context

        if first_line > 1:
            remedy = "leave out --backend, or give a file for each group of documents"
            raise InputError("a shard would cut documents in two", where=file, remedy=remedy)

        windows = lines_in_context(windows, model.recipe.data.context, _source_columns(model))
    with open_output(output, "" if unconditional else file) as stream:
        _write_outputs(
            model,
            windows,
            OutputWriter(form, file, _source_columns(model), first_line - 1, warnings=warnings),
            stream,
            reader,
            chosen,
            channel,
        )


def _stream_outputs(model: Model, file: str, output: Path | None, chosen: dict[str, Any], *, plain: bool) -> None:
    """Writes the output of each line token by token."""
    if not plain:
        remedy = "give lines, --beam, --sample and --set alone"
        raise InputError("a stream is the plain output of a search", where="--stream", remedy=remedy)
    with open_output(output, file) as out:
        for line in (line for window in _windows(model, file, 0) for line in window):
            for one in model.stream_tokens(line, **chosen):
                out.write(one.text)
                out.flush()
            out.write("\n")
            out.flush()


def _stream_words(model: Model, file: str, output: Path | None, policy: tuple[Policy, int], *, plain: bool) -> None:
    """Writes the simultaneous output of each line while its words arrive."""
    from transduce.inference.streaming import check_streaming

    if not plain:
        remedy = "leave out --json, --json-input, --align, --pairs, --nbest and --unconditional"
        raise InputError("simultaneous translation writes text", remedy=remedy)
    check_streaming(model)
    name, limit = policy
    options = {"k": limit} if name == "wait_k" else {"alignatt": limit}
    with (
        open_output(output, file) as out,
        nullcontext(sys.stdin) if file == "-" else open(file, encoding="utf-8") as read,
    ):
        try:
            while character := read.read(1):
                words = _arriving_words(character, read)
                for one in model.stream_translate(words, **options):
                    out.write(one.text)
                    out.flush()
                deque(words, maxlen=0)  # those after an output of the greatest length
                out.write("\n")
                out.flush()
        except UnicodeDecodeError:
            raise InputError("not UTF-8", where=file, remedy="convert it: iconv -f latin1 -t utf-8") from None


def _arriving_words(character: str, stream: TextIO) -> Iterator[str]:
    """The words of one line, each as soon as the white space after it has arrived."""
    word = ""
    while character and character != "\n":
        if not character.isspace():
            word += character
        elif word:
            yield word
            word = ""
        character = stream.read(1)
    if word:
        yield word


def _write_document(
    model: Model,
    output: Path | None,
    reader: InputReader,
    options: dict[str, Any],
    channel: NoisyChannel | None,
    *,
    plain: bool,
) -> None:
    """Translates a document and writes it in its own format."""
    from transduce.inference.documents import read_document, translate_document

    options = {"protect": _protected_kinds(), **options}
    if not plain or reader.json or model.sourceless or not model.source_encoding.reads_text:
        raise InputError(
            "documents need a model that reads text, and are written in their own format",
            where=reader.file,
            remedy="leave out --json, --json-input, --align, --pairs and --nbest",
        )
    if model.recipe.data.context:
        remedy = "give a text file with one sentence per line, and blank lines between documents"
        raise InputError("this model reads sentences in their context", where=reader.file, remedy=remedy)

    def generate(texts: list[str]) -> list[Prediction]:
        predictions = model.generate(**reader.arguments(texts, 0), **options)
        return predictions if channel is None else channel.rerank(predictions)

    with open_output(output, reader.file) as stream:
        stream.write(str(translate_document(model, read_document(reader.file), generate=generate, **options)))


def _protected_kinds() -> tuple[str, ...]:
    from transduce.inference.protected_spans import KINDS

    return KINDS


def _load_shortlist(path: Path) -> Shortlist:
    from transduce.inference.shortlist import Shortlist

    return Shortlist.load(path)


def _load_glossary(path: Path | None) -> Glossary | None:
    from transduce.inference.terminology import Glossary

    return None if path is None else Glossary.load(path)


def _load_avoided(path: Path | None) -> tuple[str, ...]:
    from transduce.inference.terminology import read_phrases

    return () if path is None else read_phrases(path)


def _write_outputs(
    model: Model,
    windows: Iterator[list[str]],
    writer: OutputWriter,
    stream: TextIO,
    reader: InputReader,
    options: dict[str, Any],
    channel: NoisyChannel | None = None,
) -> None:
    """Writes one line per source, window by window, and prints the counts of unusual ones."""
    for lines in windows:
        predictions = model.generate(**reader.arguments(lines, writer.line_number), **options)
        if channel is not None:
            predictions = channel.rerank(predictions)
        if writer.format in ("json", "alignment"):
            model.explain_predictions(predictions)  # the attention of all of them in batches
        stream.writelines(writer.line(one) + "\n" for one in predictions)
        stream.flush()
    writer.print_counts()


@dataclass(frozen=True)
class NoisyChannel:
    """The models and weights of noisy-channel reranking."""

    reverse: Model | None
    language_model: Model | None
    weights: tuple[float, float]
    nbest: int  # hypotheses of each line to return

    def rerank(self, predictions: list[Prediction]) -> list[Prediction]:
        from transduce.inference.reranking import rerank_noisy_channel

        found = rerank_noisy_channel(
            predictions, reverse=self.reverse, language_model=self.language_model, weights=self.weights
        )
        return [replace(one, nbest=one.nbest[: self.nbest]) for one in found]


def _channel_weights(text: str) -> tuple[float, float]:
    given = numbers(text, "--channel-weights", remedy="write two numbers: 1,0.5")
    if len(given) != 2:
        raise InputError(f"{len(given)} weights", where="--channel-weights", remedy="write two numbers: 1,0.5")
    return given[0], given[1]


def _source_columns(model: Model) -> int:
    return max((corpus.source_parts for corpus in model.recipe.data.train), default=1)


def _windows(model: Model, file: str, unconditional: int) -> Iterator[list[str]]:
    """The sources to generate for, in windows: empty prompts, files, or the lines of a file."""
    from transduce.data.readers.corpus import in_windows

    if unconditional and not model.sourceless:
        raise InputError("this model needs a source", where="--unconditional", remedy="give a file of input lines")
    if unconditional:
        return in_windows([""] * unconditional)
    return source_windows(model, file)
