"""Commands about data: prepare, inspect, data (synthetic sets), backtranslate, encode-images, decode-images."""

from __future__ import annotations

import base64
import html as markup
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transduce.cli.options import (
    OUTPUT,
    Beam,
    Device,
    Overrides,
    RunsArgument,
    Sample,
    Settings,
    TrustUserCode,
    generation_settings,
    load_ensemble,
    open_console,
    open_output,
)
from transduce.errors import InputError, UnreadableError
from transduce.storage import replace_file, staged_folder, write_file

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from transduce.autoconfig.statistics import Inspection, SetInspection
    from transduce.modalities.image_tokenizers import PaletteTokenizer, VQTokenizer

Kind = Literal["palette", "vq"]


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a data set; without it, all names are listed.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of examples.")] = 2000,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same examples.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Test examples, whose words and names occur in no training set.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Output file, by default standard output; a folder for a set with files, and for splits."),
    ] = None,
    dev: Annotated[int, typer.Option(min=0, help="Number of development examples; --output is a folder.")] = 0,
    test: Annotated[int, typer.Option(min=0, help="Number of test examples; --output is a folder.")] = 0,
    length: Annotated[
        str | None, typer.Option(metavar="LOW-HIGH", help="Number of letters of copy, reverse and sort: 3-10.")
    ] = None,
) -> None:
    """Generate a synthetic data set as TSV.

    Examples:

        transduce data

        transduce data questions --count 8000 --output train.tsv

        transduce data questions --count 500 --held-out --output test.tsv

        transduce train train.tsv --task answer data.test=test.tsv

    With --dev or --test, a folder with train.tsv, dev.tsv and test.tsv is written:

        transduce data reverse --count 20000 --dev 500 --test 1000 --length 3-10 --output letters

    Image, audio and video sets are written to a folder: the files, pairs.tsv, and the ground truth in truth.jsonl.

        transduce data shapes --count 3000 --output shapes

        transduce train shapes/pairs.tsv --task caption
    """
    from transduce.synthetic import SYNTHETIC, generate, write_files
    from transduce.synthetic.dataset import pair_line

    console = open_console()
    if name is None:
        for known, dataset in SYNTHETIC.items():
            needed = "".join(f" {setting}" for setting in dataset.settings)
            line = (
                f"[cyan]{known:<16}[/] --task {dataset.task:<15} {dataset.description}{needed and f' ({needed[1:]})'}"
            )
            console.print(line, highlight=False, soft_wrap=True)
        return
    letters = None if length is None else _letters(length)
    if dev or test:
        _write_splits(name, output, (count, dev, test), seed, letters, held_out)
        return
    if name in SYNTHETIC and SYNTHETIC[name].writes_files and letters is None:
        if output is None:
            raise InputError(f"the sources of {name} are files", where="--output", remedy="give --output FOLDER")
        pairs = write_files(name, output, count, seed, held_out=held_out)
        console.print(f"{count:,} lines: {pairs}", highlight=False, soft_wrap=True)
        return
    examples = generate(name, count, seed, held_out=held_out, length=letters)
    with open_output(output, "") as stream:
        for example in examples:
            stream.write(pair_line(example, SYNTHETIC[name].columns))


