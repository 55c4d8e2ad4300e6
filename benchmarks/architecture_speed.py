"""Training and generation speed of each architecture on random tokens.

`python benchmarks/architecture_speed.py [--tiny]`, before and after a change.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe, count_parameters
from transduce.training.distributed import pick_device

GRU = {"kind": "recurrent", "cell": "gru"}
TRANSFORMER = {"kind": "transformer"}
ARCHITECTURES = {
    "Sutskever: context at the start": (GRU, {**GRU, "context": "initial"}),
    "Cho: context at every step": (GRU, {**GRU, "context": "every_step"}),
    "Bahdanau: attend before": (GRU, {**GRU, "context": "bahdanau"}),
    "Luong: attend after, input feeding": (GRU, {**GRU, "context": "luong"}),
    "Luong: no input feeding": (GRU, {**GRU, "context": {"kind": "luong", "input_feeding": False}}),
    "Transformer > recurrent": (TRANSFORMER, GRU),
    "recurrent > Transformer": (GRU, TRANSFORMER),
    "Transformer": (TRANSFORMER, TRANSFORMER),
    "Transformer decoder alone": (None, TRANSFORMER),
}


def random_batch(rows: int, length: int, size: int) -> Batch:
    ids = torch.randint(4, size, (rows, length)).tolist()
    sources = Padded.from_rows([[*row, EOS] for row in ids])
    return Batch(sources, Padded.from_rows([[BOS, *row, EOS] for row in ids]))


def training_speed(model: torch.nn.Module, batch: Batch, repeats: int) -> float:
    optimiser, objective = torch.optim.AdamW(model.parameters()), CrossEntropy(label_smoothing=0.1)
    times = []
    model.train()
    for repeat in range(repeats + 2):
        start = now(batch.device)
        optimiser.zero_grad(set_to_none=True)
        loss = objective(model, batch)
        (loss.total / objective.count(batch)).backward()
        optimiser.step()
        if repeat >= 2:
            times.append(now(batch.device) - start)
    return batch.tokens / median(times)


def generation_speed(model: torch.nn.Module, batch: Batch, beam: int, steps: int, repeats: int) -> float:
    strategy = Greedy() if beam == 1 else Beam(width=beam)
    longest = torch.full((batch.size,), steps)
    times = []
    model.eval()
    for repeat in range(repeats + 1):
        start = now(batch.device)
        search(model, Batch(batch.source), strategy, max_lengths=longest, processors=[MinLength(length=steps)])
        if repeat:
            times.append(now(batch.device) - start)
    return batch.size * steps / median(times)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(1)
    device = pick_device(options.device)
    width, rows, length, size, repeats = (32, 8, 8, 100, 2) if options.tiny else (256, 64, 30, 8000, 5)
    batch = random_batch(rows, length, size).to(device)
    table = Table("architecture", "parameters", "training tok/s", "greedy tok/s", "beam 5 tok/s")
    results = []
    for name, parts in ARCHITECTURES.items():
        encoder, decoder = (None if part is None else {**part, "width": width} for part in parts)
        content = {"tokens": {"shared": True}, "model": {"encoder": encoder, "decoder": decoder}}
        model = build_model(complete_recipe(parse(content)).model, size, size).to(device)
        row = {
            "architecture": name,
            "parameters": count_parameters(model),
            "training": training_speed(model, batch, repeats),
            "greedy": generation_speed(model, batch, 1, length, repeats),
            "beam5": generation_speed(model, batch, 5, length, repeats),
        }
        results.append(row)
        table.add_row(name, *(f"{value:,.0f}" for value in list(row.values())[1:]))
    Console().print(table)
    if options.json:
        environment = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"environment": environment, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
