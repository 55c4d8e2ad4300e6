"""Pictures in, lines to learn to draw from out; lines in, pictures out: pixels, draw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transduce.cli.options import open_console
from transduce.errors import InputError, UnreadableError

if TYPE_CHECKING:
    import numpy as np

    from transduce.modalities.image.vector_quantisation import VQTokenizer

Kind = Literal["colours", "vq"]


def pixels(
    file: Annotated[Path, typer.Argument(help="TSV: a picture, then what is said of it, as for --task caption.")],
    output: Annotated[Path, typer.Option(help="The folder for pairs.tsv and palette.json, or codes.safetensors.")],
    size: Annotated[int, typer.Option(min=2, max=64, help="Pixels of a side.")] = 12,
    colours: Annotated[int, typer.Option(min=2, max=1024, help="Colours of the palette, or codes.")] = 16,
    kind: Annotated[
        Kind, typer.Option(help="colours: a token is a pixel. vq: a token is a square of pixels, by a network.")
    ] = "colours",
    cell: Annotated[int, typer.Option(min=2, max=16, help="With --kind vq: pixels of a side of a square.")] = 4,
    palette: Annotated[
        Path | None, typer.Option(help="What was written for other pictures, such as those trained on; all follows it.")
    ] = None,
) -> None:
    """Turn pictures into lines of colours or codes, so that a model can learn to draw them.

    What is said of a picture becomes the source, its pixels in reading order the target: `a red circle TAB c0 c0 c3`.

    Examples:

        transduce data icons --count 4000 --output icons

        transduce pixels icons/pairs.tsv --size 12 --colours 16 --output drawn

        transduce pixels icons/pairs.tsv --kind vq --size 16 --colours 256 --output drawn

        transduce train drawn/pairs.tsv --task draw

        transduce generate runs/pairs captions.txt --sample | transduce draw --palette drawn/palette.json --output made
    """
    from transduce.modalities.image.palette import PaletteTokenizer
    from transduce.modalities.image.vector_quantisation import VQTokenizer, load_image_tokenizer

    chosen = None if palette is None else load_image_tokenizer(palette)
    if chosen is None and kind == "vq" and (cell & (cell - 1) or size % cell):
        raise InputError(
            f"squares of {cell} pixels do not fill a side of {size}",
            remedy="--cell is 2, 4, 8 or 16, and --size a multiple of it",
        )
    height, width = (size, size) if chosen is None else (chosen.height, chosen.width)
    said, pictures = _read_pictures(file, height, width)
    if chosen is None:
        chosen = _coded(pictures, colours, cell) if kind == "vq" else PaletteTokenizer.of(pictures, colours)
    output.mkdir(parents=True, exist_ok=True)
    chosen.save(output / ("codes.safetensors" if isinstance(chosen, VQTokenizer) else "palette.json"))
    lines = (f"{text}\t{chosen.encode(picture)}\n" for text, picture in zip(said, pictures, strict=True))
    (output / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    told = f"{len(said):,} pictures of {height} x {width} pixels, {chosen.tokens} tokens each, in {chosen.count} "
    told += f"{chosen.what}: {output / 'pairs.tsv'}"
    open_console().print(told, highlight=False, soft_wrap=True)


def _read_pictures(file: Path, height: int, width: int) -> tuple[list[str], list[np.ndarray]]:
    """What is said of each picture of a TSV, and its pixels."""
    from transduce.modalities.image.files import fit, read_image

    said, pictures = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        named, _, text = line.partition("\t")
        if not text:
            raise InputError("a picture and a text make a line", where=f"{file}:{number}")
        try:
            pictures.append(fit(read_image(file.parent / named), height, width, "crop"))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{file}:{number}", remedy=bad.remedy) from None
        said.append(text.replace("\t", " "))
    if not pictures:
        raise InputError("no pictures: the file is empty", where=str(file))
    return said, pictures


def _coded(pictures: list[np.ndarray], count: int, cell: int) -> VQTokenizer:
    """The network that is trained on them, while a bar goes on."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from transduce.modalities.image.vector_quantisation import UPDATES, VQTokenizer

    columns = (TextColumn("codes"), BarColumn(), TextColumn("error {task.fields[error]:.4f}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(), transient=True) as bar:
        task = bar.add_task("", total=UPDATES, error=float("nan"))

        def tell(step: int, error: float) -> None:
            bar.update(task, completed=step, error=error)

        return VQTokenizer.of(pictures, count, cell, updates=UPDATES, tell=tell)


def draw(
    palette: Annotated[Path, typer.Option(help="The palette.json or codes.safetensors that `pixels` wrote.")],
    output: Annotated[Path, typer.Option(help="The folder for the pictures.")],
    file: Annotated[str, typer.Argument(help="Lines of colours or codes; - is standard input.")] = "-",
    times: Annotated[int, typer.Option(min=1, max=64, help="How many times larger a pixel is drawn.")] = 8,
) -> None:
    """Draw lines of colours or codes: 00001.png, 00002.png ... and all of them in all.png.

    Example:

        transduce generate runs/pairs captions.txt | transduce draw --palette drawn/palette.json --output made
    """
    from transduce.data.readers.corpus import read_lines
    from transduce.modalities.image.palette import image_grid, write_png
    from transduce.modalities.image.vector_quantisation import load_image_tokenizer

    chosen = load_image_tokenizer(palette)
    drawn = [chosen.decode(line) for line in read_lines(file)]
    if not drawn:
        raise InputError("no lines to draw", where=file)
    output.mkdir(parents=True, exist_ok=True)
    for number, (picture, _) in enumerate(drawn, 1):
        write_png(image_grid([picture], times, 0), output / f"{number:05}.png")
    write_png(image_grid([picture for picture, _ in drawn], times), output / "all.png")
    if wrong := sum(not fits for _, fits in drawn):
        print(f"lines with too few, too many or unknown {chosen.what}: {wrong:,}", file=sys.stderr)
    open_console().print(f"{len(drawn):,} pictures: {output}", highlight=False, soft_wrap=True)
