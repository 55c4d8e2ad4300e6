"""Marian models of transformers with random weights, and our model with the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from transduce.attention.positions import Learned
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import BOS, EOS, PAD
from transduce.layers.embedding import Embedding, Output
from transduce.model import EncoderDecoder

PLACES = 512


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    ff_width: int
    vocabulary: int


SIZES = {
    "test": Size(32, 2, 2, 64, 100),
    "small": Size(256, 3, 4, 1024, 8_000),
    "tiny": Size(256, 3, 4, 1024, 32_000),
    "base": Size(512, 6, 8, 2048, 32_000),
    "big": Size(1024, 6, 16, 4096, 32_000),
}


def theirs(size: Size, dropout: float = 0.1) -> Any:
    """transformers' model. Its output bias is drawn too, so that tokens differ from step to step."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=size.vocabulary,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.ff_width,
        decoder_ffn_dim=size.ff_width,
        max_position_embeddings=PLACES,
        scale_embedding=True,
        activation_function="relu",
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    torch.manual_seed(1)
    model = MarianMTModel(config)
    with torch.no_grad():
        model.final_logits_bias.normal_(std=0.5)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)  # larger weights: no two tokens are nearly as good as each other
    return model.eval()


def ours(size: Size, other: Any, dropout: float = 0.1) -> EncoderDecoder:
    """Our blocks with the same weights."""
    from functools import partial

    options: dict[str, Any] = {
        "layers": size.layers,
        "width": size.width,
        "heads": size.heads,
        "ff_width": size.ff_width,
        "norm": "post",
        "position": partial(Learned, max_positions=PLACES),
        "dropout": dropout,
    }
    table = Embedding(size.vocabulary, size.width)
    output = Output(size.width, size.vocabulary, table)
    encoder = TransformerEncoder(table, **options)
    decoder = TransformerDecoder(table, output, size.width, **options)
    model = EncoderDecoder(encoder, decoder)
    with torch.no_grad():
        table.weight.copy_(other.model.shared.weight * _rescale(size, other))
        output.projection.bias.copy_(other.final_logits_bias[0])
        for own, given in ((encoder, other.model.encoder), (decoder, other.model.decoder)):
            own.position.embed_positions.weight.copy_(given.embed_positions.weight)
            for block, layer in zip(own.layers, given.layers, strict=True):
                _copy_layer(block, layer)
    return model.eval()


def _rescale(size: Size, other: Any) -> float:
    """Both scale embeddings by sqrt(width) on reading."""
    return float(other.model.encoder.embed_scale) / math.sqrt(size.width)


def _copy_layer(own: Any, other: Any) -> None:
    attentions = [(own.self_attention, other.self_attn)]
    norms = [other.self_attn_layer_norm]
    if own.cross_attention is not None:
        attentions.append((own.cross_attention, other.encoder_attn))
        norms.append(other.encoder_attn_layer_norm)
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (own.feed_forward.fc1, other.fc1),
        (own.feed_forward.fc2, other.fc2),
    ]
    for mine, given in attentions:
        pairs += [(mine.q_proj, given.q_proj), (mine.k_proj, given.k_proj)]
        pairs += [(mine.v_proj, given.v_proj), (mine.out_proj, given.out_proj)]
    pairs += [(r.norm, n) for r, n in zip(own.residuals, [*norms, other.final_layer_norm], strict=True)]
    for mine, given in pairs:
        mine.weight.copy_(given.weight)
        mine.bias.copy_(given.bias)