def _letters(text: str) -> tuple[int, int]:
    """`3-10` or `8` as lowest and highest number."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal()):
        raise InputError(f"{text!r} is not a range", where="--length", remedy="give LOW-HIGH, such as 3-10")
    return int(low), int(high or low)


def _write_splits(
    name: str,
    output: Path | None,
    counts: tuple[int, int, int],
    seed: int,
    length: tuple[int, int] | None,
    held_out: bool,
) -> None:
    from transduce.synthetic import write_splits

    if output is None:
        raise InputError("several files are written", where="--output", remedy="give --output FOLDER")
    if held_out:
        remedy = "leave out --held-out: --dev and --test are held out"
        raise InputError("the splits have a training part", where="--held-out", remedy=remedy)
    for path, count in zip(write_splits(name, output, counts, seed, length=length), filter(None, counts), strict=True):
        open_console().print(f"{count:,} lines: {path}", highlight=False, soft_wrap=True)


FILTERS, WORK = "Filters", "Work"  # panels of --help
CorpusFiles = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="Data file or SOURCE,TARGET text files; patterns and addresses, as 's3://b/part-*.tsv'."
    ),
]
ShardFolder = Annotated[Path, typer.Option(help="Folder of the shards; a command that was interrupted continues.")]
Columns = Annotated[
    str | None, typer.Option(metavar="SOURCE,TARGET", help="Columns by name or position. Default: found.")
]
NormalisationSteps = Annotated[
    str, typer.Option(metavar="STEPS", help="Steps such as canonical,quotes,dashes,spaces,nfkc,lower.")
]
MinLength = Annotated[int, typer.Option(min=0, help="Characters of a side.", rich_help_panel=FILTERS)]
MaxLength = Annotated[int, typer.Option(min=1, help="Characters of a side.", rich_help_panel=FILTERS)]
MaxRatio = Annotated[
    float | None, typer.Option(min=1, help="Largest ratio of the lengths of both sides.", rich_help_panel=FILTERS)
]
KeepCopies = Annotated[
    bool, typer.Option("--keep-copies/--drop-copies", help="Pairs of two equal sides.", rich_help_panel=FILTERS)
]
KeepBadEncoding = Annotated[
    bool,
    typer.Option(
        "--keep-bad-encoding/--drop-bad-encoding",
        help="Texts with damaged characters, or read in a wrong encoding (fÃ¼r).",
        rich_help_panel=FILTERS,
    ),
]
KeepDuplicates = Annotated[
    bool,
    typer.Option("--keep-duplicates/--drop-duplicates", help="Pairs that occurred before.", rich_help_panel=FILTERS),
]
NearDuplicates = Annotated[
    float | None,
    typer.Option(
        min=0.5,
        max=1,
        metavar="J",
        help="Drop pairs whose character 5-grams have this Jaccard similarity with those of an earlier pair: 0.8.",
        rich_help_panel=FILTERS,
    ),
]
LanguageSamples = Annotated[
    str,
    typer.Option(
        metavar="auto|de,en",
        help="Drop pairs in other languages. auto: other than those of the two sides; else that of the sources, "
        "that of the targets, and others that may occur. With a sample of text: de=FILE,en=FILE.",
        rich_help_panel=FILTERS,
    ),
]
ScoringRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Write a score: the mean log-probability of a target token.", rich_help_panel=FILTERS
    ),
]
MinScore = Annotated[
    float | None, typer.Option(metavar="S", help="Drop pairs below this score.", rich_help_panel=FILTERS)
]
TokenizerRun = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Write token ids too, by the tokenizers of this run.")
]
PackedRows = Annotated[
    str, typer.Option(metavar="S,T", help="Assign pairs to packed rows of S source and T target positions.")
]
ShardLines = Annotated[int, typer.Option(min=1, help="Input lines of a shard.")]
ShardFormat = Annotated[str, typer.Option(metavar="parquet|arrow", help="Format of the shards.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes, or actors of Ray.", rich_help_panel=WORK)]
BackendName = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Processes of this machine, or Ray Data: on the cluster of RAY_ADDRESS, else on this machine.",
        rich_help_panel=WORK,
    ),
]


def prepare(
    source: CorpusFiles,
    output: ShardFolder,
    settings: Overrides = None,
    columns: Columns = None,
    normalise: NormalisationSteps = "",
    min_length: MinLength = 1,
    max_length: MaxLength = 2000,
    max_ratio: MaxRatio = None,
    keep_copies: KeepCopies = True,
    keep_bad_encoding: KeepBadEncoding = True,
    keep_duplicates: KeepDuplicates = True,
    near_duplicates: NearDuplicates = None,
    languages: LanguageSamples = "",
    scored_by: ScoringRun = None,
    min_score: MinScore = None,
    tokenizers: TokenizerRun = None,
    pack: PackedRows = "",
    shard_lines: ShardLines = 500_000,
    format: ShardFormat = "parquet",
    workers: Processes = 1,
    backend: BackendName = "local",
) -> None:
    """Prepare a corpus: read, normalise, filter, remove duplicates, tokenise, pack, and write shards with a manifest.

    Local files that are not compressed are split into shards; any other file is one shard. The output does not depend
    on the number of workers or on the backend.

    Examples:

        transduce prepare pairs.tsv --output prepared --drop-duplicates --max-ratio 3 --workers 8

        transduce prepare 's3://bucket/part-*.tsv.gz' --output prepared --near-duplicates 0.8 --backend ray

        transduce train 'prepared/*.parquet'
    """
    from transduce.data.corpus_pipeline import AUTO, PipelineOptions, prepare_corpora
    from transduce.data.filters import TextFilters
    from transduce.data.readers.corpus import name_columns
    from transduce.recipe import override, parse

    given = [f"data.train={source}", *([] if columns is None else [f"data.columns={columns}"]), *(settings or [])]
    data = parse(override({}, given), where="key=value").data
    options = PipelineOptions(
        filters=TextFilters(min_length, max_length, max_ratio, keep_copies, keep_bad_encoding),
        normalisation=tuple(normalise.split(",")) if normalise else (),
        invalid=data.invalid,
        drop_duplicates=not keep_duplicates,
        near_duplicates=near_duplicates,
        languages=AUTO if languages == "auto" else _samples(languages),
        scored_by="" if scored_by is None else str(scored_by.absolute()),
        min_score=min_score,
        tokenizers="" if tokenizers is None else str(tokenizers.absolute()),
        pack=_positions(pack) if pack else None,
        shard_lines=shard_lines,
        format=_choice(format, ("parquet", "arrow"), "--format"),
    )
    console = open_console()
    manifest = prepare_corpora(
        [name_columns(corpus) for corpus in data.train],
        output,
        options,
        workers=workers,
        backend=_choice(backend, ("local", "ray"), "--backend"),
        progress=lambda step, done, parts: console.print(f"{step}: {done:,} of {parts:,}", highlight=False),
    )
    console.print(f"{manifest['kept']:,} of {manifest['read']:,} pairs in {len(manifest['shards']):,} shards: {output}")
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        console.print(f"{count:,} dropped: {reason} (first at {manifest['first'][reason]})", highlight=False)


def _samples(text: str) -> dict[str, str]:
    """Sample files by language, from `de,en` or `de=FILE,en=FILE`."""
    return dict(part.partition("=")[::2] for part in text.split(",")) if text else {}


def _positions(text: str) -> tuple[int, int]:
    source, comma, target = text.partition(",")
    if not comma or not source.strip().isdecimal() or not target.strip().isdecimal():
        raise InputError(f"{text!r} are not two numbers", where="--pack", remedy="write: 128,128")
    return int(source), int(target)


def _choice(value: str, known: tuple[Any, ...], option: str) -> Any:
    if value not in known:
        raise InputError(f"unknown value {value!r}", where=option, remedy=", ".join(known))
    return value


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="DATA", help="Data file or SOURCE,TARGET text files, as `transduce train` reads.")
    ],
    settings: Overrides = None,
    columns: Annotated[
        str | None, typer.Option(metavar="SOURCE,TARGET", help="Columns by name or position. Default: found.")
    ] = None,
    task: Annotated[str, typer.Option(help="Task, as in `transduce train`.")] = "generate",
    json: Annotated[Path | None, typer.Option(help="Write everything that was found to this JSON file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the lengths.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with tables and picture.")] = None,
) -> None:
    """Inspect data before training: lengths, scripts, duplicates, overlap of sets, suspicious lines, chosen recipe.

    Lines that `train` would refuse are listed with their numbers.

    Examples:

        transduce inspect pairs.tsv

        transduce inspect train.tsv data.test=test.tsv --html report.html

        transduce inspect opus.jsonl --columns translation.de,translation.en --json report.json
    """
    import json as json_format

    from transduce.autoconfig import plan_for
    from transduce.autoconfig.statistics import inspect as inspect_data
    from transduce.cli.display import show_plan

    console = open_console()
    given = [*([] if columns is None else [f"data.columns={columns}"]), *(settings or [])]
    plan = plan_for(source, ["data.invalid=drop", *given], task)
    found = inspect_data(plan.recipe.data)
    if json is not None:
        content = {"data": source, **found.to_json(), "recipe": plan.recipe.model_dump(mode="json")}
        replace_file(json, json_format.dumps(content, indent=2, ensure_ascii=False) + "\n")
    picture = lengths_picture(found) if png is not None or html is not None else b""
    if png is not None:
        replace_file(png, picture)
    if html is not None:
        replace_file(html, inspection_page(source, found, picture))
    show_inspection(found, console)
    console.print("\n`transduce train` would choose:", highlight=False)
    show_plan(plan, None, console)


def show_inspection(found: Inspection, console: Console) -> None:
    """Prints the numbers of each set, the overlaps, and the suspicious lines with their places."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*_HEADINGS, box=None, pad_edge=False, header_style="bold")
    for row in _rows(found):
        table.add_row(*map(escape, row))
    console.print(table)
    for name, side, one in _sides(found):
        console.print(
            f"{name}, {side}, characters a line: {_sparkline(one.histogram)} {one.limit:.0f}", highlight=False
        )
    for line in _overlaps(found):
        console.print(line, highlight=False)
    for name, one in found.sets.items():
        for kind, problem in one.problems.items():
            console.print(f"{name}, {kind}: {problem.count:,}", style="yellow", highlight=False)
            for place in problem.places[:3]:
                text = f"    {place.file}:{place.line}" + (f"  {place.text!r}" if place.text else "")
                console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
    problems = [problem for one in found.sets.values() for problem in one.problems.values()]
    unreadable = sum(problem.count for problem in problems if problem.unreadable)
    if unreadable:
        text = f"`transduce train` stops at the {unreadable:,} lines that cannot be read, and says why; "
        console.print(f"{text}data.invalid=drop drops and counts them", style="yellow", highlight=False)


