"""Our Transformer against x-transformers' with copied weights: all tokens at once and one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.attention.positions import POSITIONS
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Memory, Padded
from transduce.layers.embedding import Embedding, Output

WIDTH, HEADS, HIDDEN, SIZE, LAYERS = 32, 4, 64, 11, 2
HEAD = WIDTH // HEADS
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Each case: our options, and theirs. Theirs have no biases where ours are switched off, and GELU unless told.
CASES = {
    "plain": ({}, {}),
    "rotary": ({"position": "rotary"}, {"rotary_pos_emb": True, "rotary_emb_dim": HEAD}),
    "alibi": ({"position": "alibi"}, {"alibi_pos_bias": True}),
    "relative": ({"position": "relative"}, {"rel_pos_bias": True}),
    "multi-query": ({"kv_heads": 1}, {"attn_kv_heads": 1}),
    "grouped": ({"kv_heads": 2}, {"attn_kv_heads": 2}),
    "gated": ({"gated": True}, {"ff_glu": True}),
    "swish": ({"gated": True, "activation": "silu"}, {"ff_glu": True, "ff_swish": True}),
    "relu": ({"activation": "relu"}, {"ff_custom_activation": nn.ReLU()}),
    "rms": ({"norm_kind": "rms"}, {"use_rmsnorm": True}),
    "after": ({"norm": "post"}, {"pre_norm": False}),
    "together": (
        {"position": "rotary", "kv_heads": 2, "gated": True, "activation": "silu", "norm_kind": "rms"},
        {
            "rotary_pos_emb": True,
            "rotary_emb_dim": HEAD,
            "attn_kv_heads": 2,
            "ff_glu": True,
            "ff_swish": True,
            "use_rmsnorm": True,
        },
    ),
}


def our_options(options: dict) -> dict:
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "ff_width": HIDDEN, "dropout": 0.0, "bias": False}
    chosen = {"position": "none", "activation": "gelu", **options}
    return {**sizes, **chosen, "position": POSITIONS[chosen["position"]]}


def their_options(options: dict) -> dict:
    sizes = {"dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": HEAD, "ff_mult": HIDDEN / WIDTH}
    return {**sizes, "ff_no_bias": True, "verbose": False, **options}


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """We turn row i of a head with row i + K/2, they turn neighbours: i goes to 2i, i + K/2 to 2i + 1."""
    return weight.unflatten(0, (heads, 2, HEAD // 2)).transpose(1, 2).flatten(0, 2)


def regrouped(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Our heads that share keys are neighbours, theirs lie `groups` apart."""
    return weight.unflatten(0, (groups, HEADS // groups, HEAD)).transpose(0, 1).flatten(0, 2)


def copy_norm(our_layer: nn.Module, other: nn.Module) -> None:
    nn.init.normal_(our_layer.weight, 1, 0.1)
    scale = other.gamma if hasattr(other, "gamma") else other.g
    scale.copy_(our_layer.weight - 1)  # theirs is added to 1


def copy_attention(our_layer, other, rotary: bool) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        nn.init.xavier_uniform_(getattr(our_layer, name).weight)
    turned = paired if rotary else lambda weight, heads: weight
    other.to_q.weight.copy_(regrouped(turned(our_layer.q_proj.weight, our_layer.heads), our_layer.kv_heads))
    other.to_k.weight.copy_(turned(our_layer.k_proj.weight, our_layer.kv_heads))
    other.to_v.weight.copy_(our_layer.v_proj.weight)
    other.to_out.weight.copy_(regrouped(our_layer.out_proj.weight.T, our_layer.kv_heads).T)


def copy_feed_forward(our_layer, other) -> None:
    first, last = other.ff[0], other.ff[-1]
    if our_layer.fc_gate is None:
        first[0].weight.copy_(our_layer.fc1.weight)
    else:
        first.proj.weight.copy_(torch.cat((our_layer.fc_gate.weight, our_layer.fc1.weight)))
        nn.init.zeros_(first.proj.bias)
    last.weight.copy_(our_layer.fc2.weight)


@torch.no_grad()
def copy(our_layer, other) -> None:
    """Our stack's weights into theirs."""
    kind = type(our_layer.position).__name__
    if kind == "RelativeBias":
        nn.init.normal_(our_layer.position.relative_attention_bias.weight)
        other.rel_pos.relative_attention_bias.weight.copy_(
            our_layer.position.relative_attention_bias.weight / HEAD**0.5
        )
    layers = iter(other.layers)
    for block in our_layer.layers:
        attentions = [(block.self_attention, kind == "Rotary")]
        attentions += (
            [] if block.cross_attention is None else [(block.cross_attention, False)]
        )  # positions speak in self-attention alone
        for residual, part in zip(block.residuals, [*attentions, None], strict=True):
            (before, _, after), layer, _ = next(layers)
            copy_norm(residual.norm, before if our_layer.final_norm is not None else after)
            if part is None:
                copy_feed_forward(block.feed_forward, layer)
            else:
                copy_attention(part[0], layer, part[1])
    if our_layer.final_norm is not None:
        copy_norm(our_layer.final_norm, other.final_norm)


def stepwise(decoder: TransformerDecoder, tokens: torch.Tensor, memory: Memory) -> torch.Tensor:
    state, logits = decoder.start(memory), []
    for step in range(tokens.size(1)):
        one = decoder.advance(tokens[:, step : step + 1], state)
        state, logits = one.state, [*logits, one.logits]
    return torch.cat(logits, 1)


@pytest.fixture(scope="module")
def theirs():
    """Imported where it is used: collecting tests does not wait for it."""
    return pytest.importorskip("x_transformers")


@pytest.mark.parametrize("case", CASES)
def test_encoder_decoder_equals_x_transformers(case, theirs):
    torch.manual_seed(1)
    ours, other = our_options(CASES[case][0]), their_options(CASES[case][1])
    encoder = TransformerEncoder(Embedding(SIZE, WIDTH), **ours).eval()
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), WIDTH, **ours).eval()
    their_encoder = theirs.Encoder(**other).eval()
    their_decoder = theirs.Decoder(cross_attend=True, **other).eval()
    copy(encoder, their_encoder)
    copy(decoder, their_decoder)

    source = Padded.from_rows([[5, 6, 7, 8, 9, 2], [4, 2], [8, 8, 2]])
    tokens = torch.randint(4, SIZE, (3, 40))  # T5's far buckets begin at a distance of 16
    memory = encoder(Batch(source))
    expected = their_encoder(encoder.embedding(source.values), mask=source.mask)
    assert_close(memory.values[source.mask], expected[source.mask], **CLOSE)
    hidden = their_decoder(decoder.embedding(tokens), context=expected, context_mask=source.mask)
    expected = decoder.output(hidden)
    assert_close(decoder.advance(tokens, decoder.start(memory)).logits, expected, **CLOSE)
    assert_close(stepwise(decoder, tokens, memory), expected, **CLOSE)


