"""Pictures in, lines to learn to draw from out; lines in, pictures out: pixels, draw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.commands.output import open_console
from transduce.errors import InputError, UnreadableError


def pixels(
    file: Annotated[Path, typer.Argument(help="TSV: a picture, then what is said of it, as for --task caption.")],
    output: Annotated[Path, typer.Option(help="The folder for pairs.tsv and palette.json.")],
    size: Annotated[int, typer.Option(min=2, max=64, help="Pixels of a side.")] = 12,
    colours: Annotated[int, typer.Option(min=2, max=1024, help="Colours of the palette.")] = 16,
    palette: Annotated[
        Path | None, typer.Option(help="The palette of other pictures, such as those trained on; size follows it.")
    ] = None,
) -> None:
    """Turn pictures into lines of colours, so that a model can learn to draw them.

    What is said of a picture becomes the source, its pixels in reading order the target: `a red circle TAB c0 c0 c3`.

    Examples:

        transduce data icons --count 4000 --output icons

        transduce pixels icons/pairs.tsv --size 12 --colours 16 --output drawn

        transduce train drawn/pairs.tsv --task draw

        transduce generate runs/pairs captions.txt --sample | transduce draw --palette drawn/palette.json --output made
    """
    from transduce.images.files import fit, read_picture
    from transduce.images.palette import Palette

    chosen = None if palette is None else Palette.load(palette)
    height, width = (size, size) if chosen is None else (chosen.height, chosen.width)
    said, pictures = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        named, _, text = line.partition("\t")
        if not text:
            raise InputError("a picture and a text make a line", where=f"{file}:{number}")
        try:
            pictures.append(fit(read_picture(file.parent / named), height, width, "crop"))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{file}:{number}", remedy=bad.remedy) from None
        said.append(text.replace("\t", " "))
    if not pictures:
        raise InputError("no pictures: the file is empty", where=str(file))
    chosen = chosen or Palette.of(pictures, colours)
    output.mkdir(parents=True, exist_ok=True)
    chosen.save(output / "palette.json")
    lines = (f"{text}\t{chosen.encode(picture)}\n" for text, picture in zip(said, pictures, strict=True))
    (output / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    told = (
        f"{len(said):,} pictures of {height} x {width} pixels in {len(chosen.colours)} colours: {output / 'pairs.tsv'}"
    )
    open_console().print(told, highlight=False, soft_wrap=True)


def draw(
    palette: Annotated[Path, typer.Option(help="The palette.json that `transduce pixels` wrote.")],
    output: Annotated[Path, typer.Option(help="The folder for the pictures.")],
    file: Annotated[str, typer.Argument(help="Lines of colours; - is standard input.")] = "-",
    times: Annotated[int, typer.Option(min=1, max=64, help="How many times larger a pixel is drawn.")] = 8,
) -> None:
    """Draw lines of colours: 00001.png, 00002.png ... and all of them in all.png.

    Example:

        transduce generate runs/pairs captions.txt | transduce draw --palette drawn/palette.json --output made
    """
    from transduce.data.sources import read_lines
    from transduce.images.palette import Palette, tiled, write_png

    chosen = Palette.load(palette)
    drawn = [chosen.decode(line) for line in read_lines(file)]
    if not drawn:
        raise InputError("no lines to draw", where=file)
    output.mkdir(parents=True, exist_ok=True)
    for number, (picture, _) in enumerate(drawn, 1):
        write_png(tiled([picture], times, 0), output / f"{number:05}.png")
    write_png(tiled([picture for picture, _ in drawn], times), output / "all.png")
    if wrong := sum(not fits for _, fits in drawn):
        print(f"lines with too few, too many or unknown colours: {wrong:,}", file=sys.stderr)
    open_console().print(f"{len(drawn):,} pictures: {output}", highlight=False, soft_wrap=True)
