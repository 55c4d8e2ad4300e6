"""Small Transformer models of every form in which decoders are lowered, and a batch for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from transduce.attention.positions import Learned, NoPosition
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Padded
from transduce.layers.embedding import Embedding, Output
from transduce.model import DecoderOnly, EncoderDecoder, Transducer

VOCABULARY, WIDTH = 40, 64
COMMON: dict[str, Any] = {"layers": 2, "width": WIDTH, "heads": 2, "ff_width": 96, "dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "gelu": {"norm": "post", "activation": "gelu", "position": partial(Learned, max_positions=24)},
    "gated": {"activation": "silu", "gated": True, "bias": False},
    "gated, post-norm": {"norm": "post", "activation": "gelu_tanh", "gated": True},
    "grouped queries": {"kv_heads": 1, "position": NoPosition},
    "window": {"window": 2, "norm": "post"},
    "embedding norm": {"embedding_norm": True},
    "embedding norm, post-norm": {"embedding_norm": True, "norm": "post", "norm_eps": 1e-3},
    "wide heads": {"head_width": 32, "heads": 4},
}


def build(options: dict[str, Any], *, alone: bool = False) -> Transducer:
    """Random norms and biases too: a part that is left out must show."""
    options = {**COMMON, **options}
    table = Embedding(VOCABULARY, WIDTH)
    decoder = TransformerDecoder(table, Output(WIDTH, VOCABULARY, table), 0 if alone else WIDTH, **options)
    made: Transducer = DecoderOnly(decoder)
    if not alone:
        plain = {name: value for name, value in options.items() if name not in ("window", "kv_heads", "head_width")}
        made = EncoderDecoder(TransformerEncoder(table, **{**plain, "heads": 2}), decoder)
    for name, parameter in made.named_parameters():
        if not name.endswith(("embedding.weight", "embed_positions.weight")):
            nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return made.eval()


def sources() -> Batch:
    ids = torch.randint(4, VOCABULARY, (3, 7))
    mask = torch.arange(7) < torch.tensor([[7], [5], [2]])
    return Batch(Padded(ids * mask, mask))
