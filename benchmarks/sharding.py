"""FSDP2 against one ordinary process, and two processes against one: `python -m benchmarks.sharding [--tiny]`.

The overhead of FSDP is measured on one device, where nothing is communicated: the same updates, sharded among one
process and not sharded, without CUDA graphs in both. Under torchrun it gives the processor seconds of all processes
together for an update, against those of one process for the same update: their ratio is the efficiency.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.marian import SIZES, Size
from benchmarks.train import batch_of
from transduce.flow import Batch
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.distributed import Processes, pick_device
from transduce.training.fsdp import ShardedModel
from transduce.training.optimisers import build_optimiser
from transduce.training.update import Update, UpdateBatch, shortest_row, split_batch


def updates(size: Size, batch: Batch, processes: Processes, device: torch.device, parallel: str) -> Callable[[], None]:
    """A function that makes one update."""
    part = {"kind": "transformer", "width": size.width, "layers": size.layers, "heads": size.heads}
    part |= {"ff_width": size.ff_width, "dropout": 0.1}
    training = {"precision": "bf16" if device.type == "cuda" else "fp32", "cuda_graphs": False}
    recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}, "training": training}))
    torch.manual_seed(1)
    model = build_model(recipe.model, size.vocabulary, size.vocabulary).to(device).train()
    sharded = ShardedModel(copy.deepcopy(model), device, processes.size) if parallel == "fsdp" else None
    trained, objective = model if sharded is None else sharded.model, CrossEntropy()
    optimiser = build_optimiser(recipe.training.optimiser, trained)
    update = Update(trained, optimiser, objective, recipe.training, processes, device, sharded)
    content = UpdateBatch(split_batch(batch, processes, 1), objective.count(batch), shortest_row(batch))
    return lambda: _finished(update, content, device)


def _finished(update: Update, content: UpdateBatch, device: torch.device) -> None:
    update(content, 1, 1e-4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], None], repeats: int, clock: Callable[[], float]) -> float:
    """The median time of an update, after two that are not counted."""
    run(), run()
    found = []
    for _ in range(repeats):
        began = clock()
        run()
        found.append(clock() - began)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="big", choices=SIZES)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a quick run that only checks that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    name, tokens, repeats = ("test", 1024, 3) if given.tiny else (given.size, given.tokens, given.repeats)
    device = pick_device(given.device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # cores are shared
    with Processes.start(device, "fsdp") as processes:
        batch = batch_of(SIZES[name], tokens, device)
        seconds = {
            parallel: sum(
                processes.all_reduce(
                    [seconds_of(updates(SIZES[name], batch, processes, device, parallel), repeats, clock)]
                )
            )
            for parallel in ("ddp", "fsdp")
        }
        if not processes.is_main:
            return
        alone = seconds_of(updates(SIZES[name], batch, Processes(), device, "ddp"), repeats, clock)
    content = {
        "size": name,
        "tokens": tokens,
        "device": device.type,
        "processes": processes.size,
        "one": alone,
        **seconds,
    }
    print(f"{'':24}seconds of an update, over all processes    against one process")
    for label, value in (("one process", alone), *seconds.items()):
        print(f"{label:24}{value:10.4f}{value / alone:35.3f}")
    if not given.tiny:
        path = given.output / f"sharding-{name}-{device.type}-{processes.size}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
