"""Training speed against transformers, torch.nn.Transformer and x-transformers: the same sizes, batches and precision.

All implementations have the same batches, optimiser and clipping; tokens are source and target tokens without padding.
`--compile` also runs each of them compiled together with its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import OURS, Implementation, Measurement, measure
from benchmarks.marian import PLACES, SIZES, Size, ours, theirs
from transduce.attention.positions import max_positions
from transduce.data.batching import EpochPlan, Packing, collate, packed_lengths
from transduce.data.row_selection import RandomPermutation, SeededRandom
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.kernels.cuda_graph import pad_to_bucket
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.training.distributed import Processes
from transduce.training.optimisers import build_optimiser
from transduce.training.update import MicroBatch, Update, UpdateBatch

SMOOTHING = 0.1
PEAK = 989e12  # bf16 FLOP/s of an H100 or H200, by its data sheet
MIXED = 6  # batches of different lengths in one run
Step = Callable[[], int]


@dataclass(frozen=True)
class TrainingCase:
    """What all implementations have in common."""

    batches: list[Batch]
    device: torch.device
    bf16: bool
    compiles: bool  # also compiled
    smoothing: float = SMOOTHING
    packed: list[Batch] = field(default_factory=list)  # the same pairs, several in a row

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)


def batch_of(size: Size, tokens: int, device: torch.device) -> Batch:
    """`tokens` source + target tokens in rows of 32 each."""
    torch.manual_seed(3)
    return _random(size, [(32, 32)] * max(1, tokens // 64)).to(device)


def in_turn(batch: Batch) -> list[Batch]:
    """The batches of one run: on a GPU the same one several times, since updates begin while the last one goes on."""
    return [batch] * (4 if batch.decoder_inputs.values.is_cuda else 1)


def _plan(widths: np.ndarray, tokens: int, packing: Packing | None = None) -> EpochPlan:
    """As for training."""
    draw = SeededRandom("order", 1, 0)
    return EpochPlan(widths, RandomPermutation(len(widths), draw), tokens, 100, draw, packing)


def packed_batches(batches: list[Batch], tokens: int) -> list[Batch]:
    """The pairs of padded batches in packed ones, planned as for training."""
    parts = [[batch.source for batch in batches], [batch.labels for batch in batches]]
    sides = [
        [row[mask].cpu().numpy() for part in side if part for row, mask in zip(part.values, part.mask, strict=True)]
        for side in parts
    ]
    widths = np.array([[len(source), len(said) + 1] for source, said in zip(*sides, strict=True)])
    packing = Packing.for_budget(tokens, packed_lengths(widths))
    assert packing is not None, "there are too few tokens for a row"
    plan = _plan(widths, tokens, packing)
    made = []
    for index in range(len(plan)):
        planned = plan.batch(index)
        chosen = [[side[row] for row in planned.rows] for side in sides]
        if planned.bins is None:  # too long for its rows
            pairs = [(source[:-1].tolist(), said[:-1].tolist()) for source, said in zip(*chosen, strict=True)]
            made.append(collate(pairs, range(len(pairs))))
        else:
            source, said = ((np.concatenate(rows), np.array(list(map(len, rows)))) for rows in chosen)
            made.append(packing.pack((source, said), planned.bins))
    return [batch.to(batches[0].device) for batch in made]


def mixed_batches(size: Size, tokens: int, device: torch.device) -> list[Batch]:
    """Lengths as in text, log-normal around 25, targets within a quarter of their sources; planned as for training."""
    draw = np.random.default_rng(3)
    source = np.exp(draw.normal(math.log(25), 0.5, tokens * 2)).clip(3, 120)  # some hundred batches
    target = (source * draw.uniform(0.75, 1.25, len(source))).clip(3, 120)
    widths = np.stack((source, target), 1).astype(np.int64)
    plan = _plan(widths, tokens)
    torch.manual_seed(3)
    return [_random(size, widths[plan.batch(index).rows].tolist()).to(device) for index in range(MIXED)]


def _random(size: Size, lengths: list[tuple[int, int]]) -> Batch:
    def ids(length: int) -> list[int]:
        return torch.randint(4, size.vocabulary, (length - 1,)).tolist()

    source = Padded.from_rows([[*ids(one), EOS] for one, _ in lengths])
    target = Padded.from_rows([[BOS, *ids(other), EOS] for _, other in lengths])
    return Batch(source, target, rows=tuple(range(len(lengths))))


def flops(size: Size, batch: Batch) -> float:
    """Of forward and backward, of the real tokens alone: 3 times the products of the forward pass."""
    assert batch.source is not None
    width, near = size.width, 2 * size.width * size.ff_width
    sources, targets = batch.source.mask.sum(1).double(), batch.labels.mask.sum(1).double()
    once = 2 * size.layers * (4 * width**2 + near + 2 * width**2)  # with keys and values for the decoder
    said = 2 * size.layers * (6 * width**2 + near) + 2 * width * size.vocabulary
    looked = 4 * size.layers * width * (sources**2 + targets**2 / 2 + sources * targets)
    return 3 * float((once * sources + said * targets + looked).sum())


class Plain(nn.Module):
    """torch.nn.Transformer with embeddings and a tied output layer."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.width, PAD)
        self.places = nn.Embedding(512, size.width)
        self.inner = nn.Transformer(
            size.width, size.heads, size.layers, size.layers, size.ff_width, dropout, batch_first=True
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


def peer(losses: list[Callable[[], Tensor]], model: nn.Module, device: torch.device, tokens: int, bf16: bool) -> Step:
    """One update for each loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> int:
        for loss in losses:
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                value = loss()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        return tokens

    return step


def own(model: nn.Module, case: TrainingCase, **options: Any) -> Step:
    """Our updates, with these settings of a recipe."""
    batches = case.packed if options.get("packing") else case.batches
    settings = parse({"training": {"precision": "bf16" if case.bf16 else "fp32", **options}}).training
    model = model.to(case.device).train()
    objective = CrossEntropy(label_smoothing=case.smoothing)
    update = Update(model, build_optimiser(settings.optimiser, model), objective, settings, Processes(), case.device)
    budget = max(batch.slots for batch in batches)

    def shaped(batch: Batch) -> Batch:  # as in training/update.py
        return (
            pad_to_bucket(batch, budget, max_positions(model))
            if update.uses_cuda_graphs and batch.packed_labels is None
            else batch
        )

    work = [UpdateBatch([MicroBatch(0, shaped(batch))], objective.count(batch)) for batch in batches]
    tokens = case.tokens

    def step() -> int:
        before = None
        for one in work:
            launched = update.launch(one, 1, 1e-4)
            if before is not None:
                before.result()  # one update later, as in training
            before = launched
        launched.result()
        return tokens

    for _ in range(3 if update.uses_cuda_graphs else 0):  # a shape is recorded when it comes again
        step()
    if update.graphs is not None and (update.graphs.failed or not update.graphs.captured):
        raise AssertionError("nothing was recorded")
    return step


def lazily(build: Callable[[], Step]) -> Step:
    """Built in its first run: what goes wrong there is that contestant's own affair."""
    made: list[Step] = []

    def run() -> int:
        if not made:
            made.append(build())
        return made[0]()

    return run


def own_implementations(make: Callable[[], nn.Module], case: TrainingCase) -> list[Implementation]:
    """Ours as it runs by itself and in the other ways it can run. What is not told apart on a CPU runs once."""
    kinds: dict[str, dict[str, Any]] = {OURS: {}}
    if case.device.type == "cuda":
        kinds[f"{OURS} eager"] = {"cuda_graphs": False}
    if case.packed:
        kinds = {OURS: {"packing": True}, f"{OURS} padded": {}, **{name: kinds[name] for name in kinds if name != OURS}}
    if case.compiles:
        kinds[f"{OURS} compiled"] = {"compile": True}

    def start(options: dict[str, Any]) -> Step:
        return lazily(lambda: own(make(), case, **options))

    return [Implementation(name, start(options)) for name, options in kinds.items()]


def peer_implementations(
    name: str, make: Callable[[], nn.Module], loss: Callable[[Any, Batch], Tensor], case: TrainingCase
) -> list[Implementation]:
    """One as it is and, where args for, compiled together with its loss."""

    def start(compiles: bool) -> Step:
        def build() -> Step:
            model = make().to(case.device).train()
            program = torch.compile(loss) if compiles else loss
            losses = [lambda batch=batch: program(model, batch) for batch in case.batches]
            return peer(losses, model, case.device, case.tokens, case.bf16)

        return lazily(build)

    kinds = {name: False, f"{name} compiled": True} if case.compiles else {name: False}
    return [Implementation(kind, start(compiles)) for kind, compiles in kinds.items()]


def smoothed(logits: Tensor, gold: Padded, smoothing: float) -> Tensor:
    truth = gold.values.masked_fill(~gold.mask, -100)
    return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), label_smoothing=smoothing)


