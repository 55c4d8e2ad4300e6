"""Attention of captions on photographs: where it lies, and whether it matters.

    python examples/photograph_attention.py RUN FILE.tsv [--method NAME] [--count 200] [--removals 40] [--json FILE]

A line of the file is `picture TAB caption`; a picture has several lines. No boxes are needed. The maps are those of the
attention, or of another method of `transduce explain`, such as `posterior`. Of the first pictures:

- quarter, pointed: four pictures become one, two by two (the grid pointing game, Böhle et al. 2021), and the caption
  that the model writes for one of them alone is explained on the four. Only words count that a reference of this
  picture has, and none of the other three. `quarter` is the share of their attention on its quarter, `pointed` the
  share of words whose largest weight is there. Chance is 25 %.
- border, even: the share of attention on the outermost cells, and that of even attention.
- removed, random: of fewer pictures (--removals), the fall of log p, in nats, without the cells that the map marks, and
  without random ones.
- occlusion: of these, the rank correlation of the map with occlusion. swap: the rise of the loss, in nats per word,
  with uniform attention, where the decoder can have it. readable: the share of captions whose marked cells matter more
  than random ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

import transduce
from transduce.explain.alignment import Box, share_in_box
from transduce.explain.attention import Explanation
from transduce.explain.attribution import METHODS
from transduce.explain.faithfulness import NOTICEABLE
from transduce.modalities.image_files import fit, read_image

TILE = 160  # pixels per side of a picture in a mosaic
SIZE = (2.0 * TILE, 2.0 * TILE)


def read_captions(file: Path, count: int) -> dict[str, set[str]]:
    """The first pictures of a file, and the words of all their captions."""
    words: dict[str, set[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, caption = line.split("\t")
        words.setdefault(str(file.parent / name), set()).update(caption.lower().split())
    return {name: words[name] for name in list(words)[:count]}


def quarter_box(quarter: int) -> Box:
    """The box of a picture in a mosaic; 0 to 3, row by row."""
    top, left = divmod(quarter, 2)
    return (left * TILE, top * TILE, (left + 1) * TILE, (top + 1) * TILE)


def write_mosaic(pictures: Sequence[str], path: Path) -> None:
    """Four pictures in one, each cropped to a square."""
    tiles = [fit(read_image(picture), TILE, TILE, "crop") for picture in pictures]
    rows = [np.concatenate(tiles[begin : begin + 2], 1) for begin in (0, 2)]
    Image.fromarray(np.concatenate(rows)).save(path)


def explain(
    model: transduce.Model, method: str, picture: str, caption: str | None = None, *, measures: bool = False
) -> Explanation:
    """A caption, given or generated, whose `map` is that of a method, with the measures of the method if asked for."""
    if method == "attention" and not measures:
        return model.explain(picture, caption)
    found = model.explain(picture, caption, [method], measures=measures)
    return replace(found, attention=found.attribution_map(method).weights[None, None])


def own_words(explained: Explanation, words: set[str], others: Sequence[set[str]]) -> list[int]:
    """The target tokens that captions of this picture have, and no caption of the others."""
    own = words.difference(*others)
    return [token for token, text in enumerate(explained.target_tokens) if text.strip().lower() in own]


def inner_box(explained: Explanation) -> Box:
    """The box of all cells but the outermost, in a picture of `SIZE`."""
    rows, columns = explained.visual_sources[0].grid
    return (SIZE[0] / columns, SIZE[1] / rows, SIZE[0] - SIZE[0] / columns, SIZE[1] - SIZE[1] / rows)


def border_share(explained: Explanation, token: int) -> float:
    """The share of the attention of a target token on the outermost cells."""
    return 1 - share_in_box(explained, token, inner_box(explained), SIZE)


def even_border(explained: Explanation) -> float:
    rows, columns = explained.visual_sources[0].grid
    return 1 - (rows - 2) * (columns - 2) / (rows * columns)


def points_into(explained: Explanation, token: int, quarter: int) -> bool:
    """Whether the largest weight of a target token lies in a quarter of the mosaic."""
    rows, columns = explained.visual_sources[0].grid
    row, column = divmod(int(explained.map().weights[token].argmax()), columns)
    return (2 * row // rows, 2 * column // columns) == divmod(quarter, 2)


def mosaic_measures(
    model: transduce.Model, method: str, captions: dict[str, str], words: dict[str, set[str]]
) -> dict[str, float]:
    """`quarter` and `pointed`, in percent, and the number of words they are means of."""
    names, shares, hits = list(captions), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            quarter = number % 4  # where the picture stands; the three after it are the others
            others = [names[(number + step) % len(names)] for step in (1, 2, 3)]
            path = Path(folder) / f"{number}.png"
            write_mosaic([*others[:quarter], name, *others[quarter:]], path)
            explained = explain(model, method, str(path), captions[name])
            for token in own_words(explained, words[name], [words[other] for other in others]):
                shares.append(share_in_box(explained, token, quarter_box(quarter), SIZE))
                hits.append(points_into(explained, token, quarter))
    return {"quarter": 100 * float(np.mean(shares)), "pointed": 100 * float(np.mean(hits)), "words": len(shares)}


def caption_measures(explained: Sequence[Explanation]) -> dict[str, float]:
    """The measures of captions on their own pictures; those of removals where they were asked for."""
    measured = [one for one in explained if one.faithfulness]
    faith = [next(iter(one.faithfulness.values())) for one in measured]
    swaps = [one.uniform_swap.all for one in measured if one.uniform_swap is not None]
    readable = [one.comprehensiveness > max(one.random_comprehensiveness, 0) + NOTICEABLE for one in faith]
    return {
        "border": 100 * float(np.mean([border_share(one, token) for one in explained for token in one.outputs])),
        "even": 100 * even_border(explained[0]),
        "removed": float(np.mean([one.comprehensiveness for one in faith])),
        "random": float(np.mean([one.random_comprehensiveness for one in faith])),
        "occlusion": float(np.mean([one.rank_correlation or 0.0 for one in faith])),
        "readable": 100 * float(np.mean(readable)),
        "removals": len(measured),
        **({"swap": float(np.mean(swaps))} if swaps else {}),
    }


def main(run: str, file: Path, method: str, count: int, removals: int, record: Path | None) -> None:
    model = transduce.load(run)
    words = read_captions(file, count)
    explained = {name: explain(model, method, name, measures=number < removals) for number, name in enumerate(words)}
    found = caption_measures(list(explained.values()))
    found |= mosaic_measures(model, method, {name: one.output for name, one in explained.items()}, words)
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    if record is not None:
        record.write_text(json.dumps({"count": len(words), **found}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", default="attention", choices=METHODS, help="whose maps are measured")
    parser.add_argument("--count", type=int, default=200, help="pictures to measure")
    parser.add_argument("--removals", type=int, default=40, help="pictures of which cells are removed")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    main(given.run, given.file, given.method, given.count, given.removals, given.json)
