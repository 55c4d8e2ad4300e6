"""Command line of the benchmarks: `python -m benchmarks generate|train|recurrent|scale|figure`.

Each benchmark prints a table and writes JSON to benchmarks/results; `figure` plots all results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import figure, generate, gpt2, harness, recurrent, scale, train
from transduce.kernels.native.library import keep_freed_memory


def run_train(args: argparse.Namespace, device: torch.device) -> list[harness.Measurement]:
    bf16 = args.precision == "bfloat16"
    if args.model == "gpt2":
        case = train.TrainingCase([], device, bf16, args.compile)
        return gpt2.run(args.size, args.tokens, case, args.repeats, args.only)
    shape = train.SIZES[args.size]
    if args.mixed:
        batches = train.mixed_batches(shape, args.tokens, device)
    else:
        batches = train.in_turn(train.batch_of(shape, args.tokens, device))
    packs = args.mixed and (
        args.packed or device.type == "cuda"
    )  # as in training, which packs where it uses CUDA graphs
    packed = train.packed_batches(batches, args.tokens) if packs else []
    case = train.TrainingCase(batches, device, bf16, args.compile, packed=packed)
    return train.run(args.size, args.tokens, case, args.repeats, args.only, args.clock)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=["generate", "train", "recurrent", "scale", "figure"])
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
    parser.add_argument("--model", choices=["marian", "gpt2"], default="marian", help="train: architecture")
    parser.add_argument("--compile", action="store_true", help="train: all implementations also compiled")
    parser.add_argument("--mixed", action="store_true", help="train: rows of different lengths, as in text")
    parser.add_argument("--packed", action="store_true", help="train: with --mixed, packed batches on a CPU too")
    parser.add_argument("--keep-memory", action="store_true", help="all implementations keep memory that they free")
    parser.add_argument(
        "--only", nargs="*", default=[], help="train: these implementations, by their names in the table"
    )
    parser.add_argument("--lines", type=int, nargs="*", default=[250_000, 500_000, 1_000_000], help="scale")
    parser.add_argument("--corpus", action="store_true", help="scale: only preparation, by lines")
    parser.add_argument("--tiny", action="store_true", help="a quick run that only checks that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.keep_memory and not keep_freed_memory():
        parser.error("--keep-memory: this needs glibc")
    if args.tiny:
        args.size, args.batches, args.length, args.repeats, args.tokens = (
            "test",
            [1, 3],
            8,
            2,
            512,
        )
    if args.what == "figure":
        figure.run(args.output, Path("docs/performance.png"))
        return
    if args.what == "scale":
        scale.run(args.lines, args.repeats, args.tiny, args.output, Console(width=140), args.corpus)
        return
    if args.what == "recurrent":
        precisions = {"float32": "fp32", "bfloat16": "bf16"}
        rows = recurrent.run(
            args.size,
            args.tokens,
            device,
            args.repeats,
            [precisions[args.precision]],
            args.clock,
        )
    elif args.what == "generate":
        rows = generate.run(
            args.size,
            args.batches,
            args.beams,
            args.length,
            device,
            args.precision,
            args.repeats,
            args.static,
            args.clock,
        )
    else:
        rows = run_train(args, device)
    kind = "-gpt2" if args.model == "gpt2" else "-mixed" if args.mixed else ""
    variant = "-memory-kept" if args.keep_memory else ""
    title = f"{args.what}{kind}-{args.size}-{device.type}-{args.precision}{variant}"
    harness.show(title, rows, Console(width=140))
    harness.write(args.output / f"{title}.json", title, rows, device, args.clock)


if __name__ == "__main__":  # the child processes of `scale` import this file
    main()
