"""Generation speed with and without a vocabulary shortlist, in int8 on one thread.

`python -m benchmarks.shortlist`: base with random weights, one line, lists of random tokens. `python -m
benchmarks.shortlist RUN LIST SOURCE REFERENCE`: a trained run on its test lines, one by one and in batches, with BLEU.
JSON goes under benchmarks/results.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.generate import SOURCE
from benchmarks.harness import CLOCKS, OURS, Implementation, Measurement, measure, show, write
from benchmarks.marian import SIZES, ours, theirs
from benchmarks.natural_lengths import quality
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.flow import EOS, Batch, Padded
from transduce.inference import load
from transduce.inference.lowering import lower_network
from transduce.inference.shortlist import OutputRows, Shortlist, apply_shortlists

CPU = torch.device("cpu")
WHOLE = "whole vocabulary"


def random_weights(size: str, lists: list[int], beams: list[int], length: int, repeats: int, clock: str) -> list[Any]:
    """One line of forced length. Making the lists counts: they are made anew for every batch."""
    network = lower_network(ours(SIZES[size], theirs(SIZES[size])), "int8")
    vocabulary, layers = SIZES[size].vocabulary, OutputRows(network)
    torch.manual_seed(2)
    ids = torch.randint(4, vocabulary, (1, SOURCE))
    ids[:, -1] = EOS
    batch, longest = Batch(Padded(ids, torch.ones_like(ids, dtype=torch.bool))), torch.tensor([length])
    rows: list[Measurement] = []
    for beam in beams:
        strategy = Greedy() if beam == 1 else Beam(width=beam, length_penalty=1.0)
        for few in lists:
            allowed = torch.zeros(1, vocabulary, dtype=torch.bool)
            allowed[:, :4] = True
            allowed[:, torch.randperm(vocabulary - 4)[: few - 4] + 4] = True

            def run(listed: bool, allowed: torch.Tensor = allowed, strategy: Any = strategy) -> int:
                decoder = apply_shortlists(layers, allowed) if listed else network
                search(decoder, batch, strategy, max_lengths=longest, processors=(MinLength(length=length),), nbest=1)
                return length

            both = [Implementation(OURS, partial(run, True)), Implementation(WHOLE, partial(run, False))]
            rows += measure(f"{size} batch 1 beam {beam}, {few} of {vocabulary}", both, CPU, repeats, clock)
    return rows


def trained(
    folder: Path, file: Path, sources: list[str], references: list[str], beams: list[int], repeats: int, clock: str
) -> list[Measurement]:
    model, few = load(folder, device="cpu", precision="int8"), Shortlist.load(file)
    rows: list[Measurement] = []
    for beam in beams:
        chosen: dict[str, Any] = {"strategy": "beam" if beam > 1 else "greedy", "beam": beam}
        for tokens in (1, 256, 4096):
            said: dict[str, list[str]] = {}

            def run(name: str, said: Any = said, chosen: Any = chosen, tokens: int = tokens) -> int:
                listed = few if name == OURS else None
                found = model.generate(sources, shortlist=listed, batch_tokens=tokens, **chosen)
                said[name] = [one.text for one in found]
                return sum(len(one.tokens) for one in found)

            both = [Implementation(name, partial(run, name)) for name in (OURS, WHOLE)]
            rows += measure(f"trained, beam {beam}, batches of {tokens} tokens", both, CPU, repeats, clock)
            for name, lines in said.items():
                print(f"beam {beam}, {tokens}: {name}: {quality(lines, references)}", flush=True)
            same = sum(a == b for a, b in zip(said[OURS], said[WHOLE], strict=True))
            print(f"beam {beam}, {tokens}: {same} of {len(sources)} lines are the same", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shortlist", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="RUN LIST SOURCE REFERENCE; none: random weights")
    parser.add_argument("--size", default="base", choices=list(SIZES))
    parser.add_argument("--lists", type=int, nargs="*", default=[500, 1000])
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", default="processor", choices=list(CLOCKS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.files:
        run, few, *texts = args.files
        lines = [file.read_text(encoding="utf-8").splitlines() for file in texts]
        rows = trained(run, few, lines[0], lines[1], args.beams, args.repeats, args.clock)
    else:
        rows = random_weights(args.size, args.lists, args.beams, args.length, args.repeats, args.clock)
    title = "shortlist-trained-cpu" if args.files else "shortlist-cpu"
    show(title, rows, Console(width=140))
    write(args.output / f"{title}.json", title, rows, CPU, args.clock)


if __name__ == "__main__":
    main()
