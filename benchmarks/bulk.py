"""Throughput of many lines of mixed length with several workers, against CTranslate2 with the same weights.

`python -m benchmarks.bulk` prints a table and writes JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.ctranslate2 import Translator
from benchmarks.harness import CLOCKS, OURS, Implementation, Measurement, measure, show, write
from benchmarks.marian import SIZES, ours, theirs
from transduce.data.batching import batch_by_length
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy, HuggingFaceBeam
from transduce.flow import EOS, Batch, Padded
from transduce.inference.generation import map_workers
from transduce.inference.lowering import lower_network

MAX_LENGTH = 64
PROCESSORS = (MinLength(length=2),)  # CTranslate2 writes at least one token before </s>


def run(
    size: str, lines: int, beam: int, workers: int, tokens: list[int], eos_bias: float, repeats: int, clock: str
) -> list[Measurement]:
    """`eos_bias` is added to the logit of </s>, so that random weights end lines at various lengths."""
    torch.set_num_threads(1)  # for each worker
    other = theirs(SIZES[size])
    with torch.no_grad():
        other.final_logits_bias[0, EOS] += eos_bias
    own = lower_network(ours(SIZES[size], other), "int8")
    # Several batches at a time on one core each, or one batch on all cores.
    peers = [Translator(other, "int8", *shape) for shape in dict.fromkeys(((workers, 1), (1, workers)))]
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 61, (lines,), generator=draw).tolist()
    sources = [
        [*torch.randint(4, SIZES[size].vocabulary, (length,), generator=draw).tolist(), EOS] for length in lengths
    ]
    outputs: dict[str, list[list[int]]] = {}

    def run_ours() -> int:
        outputs[OURS] = translate(own, sources, beam, workers, tokens[0])
        return sum(map(len, outputs[OURS]))

    def run_peer(peer: Translator) -> int:
        outputs[peer.name] = peer.translate_all(sources, beam, MAX_LENGTH, tokens[1])
        return sum(map(len, outputs[peer.name]))

    title = f"{size} {lines} lines beam {beam} workers {workers}"
    others = [Implementation(peer.name, partial(run_peer, peer)) for peer in peers]
    rows = measure(title, [Implementation(OURS, run_ours), *others], torch.device("cpu"), repeats, clock)
    made = {name: [len(line) for line in found] for name, found in outputs.items()}
    for name, found in made.items():
        cut = sum(length >= MAX_LENGTH for length in found)
        print(
            f"{name}: {sum(found)} tokens, lines of {min(found)} to {max(found)}, {cut} cut at {MAX_LENGTH}", flush=True
        )
    same = sum(a == b for a, b in zip(outputs[OURS], outputs[peers[0].name], strict=True))
    print(f"{same} of {lines} lines are the same", flush=True)
    return rows


def translate(own: Any, sources: list[list[int]], beam: int, workers: int, tokens: int) -> list[list[int]]:
    """As in `Model.generate`: batches by tokens, sorted by length, several at a time, then in the original order."""
    # Beam search with the stopping criterion of the peer; ours searches longer by default.
    strategy = Greedy() if beam == 1 else HuggingFaceBeam(width=beam, length_penalty=1.0, stop="full")
    batches = batch_by_length([len(source) for source in sources], tokens)

    def find(rows: list[int]) -> list[list[int]]:
        batch = Batch(Padded.from_rows([sources[row] for row in rows]))
        found = search(
            own, batch, strategy, max_lengths=torch.full((len(rows),), MAX_LENGTH), processors=PROCESSORS, nbest=1
        )
        return [list(one[0].ids) for one in found]

    results: dict[int, list[int]] = {}
    for rows, found in zip(batches, map_workers(find, batches, workers, torch.device("cpu")), strict=True):
        results.update(zip(rows, found, strict=True))
    return [results[row] for row in range(len(sources))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bulk", description=__doc__)
    parser.add_argument("--size", default="base")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs=2, default=[4096, 4096], help="source tokens of a batch: ours, its")
    parser.add_argument("--eos-bias", type=float, default=4.6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock", default="wall", choices=list(CLOCKS), help="processor: seconds of all workers together"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    rows: list[Measurement] = []
    for beam in args.beams:
        options = (args.tokens, args.eos_bias, args.repeats, args.clock)
        rows += run(args.size, args.lines, beam, args.workers, *options)
    title = f"bulk-{args.size}-cpu-int8"
    show(title, rows, Console(width=140))
    write(args.output / f"{title}.json", title, rows, torch.device("cpu"), args.clock)


if __name__ == "__main__":
    main()
