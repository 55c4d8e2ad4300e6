"""Training speed against transformers' Marian and torch.nn.Transformer: the same sizes, batch and precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import OURS, Contestant, Measured, measure
from benchmarks.marian import SIZES, Size, ours, theirs
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.training.devices import Processes
from transduce.training.optimisers import build_optimiser
from transduce.training.update import Piece, Update, Work

SMOOTHING = 0.1


def batch_of(size: Size, tokens: int, device: torch.device, mixed: bool) -> Batch:
    """About `tokens` source + target tokens; mixed: lengths 8 to 56 around 32, sorted like a pool would be."""
    torch.manual_seed(3)
    rows = tokens // 64
    lengths = torch.full((rows,), 32) if not mixed else torch.randint(8, 57, (rows,))
    ids = [torch.randint(4, size.vocabulary, (int(length),)).tolist() for length in lengths]
    source = Padded.from_rows([[*row[:-1], EOS] for row in ids])
    target = Padded.from_rows([[BOS, *row[:-1], EOS] for row in ids])
    return Batch(source, target, rows=tuple(range(rows))).to(device)


class Plain(nn.Module):
    """torch.nn.Transformer with embeddings and a tied output layer."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.width, PAD)
        self.places = nn.Embedding(512, size.width)
        self.inner = nn.Transformer(
            size.width, size.heads, size.layers, size.layers, size.hidden, dropout, batch_first=True
        )
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))
        self.width = size.width

    def embed(self, ids: Tensor) -> Tensor:
        return self.table(ids) * math.sqrt(self.width) + self.places.weight[: ids.size(1)]

    def forward(self, source: Tensor, target: Tensor, real: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        found = self.inner(
            self.embed(source), self.embed(target), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=~real, memory_key_padding_mask=~real,
        )  # fmt: skip
        return F.linear(found, self.table.weight, self.bias)


def peer(
    loss: Callable[[], Tensor], model: nn.Module, device: torch.device, tokens: int, bf16: bool
) -> Callable[[], int]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> int:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return tokens

    return step


def run(
    size: str, tokens: int, device: torch.device, bf16: bool, repeats: int, compiled: bool, mixed: bool, only: str
) -> list[Measured]:
    shape = SIZES[size]
    batch = batch_of(shape, tokens, device, mixed)
    assert batch.source is not None
    real = batch.tokens
    found: list[Contestant] = []
    settings = parse({"training": {"precision": "bf16" if bf16 else "fp32"}}).training
    kinds = {OURS: {"record": True, "compile": compiled}, f"{OURS} eager": {"record": False}}
    if device.type == "cuda" and compiled:
        kinds[f"{OURS} recorded"] = {"record": True}
    for name, options in kinds.items():
        model = ours(shape, theirs(shape)).to(device).train()
        chosen = settings.model_copy(update=options)
        optimiser = build_optimiser(chosen.optimiser, model)
        update = Update(model, optimiser, CrossEntropy(label_smoothing=SMOOTHING), chosen, Processes(), device)
        work = Work([Piece(0, batch)], int(batch.gold.mask.sum()))

        def own(update: Update = update, work: Work = work) -> int:
            update(work, 1, 1e-4)
            return real

        for _ in range(3):  # a shape is recorded when it comes again
            own()
        found.append(Contestant(name, own))
    if only != "ours":
        found += peers(shape, batch, device, bf16, compiled, real)
    return measure(f"{size} {tokens} tokens {'mixed' if mixed else 'even'}", found, device, repeats)


def peers(shape: Size, batch: Batch, device: torch.device, bf16: bool, compiled: bool, tokens: int) -> list[Contestant]:
    assert batch.source is not None
    source, gold = batch.source, batch.gold
    truth = gold.values.masked_fill(~gold.mask, -100)
    found = []
    for compiles in [False, True] if compiled else [False]:
        other: Any = theirs(shape).to(device).train()
        plain: Any = Plain(shape, 0.1).to(device)
        hf, nt = (torch.compile(other), torch.compile(plain)) if compiles else (other, plain)

        def smoothed(logits: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), label_smoothing=SMOOTHING)

        def one(hf: Any = hf) -> Tensor:
            made = hf(input_ids=source.values, attention_mask=source.mask.long(), decoder_input_ids=batch.inputs.values)
            return smoothed(made.logits)

        def two(nt: Any = nt) -> Tensor:
            return smoothed(nt(source.values, batch.inputs.values, source.mask))

        suffix = " compiled" if compiles else ""
        found.append(Contestant(f"transformers{suffix}", peer(one, other, device, tokens, bf16)))
        found.append(Contestant(f"nn.Transformer{suffix}", peer(two, plain, device, tokens, bf16)))
    return found
