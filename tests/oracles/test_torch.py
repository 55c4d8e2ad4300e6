"""Our blocks against torch.nn's, with copied weights: an independent implementation must agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.attention.positions import NoPosition
from transduce.attention.scores import MLP, Bilinear, Dot, ScaledDot
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.recurrent import RecurrentEncoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Memory, Padded
from transduce.layers.embedding import Embedding, Output
from transduce.layers.recurrent import CELLS, RecurrentStack

WIDTH, HEADS, HIDDEN, SIZE = 16, 4, 40, 9
SIZES = {"layers": 2, "width": WIDTH, "heads": HEADS, "ff_width": HIDDEN, "dropout": 0.0, "position": NoPosition}


def copy_attention(our_layer, other: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        for part, layer in zip((0, 1, 2), (our_layer.q_proj, our_layer.k_proj, our_layer.v_proj), strict=True):
            rows = slice(part * WIDTH, (part + 1) * WIDTH)
            nn.init.normal_(layer.bias, std=0.1)
            other.in_proj_weight[rows] = layer.weight
            other.in_proj_bias[rows] = layer.bias
        other.out_proj.load_state_dict(our_layer.out_proj.state_dict())


def copy_rest(our_layer, other, residuals, norms) -> None:
    other.linear1.load_state_dict(our_layer.feed_forward.fc1.state_dict())
    other.linear2.load_state_dict(our_layer.feed_forward.fc2.state_dict())
    for residual, norm in zip(residuals, norms, strict=True):
        nn.init.normal_(residual.norm.weight, 1, 0.1)
        norm.load_state_dict(residual.norm.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_equals_torch(norm, activation):
    first, before = norm == "pre", {"batch_first": True, "dropout": 0.0, "activation": activation}
    ours_in = TransformerEncoder(Embedding(SIZE, WIDTH), norm=norm, activation=activation, **SIZES).eval()
    ours_out = TransformerDecoder(
        Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), WIDTH, norm=norm, activation=activation, **SIZES
    ).eval()
    theirs_in = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, norm_first=first, **before),
        2,
        nn.LayerNorm(WIDTH) if first else None,
        enable_nested_tensor=False,
    ).eval()
    theirs_out = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, norm_first=first, **before),
        2,
        nn.LayerNorm(WIDTH) if first else None,
    ).eval()
    for our_layer, other in zip(ours_in.layers, theirs_in.layers, strict=True):
        copy_attention(our_layer.self_attention, other.self_attn)
        copy_rest(our_layer, other, our_layer.residuals, (other.norm1, other.norm2))
    for our_layer, other in zip(ours_out.layers, theirs_out.layers, strict=True):
        copy_attention(our_layer.self_attention, other.self_attn)
        copy_attention(our_layer.cross_attention, other.multihead_attn)
        copy_rest(our_layer, other, our_layer.residuals, (other.norm1, other.norm2, other.norm3))

    source = Padded.from_rows([[5, 6, 7, 2], [4, 2], [8, 8, 2]])
    tokens = torch.tensor([[1, 5, 6], [1, 4, 4], [1, 8, 7]])
    memory = ours_in(Batch(source))
    expected = theirs_in(ours_in.embedding(source.values), src_key_padding_mask=~source.mask)
    assert_close(memory.values[source.mask], expected[source.mask])
    hidden = theirs_out(
        ours_out.embedding(tokens),
        expected,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(3),
        memory_key_padding_mask=~source.mask,
    )
    logits = ours_out.advance(tokens, ours_out.start(memory)).logits
    assert_close(logits, ours_out.output(hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_encoder_equals_torch(cell, bidirectional):
    """A stack of one-layer networks against torch's own stacked one."""
    encoder = RecurrentEncoder(
        Embedding(SIZE, WIDTH), cell=cell, layers=2, width=WIDTH, bidirectional=bidirectional, dropout=0.0
    ).eval()
    theirs = CELLS[cell](
        WIDTH, WIDTH // (1 + bidirectional), num_layers=2, batch_first=True, bidirectional=bidirectional
    )
    for number, layer in enumerate(encoder.rnn.layers):
        for name, value in layer.named_parameters():
            getattr(theirs, name.replace("_l0", f"_l{number}")).data.copy_(value)
    for row in ([5, 6, 7, 2], [4, 2]):
        memory = encoder(Batch(Padded.from_rows([row])))
        values, last = theirs(encoder.embedding(torch.tensor([row])))
        hidden = last[0] if cell == "lstm" else last
        assert_close(memory.values, values)
        assert_close(memory.summary, hidden[-(1 + bidirectional) :].transpose(0, 1).flatten(1))


def test_cells_against_their_equations():
    """GRU and LSTM written out, gate by gate (Cho 2014, Hochreiter & Schmidhuber 1997)."""
    values, before = torch.randn(3, 1, 5), torch.randn(3, 4)
    for cell in CELLS:
        stack = RecurrentStack(5, 4, cell, 1)
        layer = stack.layers[0]
        state = ((before,) * stack.tensors,)
        got, _ = stack(values, state)
        x = values[:, 0] @ layer.weight_ih_l0.T + layer.bias_ih_l0
        h = before @ layer.weight_hh_l0.T + layer.bias_hh_l0
        if cell == "rnn":
            expected = torch.tanh(x + h)
        elif cell == "gru":
            (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            expected = (1 - z) * torch.tanh(xn + r * hn) + z * before
        else:
            i, f, g, o = (x + h).chunk(4, -1)
            c = torch.sigmoid(f) * before + torch.sigmoid(i) * torch.tanh(g)
            expected = torch.sigmoid(o) * torch.tanh(c)
        assert_close(got[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_scores_against_loops():
    query, memory = torch.randn(2, 3, 6), torch.randn(2, 5, 6)
    for kind in (Dot, ScaledDot, Bilinear, MLP):
        score = kind(6, 6)
        got = score(query, score.keys(memory))
        for b in range(2):
            for t in range(3):
                for s in range(5):
                    q, m = query[b, t], memory[b, s]
                    if kind is MLP:
                        both = torch.tanh(score.q_proj.weight @ q + score.k_proj.weight @ m + score.k_proj.bias)
                        expected = score.energy_proj.weight[0] @ both
                    elif kind is Bilinear:
                        expected = q @ score.k_proj.weight @ m
                    else:
                        expected = q @ m / (6**0.5 if kind is ScaledDot else 1)
                    assert_close(got[b, t, s], expected)


def test_decoder_is_invariant_to_permutations_of_the_memory():
    """The order of the memory's rows does not change the context."""
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), WIDTH, **SIZES).eval()
    memory = Memory(torch.randn(2, 5, WIDTH), torch.arange(5) < torch.tensor([[5], [3]]), torch.randn(2, WIDTH))
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = Memory(memory.values[:, order], memory.mask[:, order], memory.summary)
    tokens = torch.tensor([[1, 5, 6], [1, 4, 4]])
    plain = decoder.advance(tokens, decoder.start(memory), with_attention=True)
    moved = decoder.advance(tokens, decoder.start(shuffled), with_attention=True)
    assert_close(moved.logits, plain.logits)
    assert_close(moved.attention.cross, plain.attention.cross[..., order])
