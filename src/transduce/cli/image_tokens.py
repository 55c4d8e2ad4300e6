"""Commands that convert between images and image tokens: encode-images, decode-images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transduce.cli.options import open_console
from transduce.errors import InputError, UnreadableError
from transduce.storage import replace_file, staged_folder, write_file

if TYPE_CHECKING:
    import numpy as np

    from transduce.modalities.image.tokenizers import PaletteTokenizer, VQTokenizer

Kind = Literal["palette", "vq"]


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
    from transduce.modalities.image.tokenizers import load_image_tokenizer

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
    from transduce.modalities.image.tokenizers import VQTokenizer

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
    from transduce.modalities.image.files import fit, read_image

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

    from transduce.modalities.image.tokenizers import UPDATES, PaletteTokenizer, VQTokenizer

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
    from transduce.modalities.image.tokenizers import image_grid, load_image_tokenizer, to_png

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
