"""`python -m benchmarks generate|train|recurrent|scale`: a table, and JSON under benchmarks/results.

`python -m benchmarks picture`: all that JSON as one picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import generate, gpt2, harness, picture, recurrent, scale, train
from transduce.kernels.native.memory import keep_freed_memory


def run_train(asked: argparse.Namespace, device: torch.device) -> list[harness.Measured]:
    bf16 = asked.precision == "bfloat16"
    if asked.model == "gpt2":
        race = train.Race([], device, bf16, asked.compile)
        return gpt2.run(asked.size, asked.tokens, race, asked.repeats, asked.only)
    shape = train.SIZES[asked.size]
    if asked.mixed:
        batches = train.mixed_batches(shape, asked.tokens, device)
    else:
        batches = train.in_turn(train.batch_of(shape, asked.tokens, device))
    packs = asked.mixed and (asked.packed or device.type == "cuda")  # where passes are recorded, training does
    packed = train.packed_batches(batches, asked.tokens) if packs else []
    race = train.Race(batches, device, bf16, asked.compile, packed=packed)
    return train.run(asked.size, asked.tokens, race, asked.repeats, asked.only, asked.clock)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=["generate", "train", "recurrent", "scale", "picture"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="base")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=list(harness.CLOCKS), help="not for scale")
    parser.add_argument("--precision", choices=["float32", "bfloat16", "int8"], default="float32")
    parser.add_argument("--static", action="store_true", help="also transformers' static cache with torch.compile")
    parser.add_argument("--tokens", type=int, default=32768, help="train: source and target tokens of a batch")
    parser.add_argument("--model", choices=["marian", "gpt2"], default="marian", help="train: of which shape")
    parser.add_argument("--compile", action="store_true", help="train: all contestants also compiled")
    parser.add_argument("--mixed", action="store_true", help="train: rows of different lengths, as in text")
    parser.add_argument("--packed", action="store_true", help="train: with --mixed also packed, not on a GPU alone")
    parser.add_argument("--keep-memory", action="store_true", help="all contestants keep memory that they free")
    parser.add_argument("--only", nargs="*", default=[], help="train: these contestants, by their names in the table")
    parser.add_argument("--lines", type=int, nargs="*", default=[250_000, 500_000, 1_000_000], help="scale")
    parser.add_argument("--corpus", action="store_true", help="scale: only preparation, by lines")
    parser.add_argument("--tiny", action="store_true", help="a moment's run, to see that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.keep_memory and not keep_freed_memory():
        parser.error("--keep-memory: this needs glibc")
    if asked.tiny:
        asked.size, asked.batches, asked.length, asked.repeats, asked.tokens = "test", [1, 3], 8, 2, 512
    if asked.what == "picture":
        picture.run(asked.output, Path("docs/performance.png"))
        return
    if asked.what == "scale":
        scale.run(asked.lines, asked.repeats, asked.tiny, asked.output, Console(width=140), asked.corpus)
        return
    if asked.what == "recurrent":
        precisions = {"float32": "fp32", "bfloat16": "bf16"}
        rows = recurrent.run(
            asked.size, asked.tokens, device, asked.repeats, [precisions[asked.precision]], asked.clock
        )
    elif asked.what == "generate":
        rows = generate.run(
            asked.size,
            asked.batches,
            asked.beams,
            asked.length,
            device,
            asked.precision,
            asked.repeats,
            asked.static,
            asked.clock,
        )
    else:
        rows = run_train(asked, device)
    kind = "-gpt2" if asked.model == "gpt2" else "-mixed" if asked.mixed else ""
    variant = "-memory-kept" if asked.keep_memory else ""
    title = f"{asked.what}{kind}-{asked.size}-{device.type}-{asked.precision}{variant}"
    harness.show(title, rows, Console(width=140))
    harness.write(asked.output / f"{title}.json", title, rows, device, asked.clock)


if __name__ == "__main__":  # the processes that `scale` starts import this file
    main()
