"""FSDP2 against one ordinary process, and two processes against one: `python -m benchmarks.sharding [--tiny]`.

One process measures the overhead of FSDP on one device, where nothing is communicated: the same updates with a sharded
model and with an ordinary one, on a GPU with and without CUDA graphs. It then trains all of them from the same weights
without dropout, and prints how far their losses, gradient norms and weights are from those of the ordinary model.
Under torchrun it gives the processor seconds of all processes together for an update, against those of one process for
the same update: their ratio is the efficiency.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from benchmarks.harness import machine, wait
from benchmarks.marian import SIZES, Size
from benchmarks.train import batch_of
from transduce.flow import SPECIALS, Batch, Padded
from transduce.kernels.cuda_graph import pad_to_bucket
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.distributed import Processes, gathered, pick_device
from transduce.training.fsdp import ShardedModel
from transduce.training.optimisers import build_optimiser
from transduce.training.update import Update, UpdateBatch, shortest_row, split_batch

ONE, GRAPHS, FSDP, FSDP_GRAPHS = "one", "one_cuda_graphs", "fsdp", "fsdp_cuda_graphs"
LABELS = {ONE: "one process", GRAPHS: "one process, CUDA graphs", "ddp": "ddp", FSDP: "fsdp"}
LABELS |= {FSDP_GRAPHS: "fsdp, CUDA graphs"}
ORDINARY = {ONE, GRAPHS}  # of one process
PIPELINED = 4  # updates of a run on a GPU, which computes one while the host prepares the next
COMPARED = 8  # updates; a CUDA graph is captured at the third


class Training:
    """The updates of a run, from weights that depend on the size of the model alone."""

    def __init__(
        self,
        size: Size,
        processes: Processes,
        device: torch.device,
        kind: str,
        dropout: float = 0.1,
        accumulate: int = 1,
    ) -> None:
        part = {"kind": "transformer", "width": size.width, "layers": size.layers, "heads": size.heads}
        part |= {"ff_width": size.ff_width, "dropout": dropout}
        graphs = kind in (GRAPHS, FSDP_GRAPHS)
        training = {"precision": "bf16" if device.type == "cuda" else "fp32", "cuda_graphs": graphs}
        recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}, "training": training}))
        torch.manual_seed(1)
        model = build_model(recipe.model, size.vocabulary, size.vocabulary).to(device).train()
        wrapped = kind in (FSDP, FSDP_GRAPHS)
        sharded = ShardedModel(copy.deepcopy(model), device, processes.size) if wrapped else None
        self.model, self.objective = model if sharded is None else sharded.model, CrossEntropy()
        optimiser = build_optimiser(recipe.training.optimiser, self.model)
        settings, self.processes, self.accumulate = recipe.training, processes, accumulate
        self.update = Update(self.model, optimiser, self.objective, settings, processes, device, sharded)
        if self.update.uses_cuda_graphs != (graphs and device.type == "cuda"):
            raise AssertionError(f"{LABELS[kind]}: this model is not captured")

    def content(self, batch: Batch) -> UpdateBatch:
        parts = split_batch(batch, self.processes, self.accumulate)
        if self.update.uses_cuda_graphs:
            parts = [replace(one, batch=pad_to_bucket(one.batch, one.batch.slots, None)) for one in parts]
        return UpdateBatch(parts, self.objective.count(batch), shortest_row(batch))

    def check(self) -> None:
        graphs = self.update.graphs
        if graphs is not None and (graphs.failed or not graphs.captured):
            raise AssertionError("no CUDA graph was captured")


def updates(size: Size, batch: Batch, processes: Processes, device: torch.device, kind: str) -> Callable[[], None]:
    """A function that makes the updates of a run, as the trainer does: it reads a result one update later."""
    training = Training(size, processes, device, kind)
    content = training.content(batch)

    def run() -> None:
        before = None
        for _ in range(PIPELINED if device.type == "cuda" else 1):
            launched = training.update.launch(content, 1, 1e-4)
            if before is not None:
                before.result()
            before = launched
        launched.result()
        wait(device)

    for _ in range(3):  # a CUDA graph is captured when its shape comes again
        run()
    training.check()
    return run


@dataclass(frozen=True)
class Trained:
    """What a few updates without dropout gave."""

    losses: list[float]
    norms: list[float]  # of the gradients
    weights: list[Tensor]

    def differences(self, other: Trained, before: list[Tensor]) -> dict[str, float]:
        """The largest relative difference of a loss and of a gradient norm, and that of the change of the weights."""
        pairs = {"loss": (self.losses, other.losses), "gradient_norm": (self.norms, other.norms)}
        found = {key: max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for key, pair in pairs.items()}
        apart = [a - b for a, b in zip(self.weights, other.weights, strict=True)]
        change = [b - c for b, c in zip(other.weights, before, strict=True)]
        return found | {"weights": float(get_total_norm(apart) / get_total_norm(change))}


def train(
    size: Size, batches: list[Batch], processes: Processes, device: torch.device, kind: str, accumulate: int
) -> tuple[list[Tensor], Trained]:
    """The weights before and what the updates gave; every update has a batch of its own, all of one shape."""
    training = Training(size, processes, device, kind, 0.0, accumulate)
    before = [gathered(parameter).clone() for parameter in training.model.parameters()]
    results = [training.update(training.content(one), step, 1e-4) for step, one in enumerate(batches, 1)]
    training.check()
    after = [gathered(parameter).clone() for parameter in training.model.parameters()]
    losses = [result.loss / result.count for result in results]
    return before, Trained(losses, [result.gradient_norm for result in results], after)


def compare(
    kinds: list[str], size: Size, tokens: int, processes: Processes, device: torch.device
) -> dict[str, dict[str, float]]:
    """How far the wrapped model is from the ordinary one, without and with CUDA graphs, and the latter two."""
    pairs = [(FSDP, ONE), *([(GRAPHS, ONE), (FSDP_GRAPHS, GRAPHS)] if FSDP_GRAPHS in kinds else [])]
    found, first = {}, batch_of(size, tokens, device)
    batches = [_other_words(first, size) for _ in range(COMPARED)]
    for accumulate in (1, 2):
        made = {
            kind: train(size, batches, processes, device, kind, accumulate) for kind in dict.fromkeys(chain(*pairs))
        }
        for one, other in pairs:
            before, reference = made[other]
            name = f"{one} and {other}" + (f", {accumulate} micro-batches" if accumulate > 1 else "")
            found[name] = made[one][1].differences(reference, before)
    return found


def _other_words(batch: Batch, size: Size) -> Batch:
    """The same lengths with other tokens."""

    def drawn(part: Padded) -> Padded:
        words = torch.randint(len(SPECIALS), size.vocabulary, part.values.shape, device=part.values.device)
        return replace(part, values=torch.where(part.values < len(SPECIALS), part.values, words))

    return batch.map(drawn)


def measure(
    kinds: list[str], size: Size, batch: Batch, processes: Processes, device: torch.device, repeats: int
) -> dict[str, float]:
    """The median seconds of an update by kind, over all processes; the kinds take turns."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # cores are shared
    kinds = [kind for kind in kinds if kind not in ORDINARY or processes.is_main]
    runs = {kind: updates(size, batch, Processes() if kind in ORDINARY else processes, device, kind) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, run in runs.items():
            began = clock()
            run()
            found[kind].append((clock() - began) / (PIPELINED if device.type == "cuda" else 1))
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return {
        kind: seconds if kind in ORDINARY else sum(processes.all_reduce([seconds])) for kind, seconds in medians.items()
    }


def show(seconds: dict[str, float], tokens: int) -> None:
    print(f"{'':28}{'ms of an update':>16}{'tokens/s':>14}{'against one process':>22}")
    for kind, value in seconds.items():
        ratio = value / seconds[ONE]
        print(f"{LABELS[kind]:28}{1e3 * value:16.2f}{tokens / value:14,.0f}{ratio:22.3f}")
    for wrapped, ordinary in ((FSDP, ONE), (FSDP_GRAPHS, GRAPHS)):
        if "ddp" not in seconds and wrapped in seconds:
            print(f"overhead: {LABELS[wrapped]} {seconds[wrapped] / seconds[ordinary] - 1:.1%} of {LABELS[ordinary]}")


def show_differences(differences: dict[str, dict[str, float]]) -> None:
    print(f"{'relative differences':52}{'loss':>12}{'gradient norm':>16}{'weights':>12}")
    for name, one in differences.items():
        print(f"{name:52}{one['loss']:12.2e}{one['gradient_norm']:16.2e}{one['weights']:12.2e}")


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
        alone, gpu = processes.size == 1, device.type == "cuda"
        kinds = [ONE, *([GRAPHS] if gpu else []), *([] if alone else ["ddp"]), FSDP]
        kinds += [FSDP_GRAPHS] if gpu and alone else []  # passes of several processes are not captured
        seconds = measure(kinds, SIZES[name], batch_of(SIZES[name], tokens, device), processes, device, repeats)
        differences = compare(kinds, SIZES[name], tokens, processes, device) if alone else {}
        if not processes.is_main:
            return
    content: dict[str, Any] = {"machine": machine(device), "size": name, "tokens": tokens, "device": device.type}
    content |= {"precision": "bf16" if device.type == "cuda" else "fp32", "processes": processes.size}
    content |= {"clock": "wall" if device.type == "cuda" else "processor", "repeats": repeats, **seconds}
    content |= {"compared_updates": COMPARED, "differences": differences} if differences else {}
    show(seconds, tokens)
    show_differences(differences)
    path = given.output or Path(f"benchmarks/results/sharding-{name}-{device.type}-{processes.size}.json")
    if given.output or not given.tiny:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