def marian_loss(model: Any, batch: Batch) -> Tensor:
    assert batch.source is not None
    source, mask = batch.source.values, batch.source.mask.long()
    made = model(input_ids=source, attention_mask=mask, decoder_input_ids=batch.decoder_inputs.values, use_cache=False)
    return smoothed(made.logits, batch.labels, SMOOTHING)


def plain_loss(model: Any, batch: Batch) -> Tensor:
    assert batch.source is not None
    return smoothed(model(batch.source.values, batch.decoder_inputs.values, batch.source.mask), batch.labels, SMOOTHING)


def crossed(size: Size, dropout: float) -> Any:
    """x-transformers' encoder-decoder with its fused attention; its dropout is in the feed-forward layers alone."""
    from x_transformers import XTransformer

    def side(name: str) -> dict[str, Any]:
        options = {
            "num_tokens": size.vocabulary, "max_seq_len": PLACES, "depth": size.layers, "heads": size.heads,
            "attn_dim_head": size.width // size.heads, "ff_mult": size.ff_width / size.width, "attn_flash": True,
            "ff_dropout": dropout, "emb_dropout": dropout,
        }  # fmt: skip
        return {f"{name}_{option}": value for option, value in options.items()}

    return XTransformer(dim=size.width, tie_token_emb=True, **side("enc"), **side("dec"))