@pytest.mark.parametrize("case", ["plain", "rotary", "alibi", "relative", "together"])
def test_decoder_only_equals_x_transformers(case, theirs):
    torch.manual_seed(1)
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, **our_options(CASES[case][0])).eval()
    other = theirs.Decoder(**their_options(CASES[case][1])).eval()
    copy(decoder, other)
    tokens = torch.randint(4, SIZE, (3, 40))
    expected = decoder.output(other(decoder.embedding(tokens)))
    memory = Memory.empty(3)
    assert_close(decoder.advance(tokens, decoder.start(memory)).logits, expected, **CLOSE)
    assert_close(stepwise(decoder, tokens, memory), expected, **CLOSE)


@pytest.mark.parametrize("case", ["rotary", "alibi", "relative", "rms", "after"])
def test_each_option_changes_the_result(case):
    """Without the part the two differ: the comparison above could have failed."""
    torch.manual_seed(1)
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, **our_options(CASES[case][0])).eval()
    torch.manual_seed(1)
    plain = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, **our_options({})).eval()
    plain.load_state_dict(decoder.state_dict(), strict=False)
    tokens, start = torch.randint(4, SIZE, (3, 40)), decoder.start(Memory.empty(3))
    assert not torch.allclose(decoder.advance(tokens, start).logits, plain.advance(tokens, start).logits, **CLOSE)
