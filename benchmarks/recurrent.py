"""Training speed of a recurrent encoder-decoder with MLP attention and input feeding against the tutorial loop.

The tutorial loop has the same weights and the same maths, written as it is usually shown: in every step the keys are
projected, the cell is made of single gates and the vocabulary is scored.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import OURS, Contestant, Measured, measure
from benchmarks.marian import Size
from benchmarks.train import batch_of, peer
from transduce.build import build_model, complete_recipe
from transduce.flow import Batch
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.training.devices import Processes
from transduce.training.optimisers import build_optimiser
from transduce.training.update import Piece, Update, Work

SIZES = {
    "test": Size(16, 1, 1, 16, 50),
    "small": Size(256, 1, 1, 256, 8_000),
    "base": Size(512, 1, 1, 512, 16_000),
}
CLOSE = 2e-5  # of the losses, in fp32


def model_of(size: Size, cell: str, reader: dict[str, Any]) -> Any:
    common = {"kind": "recurrent", "cell": cell, "layers": size.layers, "width": size.width, "dropout": 0.0}
    recipe = complete_recipe(parse({"model": {"encoder": common, "decoder": {**common, "reader": reader}}}))
    torch.manual_seed(1)
    return build_model(recipe.model, size.vocabulary, size.vocabulary)


class Tutorial(nn.Module):
    """Takes the weights of our model, and nothing else of its decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = copy.deepcopy(model)

    def forward(self, batch: Batch) -> Tensor:
        """The summed cross-entropy."""
        decoder = self.inner.decoder
        score, cell = decoder.reader.attend.score, decoder.stack.layers[0]
        memory = self.inner.encoder(batch)
        state = [part[0] for part in zip(*decoder._first(memory), strict=True)]
        hidden, cells = state[0], state[1] if len(state) > 1 else None
        total = hidden.new_zeros(())
        gold = batch.gold.values.masked_fill(~batch.gold.mask, -100)
        for step in range(gold.size(1)):
            token = decoder.embedding(batch.inputs.values[:, step])  # B D
            keys = score.memory(memory.values)  # B S D
            energy = score.vector(torch.tanh(score.query(hidden)[:, None] + keys)).squeeze(-1)  # B S
            weights = energy.masked_fill(~memory.mask, -torch.inf).softmax(-1)
            context = (weights[:, None] @ memory.values).squeeze(1)  # B D
            hidden, cells = one_step(cell, torch.cat((token, context), -1), hidden, cells)
            logits = decoder.output(decoder.readout(torch.cat((hidden, context), -1)))  # B V
            total = total + F.cross_entropy(logits.float(), gold[:, step], ignore_index=-100, reduction="sum")
        return total


def one_step(cell: Any, inputs: Tensor, hidden: Tensor, cells: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One step of an LSTM or a GRU by its equations, gate by gate."""
    gates = 3 if cells is None else 4
    ahead = [
        F.linear(inputs, w, b)
        for w, b in zip(cell.weight_ih_l0.chunk(gates), cell.bias_ih_l0.chunk(gates), strict=True)
    ]
    back = [
        F.linear(hidden, w, b)
        for w, b in zip(cell.weight_hh_l0.chunk(gates), cell.bias_hh_l0.chunk(gates), strict=True)
    ]
    if cells is None:
        reset, update = torch.sigmoid(ahead[0] + back[0]), torch.sigmoid(ahead[1] + back[1])
        new = torch.tanh(ahead[2] + reset * back[2])
        return (1 - update) * new + update * hidden, None
    enter, forget, new, leave = (a + b for a, b in zip(ahead, back, strict=True))
    cells = torch.sigmoid(forget) * cells + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cells), cells


def same_losses(model: Any, tutorial: Tutorial, batch: Batch) -> float:
    """How far the two losses and their gradients are apart, relative to them."""
    objective = CrossEntropy(label_smoothing=0.0)
    one, other = objective(model, batch).total, tutorial(batch)
    one.backward()
    other.backward()
    apart = abs(one.item() - other.item()) / abs(other.item())
    for own, given in zip(model.parameters(), tutorial.parameters(), strict=True):
        if own.grad is not None and given.grad is not None:
            apart = max(apart, float((own.grad - given.grad).norm() / (given.grad.norm() + 1e-6)))
        own.grad = given.grad = None
    return apart


def own(model: Any, batch: Batch, precision: str, device: torch.device) -> Contestant:
    settings = parse({"training": {"precision": precision}}).training
    optimiser = build_optimiser(settings.optimiser, model)
    update = Update(model, optimiser, CrossEntropy(label_smoothing=0.0), settings, Processes(), device)
    work, tokens = Work([Piece(0, batch)], int(batch.gold.mask.sum())), batch.tokens

    def run() -> int:
        update(work, 1, 1e-4)
        return tokens

    return Contestant(OURS, run)


def run(size: str, tokens: int, device: torch.device, repeats: int, precisions: list[str]) -> list[Measured]:
    shape = SIZES[size]
    batch = batch_of(shape, tokens, device, mixed=False)
    found: list[Measured] = []
    for cell in ("gru", "lstm"):
        model = model_of(shape, cell, {"kind": "bahdanau"}).to(device)
        tutorial = Tutorial(model)
        apart = same_losses(model, tutorial, batch)
        print(f"{cell}: losses and gradients differ by {apart:.1e} at most", flush=True)
        if apart > CLOSE:
            raise AssertionError(f"the tutorial loop computes something else: {apart}")
        for precision in precisions:
            after = model_of(shape, cell, {"kind": "luong", "score": "mlp", "input_feeding": False}).to(device)
            bf16, real = precision == "bf16", batch.tokens
            mean = 1 / int(batch.gold.mask.sum())

            def loss(tutorial: Tutorial = tutorial, mean: float = mean) -> Tensor:
                return tutorial(batch) * mean

            contestants = [
                own(copy.deepcopy(model).train(), batch, precision, device),
                Contestant("tutorial loop", peer(loss, tutorial, device, real, bf16)),
                Contestant(
                    "ours, attention after all steps",
                    own(after.train(), batch, precision, device).run,
                ),
            ]
            found += measure(f"{size} {cell} {precision}", contestants, device, repeats)
    return found
