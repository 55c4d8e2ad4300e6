"""Attention of captions inside the boxes of what they name.

    python examples/attention_boxes.py RUN FOLDER [--json FILE]

The folder is one of `transduce data shapes`: pairs.tsv has the pictures and captions, truth.jsonl the box of the shape
that each kind of shape in the caption names; the word before it is its colour. Only exact captions count. The picture
named last is the one of several shapes whose words, even the least of them, look at their shape most.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import transduce
from transduce.explain.alignment import share_in_box
from transduce.explain.attention import Explanation

SIZE = (64, 64)  # of the pictures, in pixels


def least_share(explained: Explanation, boxes: dict[str, list[int]]) -> float:
    """The smallest share of attention inside its box, of the words that name shapes and of their colours."""
    return min(
        share_in_box(explained, int(word) - before, box, SIZE) for word, box in boxes.items() for before in (0, 1)
    )


def main(run: str, folder: Path, record: Path | None) -> None:
    model = transduce.load(run)
    pairs = [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()]
    truth = [json.loads(line)["boxes"] for line in (folder / "truth.jsonl").read_text().splitlines()]
    outputs = model.generate([str(folder / name) for name, _ in pairs])
    explained = model.explain_predictions(outputs)
    exact = [row for row, (_, caption) in enumerate(pairs) if outputs[row].text == caption]
    named = [(explained[row], int(word), box) for row in exact for word, box in truth[row].items()]
    shares = {
        "colour": [share_in_box(one, word - 1, box, SIZE) for one, word, box in named],
        "kind": [share_in_box(one, word, box, SIZE) for one, word, box in named],
        "area of the box": [(box[2] - box[0]) * (box[3] - box[1]) / (SIZE[0] * SIZE[1]) for _, _, box in named],
    }
    print(f"{len(exact)} exact captions of {len(pairs)}, {len(named)} shapes")
    for name, found in shares.items():
        print(f"{name}: {100 * np.mean(found):.1f} %")
    if record is not None:
        means = {name.split()[-1]: 100 * float(np.mean(found)) for name, found in shares.items()}
        record.write_text(json.dumps({"count": len(pairs), "exact": len(exact), "shapes": len(named), **means}))
    least = {row: least_share(explained[row], truth[row]) for row in exact if len(truth[row]) > 1}
    if least:
        best = max(least, key=least.__getitem__)
        print(f"{pairs[best][0]}: at least {100 * least[best]:.1f} % of each word, of {len(least)} pictures")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    main(given.run, given.folder, given.json)
