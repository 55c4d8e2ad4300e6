"""FSDP2 against one ordinary process, and two processes against one: `python -m benchmarks.sharding [--tiny]`.

One process measures the overhead of FSDP on one device, where nothing is communicated: the same updates with a sharded
model and with an ordinary one. FSDP has no CUDA graphs, so on a GPU the ordinary model is measured with and without
them. Under torchrun it gives the processor seconds of all processes together for an update, against those of one
process for the same update: their ratio is the efficiency.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine, wait
from benchmarks.marian import SIZES, Size
from benchmarks.train import batch_of
from transduce.flow import Batch
from transduce.kernels.cuda_graph import pad_to_bucket
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.distributed import Processes, pick_device
from transduce.training.fsdp import ShardedModel
from transduce.training.optimisers import build_optimiser
from transduce.training.update import Update, UpdateBatch, shortest_row, split_batch

ONE, GRAPHS = "one", "one_cuda_graphs"  # one ordinary process
LABELS = {ONE: "one process", GRAPHS: "one process, CUDA graphs", "ddp": "ddp", "fsdp": "fsdp"}
PIPELINED = 4  # updates of a run on a GPU, which computes one while the host prepares the next


def updates(size: Size, batch: Batch, processes: Processes, device: torch.device, kind: str) -> Callable[[], None]:
    """A function that makes the updates of a run, as the trainer does: it reads a result one update later."""
    part = {"kind": "transformer", "width": size.width, "layers": size.layers, "heads": size.heads}
    part |= {"ff_width": size.ff_width, "dropout": 0.1}
    training = {"precision": "bf16" if device.type == "cuda" else "fp32", "cuda_graphs": kind == GRAPHS}
    recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}, "training": training}))
    torch.manual_seed(1)
    model = build_model(recipe.model, size.vocabulary, size.vocabulary).to(device).train()
    sharded = ShardedModel(copy.deepcopy(model), device, processes.size) if kind == "fsdp" else None
    trained, objective = model if sharded is None else sharded.model, CrossEntropy()
    optimiser = build_optimiser(recipe.training.optimiser, trained)
    update = Update(trained, optimiser, objective, recipe.training, processes, device, sharded)
    parts = split_batch(batch, processes, 1)
    if update.uses_cuda_graphs:
        parts = [replace(one, batch=pad_to_bucket(one.batch, one.batch.slots, None)) for one in parts]
    content = UpdateBatch(parts, objective.count(batch), shortest_row(batch))

    def run() -> None:
        before = None
        for _ in range(PIPELINED if device.type == "cuda" else 1):
            launched = update.launch(content, 1, 1e-4)
            if before is not None:
                before.result()
            before = launched
        launched.result()
        wait(device)

    for _ in range(3):  # a CUDA graph is captured when its shape comes again
        run()
    if update.graphs is not None and (update.graphs.failed or not update.graphs.captured):
        raise AssertionError("no CUDA graph was captured")
    return run


def measure(
    kinds: list[str], size: Size, batch: Batch, processes: Processes, device: torch.device, repeats: int
) -> dict[str, float]:
    """The median seconds of an update by kind, over all processes; the kinds take turns."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # cores are shared
    ordinary = {ONE, GRAPHS}
    kinds = [kind for kind in kinds if kind not in ordinary or processes.is_main]
    runs = {kind: updates(size, batch, Processes() if kind in ordinary else processes, device, kind) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, run in runs.items():
            began = clock()
            run()
            found[kind].append((clock() - began) / (PIPELINED if device.type == "cuda" else 1))
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return {
        kind: seconds if kind in ordinary else sum(processes.all_reduce([seconds])) for kind, seconds in medians.items()
    }


def show(seconds: dict[str, float], tokens: int) -> None:
    print(f"{'':28}{'ms of an update':>16}{'tokens/s':>14}{'against one process':>22}")
    for kind, value in seconds.items():
        ratio = value / seconds[ONE]
        print(f"{LABELS[kind]:28}{1e3 * value:16.2f}{tokens / value:14,.0f}{ratio:22.3f}")
    if "ddp" not in seconds:
        print(f"overhead of fsdp: {seconds['fsdp'] / seconds[ONE] - 1:.1%} of one process without CUDA graphs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a quick run that only checks that everything works")
    parser.add_argument("--output", type=Path, help="file of the record; default: one in benchmarks/results")
    given = parser.parse_args()
    name, tokens, repeats = ("test", 1024, 3) if given.tiny else (given.size, given.tokens, given.repeats)
    device = pick_device(given.device)
    with Processes.start(device, "fsdp") as processes:
        kinds = [ONE, *([GRAPHS] if device.type == "cuda" else []), *(["ddp"] if processes.size > 1 else []), "fsdp"]
        seconds = measure(kinds, SIZES[name], batch_of(SIZES[name], tokens, device), processes, device, repeats)
        if not processes.is_main:
            return
    content: dict[str, Any] = {"machine": machine(device), "size": name, "tokens": tokens, "device": device.type}
    content |= {"precision": "bf16" if device.type == "cuda" else "fp32", "processes": processes.size}
    content |= {"clock": "wall" if device.type == "cuda" else "processor", "repeats": repeats, **seconds}
    show(seconds, tokens)
    path = given.output or Path(f"benchmarks/results/sharding-{name}-{device.type}-{processes.size}.json")
    if given.output or not given.tiny:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
