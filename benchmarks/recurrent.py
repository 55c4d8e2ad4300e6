"""Training speed of a recurrent encoder-decoder with additive attention and input feeding, against plain PyTorch loops.

Two loops have the same weights and compute the same function. The tutorial loop is written as in most tutorials: each
step projects the keys, computes single gates and the output logits. The optimised loop has the cells of torch and
nothing that can be computed outside: keys before it, logits after it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import OURS, Implementation, Measurement, measure
from benchmarks.marian import Size
from benchmarks.train import TrainingCase, batch_of, lazily, own, peer
from transduce.flow import Batch
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

SIZES = {
    "test": Size(16, 2, 1, 16, 50),
    "small": Size(256, 1, 1, 256, 8_000),
    "base": Size(512, 1, 1, 512, 16_000),
    "big": Size(1024, 2, 1, 1024, 32_000),
}
CLOSE = {"cpu": 2e-5, "cuda": 1e-3}  # of losses and gradients, in fp32, relative to them


def model_of(size: Size, cell: str, reader: dict[str, Any]) -> Any:
    common = {"kind": "recurrent", "cell": cell, "layers": size.layers, "width": size.width, "dropout": 0.0}
    recipe = complete_recipe(parse({"model": {"encoder": common, "decoder": {**common, "context": reader}}}))
    torch.manual_seed(1)
    return build_model(recipe.model, size.vocabulary, size.vocabulary)


class Loop(nn.Module):
    """Takes the weights of our model, and nothing else of its decoder."""

    def __init__(self, model: Any, careful: bool) -> None:
        super().__init__()
        self.inner, self.careful = copy.deepcopy(model), careful

    def forward(self, batch: Batch) -> Tensor:
        """The summed cross-entropy."""
        decoder = self.inner.decoder
        score, cells = decoder.context.attend.score, decoder.rnn.layers
        memory = self.inner.encoder(batch)
        state = [list(layer) for layer in decoder._initial_cells(memory)]
        gold = batch.labels.values.masked_fill(~batch.labels.mask, -100)
        tokens = decoder.embedding(batch.decoder_inputs.values)  # B T D
        keys, total, outputs = score.k_proj(memory.values), tokens.new_zeros(()), []
        for step in range(gold.size(1)):
            if not self.careful:
                keys = score.k_proj(memory.values)  # B S D
            energy = score.energy_proj(torch.tanh(score.q_proj(state[-1][0])[:, None] + keys)).squeeze(-1)  # B S
            weights = energy.masked_fill(~memory.mask, -torch.inf).softmax(-1)
            context = (weights[:, None] @ memory.values).squeeze(1)  # B D
            values = torch.cat((tokens[:, step], context), -1)
            for number, cell in enumerate(cells):
                state[number] = (fused_step if self.careful else one_step)(cell, values, state[number])
                values = state[number][0]
            output = torch.cat((values, context), -1)
            if self.careful:
                outputs.append(output)
            else:
                total = total + self.say(output, gold[:, step])
        return self.say(torch.stack(outputs, 1), gold) if self.careful else total

    def say(self, output: Tensor, gold: Tensor) -> Tensor:
        logits = self.inner.decoder.output(self.inner.decoder.readout(output)).float()
        return F.cross_entropy(logits.flatten(0, -2), gold.flatten(), ignore_index=-100, reduction="sum")


def fused_step(cell: Any, inputs: Tensor, state: list[Tensor]) -> list[Tensor]:
    """One step by torch's own cell."""
    weights = (cell.weight_ih_l0, cell.weight_hh_l0, cell.bias_ih_l0, cell.bias_hh_l0)
    if len(state) == 1:
        return [torch.gru_cell(inputs, state[0].to(inputs), *weights)]
    return list(torch.lstm_cell(inputs, [part.to(inputs) for part in state], *weights))


def one_step(cell: Any, inputs: Tensor, state: list[Tensor]) -> list[Tensor]:
    """One step of an LSTM or a GRU by its equations, gate by gate."""
    hidden, gates = state[0], 3 if len(state) == 1 else 4
    ahead = [
        F.linear(inputs, w, b)
        for w, b in zip(cell.weight_ih_l0.chunk(gates), cell.bias_ih_l0.chunk(gates), strict=True)
    ]
    back = [
        F.linear(hidden, w, b)
        for w, b in zip(cell.weight_hh_l0.chunk(gates), cell.bias_hh_l0.chunk(gates), strict=True)
    ]
    if gates == 3:
        reset, update = torch.sigmoid(ahead[0] + back[0]), torch.sigmoid(ahead[1] + back[1])
        new = torch.tanh(ahead[2] + reset * back[2])
        return [(1 - update) * new + update * hidden]
    enter, forget, new, leave = (a + b for a, b in zip(ahead, back, strict=True))
    cells = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return [torch.sigmoid(leave) * torch.tanh(cells), cells]


def same_losses(model: Any, loop: Loop, batch: Batch) -> float:
    """How far the two losses and their gradients are apart, relative to them."""
    objective = CrossEntropy(label_smoothing=0.0)
    one, other = objective(model, batch).total, loop(batch)
    one.backward()
    other.backward()
    apart = abs(one.item() - other.item()) / abs(other.item())
    whole = float(torch.stack([p.grad.norm() for p in loop.parameters() if p.grad is not None]).norm())
    for mine, given in zip(model.parameters(), loop.parameters(), strict=True):
        if mine.grad is not None and given.grad is not None:
            # A matrix that hardly learns has a gradient of roundings: a thousandth of all is none.
            apart = max(apart, float((mine.grad - given.grad).norm() / (given.grad.norm() + 1e-3 * whole)))
        mine.grad = given.grad = None
    return apart


def implementations(model: Any, after: Any, case: TrainingCase) -> list[Implementation]:
    batch = case.batches[0]
    mean = 1 / int(batch.labels.mask.sum())

    def ours(network: Any, **options: Any) -> Any:
        return lazily(lambda: own(copy.deepcopy(network), case, **options))

    def loop(careful: bool) -> Any:
        def build() -> Any:
            made = Loop(model, careful).train()
            return peer([lambda: made(batch) * mean], made, case.device, case.tokens, case.bf16)

        return lazily(build)

    found = [
        Implementation(OURS, ours(model)),
        Implementation("tutorial loop", loop(False)),
        Implementation("careful loop", loop(True)),
        Implementation("ours, attention after all steps", ours(after)),
    ]
    if case.device.type == "cuda":
        found.insert(1, Implementation(f"{OURS} eager", ours(model, cuda_graphs=False)))
    return found


def run(
    size: str, tokens: int, device: torch.device, repeats: int, precisions: list[str], clock: str = "wall"
) -> list[Measurement]:
    shape = SIZES[size]
    batch = batch_of(shape, tokens, device)
    found: list[Measurement] = []
    for cell in ("gru", "lstm"):
        model = model_of(shape, cell, {"kind": "bahdanau"}).to(device)
        for careful in (False, True):
            apart = same_losses(model, Loop(model, careful), batch)
            print(f"{cell}: losses and gradients differ by {apart:.1e} at most", flush=True)
            if apart > CLOSE[device.type]:
                raise AssertionError(f"the loop computes something else: {apart}")
        after = model_of(shape, cell, {"kind": "luong", "score": "mlp", "input_feeding": False})
        for precision in precisions:
            case = TrainingCase([batch], device, precision == "bf16", compiles=False, smoothing=0.0)
            found += measure(f"{size} {cell} {precision}", implementations(model, after, case), device, repeats, clock)
    return found
