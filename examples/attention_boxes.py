"""Attention of captions inside the boxes of what they name: python examples/attention_boxes.py RUN FOLDER.

The folder is one of `transduce data shapes`: pairs.tsv has the pictures and captions, truth.jsonl the box of the shape
that each kind of shape in the caption names; the word before it is its colour. Only exact captions count.
"""

import json
import sys
from pathlib import Path

import numpy as np

import transduce
from transduce.explain.alignment import share_in_box

SIZE = (64, 64)  # of the pictures, in pixels


def main(run: str, folder: Path) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