def crossed_loss(model: Any, batch: Batch) -> Tensor:
    assert batch.source is not None
    mask = batch.source.mask
    memory = model.encoder(batch.source.values, mask=mask, return_embeddings=True)
    logits = model.decoder.net(batch.decoder_inputs.values, context=memory, context_mask=mask)
    return smoothed(logits, batch.labels, SMOOTHING)


def report(rows: list[Measurement], count: float, tokens: int) -> list[Measurement]:
    """Says how much of a large GPU's arithmetic each contestant used."""
    each = count / tokens
    print(f"{each / 1e6:.1f} MFLOP a token, forward and backward", flush=True)
    for row in rows:
        done = row.tokens_per_second * each
        print(f"  {row.name}: {done / 1e12:.2f} TFLOP/s, {done / PEAK:.1%} of {PEAK / 1e12:.0f}", flush=True)
    return rows


def run(
    size: str, tokens: int, case: TrainingCase, repeats: int, only: Sequence[str] = (), clock: str = "wall"
) -> list[Measurement]:
    shape = SIZES[size]
    mixed = len({id(batch) for batch in case.batches}) > 1
    found = own_implementations(lambda: ours(shape, theirs(shape)), case)
    found += peer_implementations("transformers", lambda: theirs(shape), marian_loss, case)
    found += peer_implementations("nn.Transformer", lambda: Plain(shape, 0.1), plain_loss, case)
    found += peer_implementations("x-transformers", lambda: crossed(shape, 0.1), crossed_loss, case)
    found = [one for one in found if not only or one.name in only]
    if mixed:
        padding = 1 - case.tokens / sum(batch.slots for batch in case.batches)
        print(f"{len(case.batches)} batches of mixed lengths, {padding:.1%} padding", flush=True)
    if case.packed:
        padding = 1 - sum(batch.tokens for batch in case.packed) / sum(batch.slots for batch in case.packed)
        print(f"{len(case.packed)} packed batches of the same pairs, {padding:.1%} padding", flush=True)
    rows = measure(f"{size} {tokens} tokens {'mixed' if mixed else 'even'}", found, case.device, repeats, clock)
    return report(rows, sum(flops(shape, batch) for batch in case.batches), case.tokens)
