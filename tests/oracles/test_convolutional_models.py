"""The convolutional encoder and decoder against their equations, written out position by position."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from transduce.attention.positions import NoPosition, Rotary
from transduce.attention.scores import Dot
from transduce.decoders.convolutional import ConvolutionalDecoder
from transduce.encoders.convolutional import ConvolutionalEncoder
from transduce.errors import InputError
from transduce.flow import Batch, Memory, Padded
from transduce.layers.embedding import Embedding, Output

WIDTH, SIZE, LAYERS = 6, 9, 3
HALF = math.sqrt(0.5)
SIZES = {"layers": LAYERS, "width": WIDTH, "dropout": 0.0, "position": NoPosition}


def gated(layer: torch.nn.Conv1d, rows: list[torch.Tensor]) -> torch.Tensor:
    """One output of a gated convolution: rows are its k inputs."""
    both = layer.bias.clone()
    for offset, row in enumerate(rows):
        both = both + layer.weight[:, :, offset] @ row
    return both[:WIDTH] * torch.sigmoid(both[WIDTH:])


def shake(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_convolutional_encoder_against_loops(kernel):
    encoder = ConvolutionalEncoder(Embedding(SIZE, WIDTH), kernel=kernel, **SIZES).eval()
    shake(encoder)
    rows = [[5, 6, 7, 8, 2], [4, 2]]
    memory = encoder(Batch(Padded.from_rows(rows)))
    zero, side = torch.zeros(WIDTH), kernel // 2
    for number, row in enumerate(rows):
        embedded = list(encoder.embedding(torch.tensor(row)))
        values = embedded
        for block in encoder.layers:
            around = [zero] * side + values + [zero] * side
            values = [(gated(block.conv, around[t : t + kernel]) + value) * HALF for t, value in enumerate(values)]
        expected = torch.stack([(value + e) * HALF for value, e in zip(values, embedded, strict=True)])
        assert_close(memory.values[number, : len(row)], expected)
        assert_close(memory.summary[number], expected.mean(0))


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_convolutional_decoder_against_loops(kernel):
    decoder = ConvolutionalDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 4, kernel=kernel, **SIZES).eval()
    shake(decoder)
    memory = Memory(torch.randn(1, 5, 4), torch.ones(1, 5, dtype=torch.bool), torch.randn(1, 4))
    tokens = torch.tensor([[1, 5, 8, 4, 6]])
    step = decoder.advance(tokens, decoder.start(memory), with_attention=True)
    embedded = list(decoder.embedding(tokens[0]))
    values, zero = embedded, torch.zeros(WIDTH)
    for number, block in enumerate(decoder.layers):
        around, new = [zero] * (kernel - 1) + values, []
        keys, content = block.cross_attention.k_proj(memory.values[0]), block.cross_attention.v_proj(memory.values[0])
        for t, value in enumerate(values):
            found = gated(block.convolution.conv, around[t : t + kernel])
            query = block.cross_attention.q_proj((found + embedded[t]) * HALF)
            weights = (keys @ query / WIDTH**0.5).softmax(0)
            assert_close(step.attention.cross[0, number, 0, t], weights, rtol=1e-4, atol=1e-5)
            found = (found + block.cross_attention.out_proj(weights @ content)) * HALF
            new.append((found + value) * HALF)
        values = new
    assert_close(step.logits[0], decoder.output(torch.stack(values)), rtol=1e-4, atol=1e-5)


def test_model_of_the_paper_against_loops():
    """Embeddings narrower than convolutions, keys without the embedding, contexts scaled by the source length."""
    narrow = 4
    sizes = {**SIZES, "embedding_width": narrow, "kernel": 3}
    encoder = ConvolutionalEncoder(Embedding(SIZE, narrow), separate_keys=True, **sizes).eval()
    decoder = ConvolutionalDecoder(
        Embedding(SIZE, narrow), Output(WIDTH, SIZE), encoder.width, score=Dot, scale_context=True, **sizes
    ).eval()
    shake(encoder)
    shake(decoder)
    rows, tokens, zero = [[5, 6, 7, 8, 2], [4, 2]], torch.tensor([[1, 5, 8], [1, 4, 6]]), torch.zeros(WIDTH)
    memory = encoder(Batch(Padded.from_rows(rows)))
    step = decoder.advance(tokens, decoder.start(memory))
    for number, row in enumerate(rows):
        embedded = encoder.embedding(torch.tensor(row))
        values = list(encoder.embedding_proj(embedded))
        for block in encoder.layers:
            around = [zero, *values, zero]
            values = [(gated(block.conv, around[t : t + 3]) + value) * HALF for t, value in enumerate(values)]
        keys = encoder.memory_proj(torch.stack(values))
        both = torch.cat((keys, (keys + embedded) * HALF), 1)
        assert_close(memory.values[number, : len(row)], both)
        embedded = decoder.embedding(tokens[number])
        values = list(decoder.embedding_proj(embedded))
        for block in decoder.layers:
            around, new, attention = [zero, zero, *values], [], block.cross_attention
            for t, value in enumerate(values):
                found = gated(block.convolution.conv, around[t : t + 3])
                query = attention.q_proj((block.query_proj(found) + embedded[t]) * HALF)
                weights = (attention.k_proj(both) @ query).softmax(0)
                context = attention.out_proj(weights @ attention.v_proj(both)) * math.sqrt(len(row))
                new.append(((found + block.context_proj(context)) * HALF + value) * HALF)
            values = new
        assert_close(step.logits[number], decoder.output(torch.stack(values)), rtol=1e-4, atol=1e-5)


def test_receptive_field_of_a_layer():
    """L layers of kernel k see L (k - 1) / 2 rows to each side, and nothing beyond."""
    encoder = ConvolutionalEncoder(Embedding(SIZE, WIDTH), kernel=3, **SIZES).eval()
    row = torch.tensor([[4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 2]])
    changed = row.clone()
    changed[0, 5] = 8
    mask = torch.ones_like(row, dtype=torch.bool)
    moved = (encoder(Batch(Padded(row, mask))).values != encoder(Batch(Padded(changed, mask))).values).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == list(range(5 - LAYERS, 5 + LAYERS + 1))


def test_invalid_options_raise_input_errors():
    with pytest.raises(InputError, match="no middle row"):
        ConvolutionalEncoder(Embedding(SIZE, WIDTH), kernel=2, **SIZES)
    with pytest.raises(InputError, match="2 widths and 3 kernels for 3 layers"):
        ConvolutionalEncoder(Embedding(SIZE, WIDTH), widths=(4, WIDTH), **SIZES)
    with pytest.raises(InputError, match="last width 6"):
        ConvolutionalEncoder(Embedding(SIZE, WIDTH), widths=(4, 6, 4), **SIZES)
    with pytest.raises(InputError, match="Rotary positions"):
        ConvolutionalDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 4, **{**SIZES, "position": Rotary})
