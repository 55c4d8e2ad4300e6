"""Training speed of a decoder-only model of the shape of GPT-2 against transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Measurement, measure
from benchmarks.marian import Size
from benchmarks.train import TrainingCase, in_turn, own_implementations, peer_implementations, report, smoothed
from transduce.attention.positions import Learned
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import BOS, Batch, Padded
from transduce.layers.embedding import Embedding, Output
from transduce.model import DecoderOnly
from transduce.objectives import CrossEntropy

SIZES = {
    "test": Size(32, 2, 2, 128, 100),
    "small": Size(320, 6, 5, 1280, 8_000),  # 10 million
    "base": Size(768, 12, 12, 3072, 50_257),  # 124 million
}
PLACES = {"test": 16, "small": 256, "base": 1024}
CLOSE = 1e-4  # of the losses, in fp32, relative to them


def theirs(size: Size, places: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary, n_positions=places, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=BOS, eos_token_id=BOS,
    )  # fmt: skip
    torch.manual_seed(1)
    return GPT2LMHeadModel(config)


def ours(size: Size, places: int, other: Any) -> DecoderOnly:
    """Our blocks with the same weights."""
    table = Embedding(size.vocabulary, size.width, scale_embedding=False)
    output = Output(size.width, size.vocabulary, table)
    position: Any = partial(Learned, max_positions=places)
    decoder = TransformerDecoder(
        table, output, 0, layers=size.layers, width=size.width, heads=size.heads, ff_width=size.ff_width,
        activation="gelu_tanh", position=position, dropout=0.0,
    )  # fmt: skip
    given = other.transformer
    with torch.no_grad():
        table.weight.copy_(given.wte.weight)
        decoder.position.embed_positions.weight.copy_(given.wpe.weight)
        _copy(decoder.final_norm, given.ln_f)
        for block, layer in zip(decoder.layers, given.h, strict=True):
            attention: Any = block.self_attention
            joint = zip(layer.attn.c_attn.weight.chunk(3, 1), layer.attn.c_attn.bias.chunk(3), strict=True)
            for mine, (weight, bias) in zip((attention.q_proj, attention.k_proj, attention.v_proj), joint, strict=True):
                mine.weight.copy_(weight.T)
                mine.bias.copy_(bias)
            for mine, inner in (
                (attention.out_proj, layer.attn.c_proj),
                (block.feed_forward.fc1, layer.mlp.c_fc),
                (block.feed_forward.fc2, layer.mlp.c_proj),
            ):
                mine.weight.copy_(inner.weight.T)  # theirs are inputs x outputs
                mine.bias.copy_(inner.bias)
            _copy(block.residuals[0].norm, layer.ln_1)
            _copy(block.residuals[1].norm, layer.ln_2)
    return DecoderOnly(decoder)


def _copy(mine: Any, given: nn.Module) -> None:
    mine.weight.copy_(given.weight)
    mine.bias.copy_(given.bias)


def batch_of(size: Size, places: int, tokens: int, device: torch.device) -> Batch:
    """Rows of full length, so many that about `tokens` are foretold."""
    torch.manual_seed(3)
    ids = torch.randint(4, size.vocabulary, (max(1, tokens // places), places + 1), device=device)
    ids[:, 0] = BOS
    return Batch(target=Padded(ids, torch.ones_like(ids, dtype=torch.bool)), rows=tuple(range(len(ids))))


def loss(model: Any, batch: Batch) -> Tensor:
    return smoothed(model(input_ids=batch.decoder_inputs.values, use_cache=False).logits, batch.labels, 0.0)


def flops(size: Size, rows: int, places: int) -> float:
    """Of forward and backward: 3 times the products of the forward pass, attention over half a square."""
    matrices = size.layers * (4 * size.width**2 + 2 * size.width * size.ff_width) + size.width * size.vocabulary
    return 3.0 * rows * places * (2 * matrices + 2 * size.layers * size.width * places)


def apart(shape: Size, places: int, batch: Batch) -> float:
    """How far the losses of two rows are from each other, relative to them, with the same weights in fp32."""
    other = theirs(shape, places).to(batch.device).eval()
    few = batch.select(torch.arange(min(2, batch.size)))
    with torch.no_grad():
        given = loss(other, few)
        found = CrossEntropy(label_smoothing=0.0)(ours(shape, places, other).to(batch.device).eval(), few)
    return abs(found.total.item() / few.labels.mask.sum().item() - given.item()) / given.item()


def run(size: str, tokens: int, case: TrainingCase, repeats: int, only: Sequence[str] = ()) -> list[Measurement]:
    shape, places = SIZES[size], PLACES[size]
    batch = batch_of(shape, places, tokens, case.device)
    difference = apart(shape, places, batch)
    print(f"losses differ by {difference:.1e}", flush=True)
    if difference > CLOSE:
        raise AssertionError(f"the two models compute something else: {difference}")
    case = TrainingCase(in_turn(batch), case.device, case.bf16, case.compiles, smoothing=0.0)
    found = own_implementations(lambda: ours(shape, places, theirs(shape, places)), case)
    found += peer_implementations("transformers", lambda: theirs(shape, places), loss, case)
    found = [one for one in found if not only or one.name in only]
    rows = measure(f"GPT-2 {size}, {batch.size} rows of {places}", found, case.device, repeats)
    return report(rows, flops(shape, batch.size, places) * len(case.batches), case.tokens)
