"""Generation speed against transformers (also with its static cache) and CTranslate2, with the same weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from benchmarks.ctranslate2 import Translator
from benchmarks.harness import OURS, Implementation, Measurement, measure
from benchmarks.marian import SIZES, ours, theirs
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.flow import EOS, Batch, Padded
from transduce.inference.lowering import lower_network
from transduce.kernels.cuda_graph import SearchGraphs

SOURCE = 32  # tokens per source


def run(
    size: str,
    batches: list[int],
    beams: list[int],
    length: int,
    device: torch.device,
    precision: str,
    repeats: int,
    static: bool,
    clock: str = "wall",
) -> list[Measurement]:
    other = theirs(SIZES[size])
    own: Any = ours(SIZES[size], other)
    peers: list[Translator] = []
    if device.type == "cpu":
        peers = [Translator(other, kind) for kind in ("float32", "int8")]
        own = lower_network(own, {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}[precision])
    else:
        own = lower_network(own.to(device), {"float32": "fp32", "bfloat16": "bf16"}[precision])
        other = other.to(device, getattr(torch, precision))
    rows: list[Measurement] = []
    for count in batches:
        torch.manual_seed(2)
        ids = torch.randint(4, SIZES[size].vocabulary, (count, SOURCE), device=device)
        ids[:, -1] = EOS
        source = Padded(ids, torch.ones_like(ids, dtype=torch.bool))
        for beam in beams:
            rows += measure(
                f"{size} batch {count} beam {beam}",
                implementations(own, other, peers, source, beam, length, static),
                device,
                repeats,
                clock,
            )
    return rows


def implementations(
    own: Any, other: Any, peers: list[Translator], source: Padded, beam: int, length: int, static: bool
) -> list[Implementation]:
    """All generate exactly `length` tokens per row; the share of equal outputs is printed."""
    rows, device = len(source), source.values.device
    strategy = Greedy() if beam == 1 else Beam(width=beam, length_penalty=1.0)
    max_lengths = torch.full((rows,), length)
    processors = (MinLength(length=length),)
    graphs = SearchGraphs() if device.type == "cuda" else None
    outputs: dict[str, list[list[int]]] = {}

    def run_ours() -> int:
        found = search(
            own, Batch(source), strategy, max_lengths=max_lengths, processors=processors, nbest=1, graphs=graphs
        )
        outputs[OURS] = [list(row[0].ids) for row in found]
        return rows * length

    def run_theirs(name: str, **options: Any) -> int:
        ids = other.generate(
            input_ids=source.values,
            attention_mask=source.mask.long(),
            num_beams=beam,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            length_penalty=1.0,
            **options,
        )
        outputs[name] = ids[:, 1:].tolist()
        return rows * length

    found = [Implementation(OURS, run_ours), Implementation("transformers", lambda: run_theirs("transformers"))]
    if static and beam == 1:
        # With a static cache, transformers compiles its steps on a GPU.
        found.append(Implementation("static", lambda: run_theirs("static", cache_implementation="static")))
    for peer in peers:

        def run_peer(peer: Translator = peer) -> int:
            outputs[peer.name] = peer.translate(source.values.tolist(), beam, length)
            return rows * length

        found.append(Implementation(peer.name, run_peer))
    for one in found:
        with suppress(Exception):  # `measure` reports the error
            one.run()
    for name, lines in outputs.items():
        same = sum(a == b for a, b in zip(lines, outputs["transformers"], strict=True)) / rows
        print(f"batch {rows} beam {beam}: {same:.1%} of the lines of {name} equal those of transformers", flush=True)
    return found