_HEADINGS = ("set", "examples", "side", "median", "longest", "scripts", "suspicious lines")


def _sides(found: Inspection) -> list[tuple[str, str, Any]]:
    """Name of the set, name of the side, and its numbers."""
    both = [(name, side, getattr(one, side)) for name, one in found.sets.items() for side in ("source", "target")]
    return [row for row in both if row[2] is not None]


def _rows(found: Inspection) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, side, one in _sides(found):
        whole: SetInspection = found.sets[name]
        scripts = ", ".join(f"{script} {share:.0%}" for script, share in one.scripts.items() if share >= 0.005)
        problems = sum(problem.count for problem in whole.problems.values())
        rows.append(
            (name, f"{whole.examples:,}", side, f"{one.median:g}", f"{one.longest:,}", scripts, f"{problems:,}")
        )
    return rows


def _overlaps(found: Inspection) -> list[str]:
    return [
        f"overlap with the training data: {one.pairs:,} pairs, {one.sources:,} sources and {one.targets:,} targets "
        f"of the {one.examples:,} {name} examples"
        for name, one in found.overlap.items()
    ]


def _sparkline(counts: list[int]) -> str:
    """A histogram of one line."""
    most = max(counts) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in counts)


def lengths_picture(found: Inspection) -> bytes:
    """PNG: a histogram of the lengths of each set and side."""
    from matplotlib.figure import Figure

    sides = _sides(found)
    figure = Figure(figsize=(8, 1.8 * len(sides)), layout="constrained")
    for axes, (name, side, one) in zip(figure.subplots(len(sides), 1, squeeze=False)[:, 0], sides, strict=True):
        width = one.limit / len(one.histogram)
        axes.bar([width * (number + 0.5) for number in range(len(one.histogram))], one.histogram, width * 0.95)
        axes.set_ylabel(f"{name}, {side}")
        axes.axvline(one.median, color="tab:orange", linewidth=1)
    axes.set_xlabel("characters a line; the line marks the median, the last bar holds all longer lines")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def inspection_page(source: str, found: Inspection, picture: bytes) -> str:
    """A self-contained HTML page: the table, the picture, the suspicious lines."""
    cells = "".join(f"<tr>{''.join(f'<td>{markup.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(found))
    head = "".join(f"<th>{name}</th>" for name in _HEADINGS)
    pixels = base64.b64encode(picture).decode()
    problems = "".join(
        f"<h2>{markup.escape(f'{name}, {kind}: {problem.count:,}')}</h2><ul>"
        + "".join(
            f"<li>{markup.escape(f'{one.file}:{one.line}')} <q>{markup.escape(one.text)}</q></li>"
            for one in problem.places
        )
        + "</ul>"
        for name, whole in found.sets.items()
        for kind, problem in whole.problems.items()
    )
    overlaps = "".join(f"<p>{markup.escape(line)}</p>" for line in _overlaps(found))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{markup.escape(source)}</title>"
        "<style>body{font-family:system-ui,sans-serif;max-width:60rem;margin:2rem auto}td,th{padding:.2rem .8rem;"
        "text-align:left}img{max-width:100%}</style>"
        f"<h1>{markup.escape(source)}</h1><table><tr>{head}</tr>{cells}</table>{overlaps}"
        f'<img alt="histograms of lengths" src="data:image/png;base64,{pixels}">{problems}</html>\n'
    )


