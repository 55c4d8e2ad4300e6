"""Exposure bias, and its reduction by scheduled sampling: `python benchmarks/exposure_bias.py [--tiny]`.

Two tasks on digits. Running sum, y_t = (y_{t-1} + x_t) mod 10: after gold tokens each step is easy, and alone one wrong
digit makes all later ones wrong, unless the decoder has learned to add up the source itself. Reversal: the right next
digit does not depend on the one before, but the place in the source is easily lost.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.model import Transducer
from transduce.objectives import CrossEntropy, Objective, ScheduledSampling
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

FIRST, DIGITS = 4, 10  # digit d is token FIRST + d
RECURRENT = {"kind": "recurrent", "cell": "gru", "width": 64, "dropout": 0.1}
TRANSFORMER = {"kind": "transformer", "layers": 2, "width": 64, "heads": 4, "ff_width": 128, "dropout": 0.1}
MODELS = {"recurrent": RECURRENT, "Transformer": TRANSFORMER}
TASKS: dict[str, Callable[[list[int]], list[int]]] = {
    "sum": lambda digits: [total % DIGITS for total in accumulate(digits)],
    "reverse": lambda digits: digits[::-1],
}


@dataclass(frozen=True)
class Measurement:
    loss: float  # negative log-probability of a gold token after gold tokens
    after_gold: float  # share of right tokens, read after gold ones
    after_own: float  # the same after own ones
    exact: float  # share of wholly right outputs, generated alone


def draw(task: str, rows: int, longest: int, seed: int) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=chance).tolist()
    sources = [torch.randint(DIGITS, (length,), generator=chance).tolist() for length in lengths]
    targets = [TASKS[task](source) for source in sources]
    return Batch(
        Padded.from_rows([[*(FIRST + digit for digit in source), EOS] for source in sources]),
        Padded.from_rows([[BOS, *(FIRST + digit for digit in row), EOS] for row in targets]),
    )


def train(
    model: Transducer, task: str, objective: Objective, updates: range, options: argparse.Namespace
) -> Transducer:
    """Goes on from a copy: `updates` also number the batches, so every continuation sees the same ones."""
    model = copy.deepcopy(model).train()
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.98))
    for number in updates:
        torch.manual_seed(1000 * options.seed + number)
        batch = draw(task, options.rows, options.length, 10**6 * options.seed + number)
        optimiser.zero_grad(set_to_none=True)
        (objective(model, batch).total / objective.count(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model


@torch.no_grad()
def measure(model: Transducer, batch: Batch) -> Measurement:
    model.eval()
    gold = batch.labels
    objective = CrossEntropy(label_smoothing=0.0)
    loss = objective(model, batch).total.item() / objective.count(batch)
    told = model(batch).logits.argmax(-1)  # B T
    found = search(model, batch, Greedy(), max_lengths=gold.mask.sum(1) + 5)
    width = gold.values.size(1)
    rows = [[*best.ids[:width], *[PAD] * (width - len(best.ids))] for best, *_ in found]
    alone = torch.tensor(rows)
    answers = [tuple(row[mask].tolist()) for row, mask in zip(gold.values, gold.mask, strict=True)]
    exact = sum(best.ids == answer for (best, *_), answer in zip(found, answers, strict=True))

    def right(tokens: Tensor) -> float:
        return float((tokens == gold.values)[gold.mask].float().mean())

    return Measurement(loss, right(told), right(alone), exact / batch.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--updates", type=int, default=300, help="before, and again after, the two ways part")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=16, help="most digits")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25], help="of scheduled sampling")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.tiny:
        options.updates, options.rows, options.length = 10, 8, 6
    held_outs = {task: draw(task, 500, options.length, 7) for task in TASKS}
    first, second = range(options.updates), range(options.updates, 2 * options.updates)
    ways: list[tuple[str, Objective, range]] = [
        (f"{options.updates} gold", CrossEntropy(), first),
        (f"{2 * options.updates} gold", CrossEntropy(), second),
    ]
    for rate in options.rates:
        label = f"{options.updates} gold + {options.updates} at {rate}"
        ways.append((label, ScheduledSampling(rate=rate), second))
    table = Table("task", "model", "trained with", "loss", "after gold", "after own", "exact match", "seconds")
    for (task, held_out), (name, part) in product(held_outs.items(), MODELS.items()):
        torch.manual_seed(options.seed)
        recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))
        common = build_model(recipe.model, FIRST + DIGITS, FIRST + DIGITS)
        for label, objective, updates in ways:
            began = time.perf_counter()
            model = train(common, task, objective, updates, options)
            common = model if updates is first else common
            found, seconds = measure(model, held_out), time.perf_counter() - began
            shares = (f"{share:.1%}" for share in (found.after_gold, found.after_own, found.exact))
            table.add_row(task, name, label, f"{found.loss:.3f}", *shares, f"{seconds:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