def backtranslate(
    run: RunsArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Monolingual text, one sentence per line.")],
    output: Annotated[
        Path,
        typer.Option(
            help="Pairs: `source TAB target`, or JSONL for a name in .jsonl.",
            rich_help_panel=OUTPUT,
        ),
    ],
    forward: Annotated[
        bool,
        typer.Option(
            "--forward", help="The run goes from source to target: self-training, sequence-level distillation."
        ),
    ] = False,
    sample: Sample = False,
    beam: Beam = None,
    settings: Settings = None,
    tag: Annotated[str, typer.Option(help="Word before every synthetic source, such as `<BT>`.")] = "",
    max_ratio: Annotated[float, typer.Option(min=1, help="Largest ratio of the lengths in characters.")] = 5.0,
    mix: Annotated[Path | None, typer.Option(metavar="PAIRS", help="TSV of real pairs to write too.")] = None,
    upsample: Annotated[int, typer.Option(min=1, help="Copies of the real pairs.")] = 1,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Make training pairs of monolingual text: by default back-translation with a run from target to source.

    Empty and truncated outputs, copies, duplicates and pairs beyond the length ratio are left out and counted. The
    same command continues after an interruption.

    Examples:

        transduce backtranslate runs/en-de english.txt --output synthetic.tsv --sample --tag "<BT>"

        transduce backtranslate runs/en-de english.txt --output all.tsv --mix pairs.tsv --upsample 2

        transduce backtranslate runs/de-en german.txt --output distilled.tsv --forward --beam 5
    """
    from rich.console import Console

    from transduce.transfer.synthetic_pairs import PairOptions, write_synthetic_pairs

    model = load_ensemble(run, device, trust_user_code, None, None)
    chosen = generation_settings(settings, beam=beam, strategy="sample" if sample else None)
    model.settings(**chosen)  # reports a wrong name or value before any input is read
    options = PairOptions(forward, tag, max_ratio, "" if mix is None else str(mix), upsample)
    counts = write_synthetic_pairs(model, text, output, options, Console(stderr=True), **chosen)
    for what, count in counts.items():
        print(f"{what}: {count:,}", file=sys.stderr)


def encode_images(
    file: Annotated[
        Path, typer.Argument(metavar="PAIRS", help="TSV with an image file and its caption, as for --task caption.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for pairs.tsv and the tokenizer (palette.json or codes.safetensors)."
        ),
    ],
    kind: Annotated[
        Kind, typer.Option(help="palette: one token per pixel, its colour. vq: one token per patch, by a VQ-VAE.")
    ] = "palette",
    size: Annotated[int, typer.Option(min=2, max=64, help="Height and width of the images in pixels.")] = 12,
    codebook_size: Annotated[
        int, typer.Option(min=2, max=1024, help="Number of colours, or of codes of the VQ-VAE.")
    ] = 16,
    patch_size: Annotated[
        int, typer.Option(min=2, max=16, help="With --kind vq: height and width of a patch in pixels.")
    ] = 4,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Use this tokenizer, of the training images, instead of training one; it sets all sizes."),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Both columns are image files: from image to image.")] = False,
) -> None:
    """Encode images as lines of tokens, so that a model can be trained to generate images from text.

    The caption becomes the source, and the tokens in reading order become the target: `a red circle TAB c0 c0 c3`.
    With --both, the first image becomes the source and the second the target: `c0 c3 c0 TAB c0 c0 c3`.

    Examples:

        transduce data icons --count 4000 --output icons

        transduce encode-images icons/pairs.tsv --size 12 --codebook-size 16 --output drawn

        transduce encode-images icons/pairs.tsv --kind vq --size 16 --codebook-size 256 --output drawn

        transduce train drawn/pairs.tsv --task draw

        transduce generate runs/pairs captions.txt --sample --output tokens.txt

        transduce decode-images tokens.txt --tokenizer drawn/palette.json --output images
    """
    from transduce.modalities.image_tokenizers import load_image_tokenizer

    if tokenizer is not None:
        chosen = load_image_tokenizer(tokenizer)
        sources, images = _read_images(file, chosen.height, chosen.width, both)
    else:
        if kind == "vq":
            _check_patches(size, patch_size)
        sources, images = _read_images(file, size, size, both)
        shown = [one for one in (*sources, *images) if not isinstance(one, str)]
        chosen = _train_tokenizer(shown, kind, codebook_size, patch_size)
    _write_pairs(sources, images, chosen, output)


def _check_patches(size: int, patch_size: int) -> None:
    if patch_size & (patch_size - 1) or size % patch_size:
        raise InputError(
            f"images of {size} pixels cannot be divided into patches of {patch_size} pixels",
            where="--patch-size",
            remedy="--patch-size is 2, 4, 8 or 16, and --size a multiple of it",
        )


def _write_pairs(
    sources: Sequence[str | np.ndarray],
    images: list[np.ndarray],
    chosen: PaletteTokenizer | VQTokenizer,
    output: Path,
) -> None:
    """Writes the tokenizer and pairs.tsv, and prints a summary."""
    from transduce.modalities.image_tokenizers import VQTokenizer

    pairs = output / "pairs.tsv"
    texts = (one if isinstance(one, str) else chosen.encode(one) for one in sources)
    lines = (f"{text}\t{chosen.encode(image)}\n" for text, image in zip(texts, images, strict=True))
    with staged_folder(output) as part:
        chosen.save(part / ("codes.safetensors" if isinstance(chosen, VQTokenizer) else "palette.json"))
        replace_file(part / pairs.name, "".join(lines))
    summary = f"{len(images):,} images of {chosen.height} x {chosen.width} pixels, {chosen.tokens} tokens each"
    open_console().print(f"{summary}, {chosen.count} {chosen.unit}: {pairs}", highlight=False, soft_wrap=True)


def _read_images(
    file: Path, height: int, width: int, both: bool
) -> tuple[Sequence[str | np.ndarray], list[np.ndarray]]:
    """The sources and the pixels of all images of a TSV: captions; or with `both`, the images of the first column."""
    from transduce.modalities.image_files import fit, read_image

    form = f"write: image file TAB {'image file' if both else 'caption'}"
    sources: list[str | np.ndarray] = []
    images = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        name, _, second = line.partition("\t")
        if not second:
            problem = "this line has no second image" if both else "this line has no caption"
            raise InputError(problem, where=f"{file}:{number}", remedy=form)
        try:
            image = fit(read_image(file.parent / name), height, width, "crop")
            other = fit(read_image(file.parent / second), height, width, "crop") if both else second.replace("\t", " ")
        except UnreadableError as error:
            raise InputError(error.problem, where=f"{file}:{number}", remedy=error.remedy) from None
        source, target = (image, other) if not isinstance(other, str) else (other, image)
        sources.append(source)
        images.append(target)
    if not images:
        raise InputError("the file is empty", where=str(file), remedy=form)
    return sources, images


def _train_tokenizer(
    images: list[np.ndarray], kind: Kind, codebook_size: int, patch_size: int
) -> PaletteTokenizer | VQTokenizer:
    """A palette, or a VQ-VAE trained on the images with a progress bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from transduce.modalities.image_tokenizers import UPDATES, PaletteTokenizer, VQTokenizer

    if kind == "palette":
        return PaletteTokenizer.fit(images, codebook_size)
    columns = (TextColumn("VQ-VAE"), BarColumn(), TextColumn("error {task.fields[error]:.4f}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(), transient=True) as bar:
        task = bar.add_task("", total=UPDATES, error=float("nan"))

        def report(step: int, error: float) -> None:
            bar.update(task, completed=step, error=error)

        return VQTokenizer.fit(images, codebook_size, patch_size, updates=UPDATES, progress=report)


def decode_images(
    tokenizer: Annotated[Path, typer.Option(help="The palette.json or codes.safetensors that `encode-images` wrote.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the images.")],
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Text file with the tokens of one image per line; - is standard input."),
    ] = "-",
    scale: Annotated[int, typer.Option(min=1, max=64, help="Enlargement: each pixel becomes N x N pixels.")] = 8,
) -> None:
    """Decode lines of image tokens to 00001.png, 00002.png ..., and to all.png, which shows all of them.

    Example:

        transduce generate runs/pairs captions.txt --sample --output tokens.txt

        transduce decode-images tokens.txt --tokenizer drawn/palette.json --output images
    """
    from transduce.data.readers.corpus import read_lines
    from transduce.modalities.image_tokenizers import image_grid, load_image_tokenizer, to_png

    chosen = load_image_tokenizer(tokenizer)
    decoded = [chosen.decode(line) for line in read_lines(file)]
    if not decoded:
        raise InputError("there are no lines to decode", where=file, remedy="give a file with one image per line")
    with staged_folder(output) as part:
        for number, (image, _) in enumerate(decoded, 1):
            write_file(part / f"{number:05}.png", to_png(image_grid([image], scale, 0)), durable=False)
        write_file(part / "all.png", to_png(image_grid([image for image, _ in decoded], scale)))
    if invalid := sum(not valid for _, valid in decoded):
        print(f"lines with too few, too many or unknown {chosen.unit}: {invalid:,}", file=sys.stderr)
    open_console().print(f"{len(decoded):,} images: {output}", highlight=False, soft_wrap=True)
