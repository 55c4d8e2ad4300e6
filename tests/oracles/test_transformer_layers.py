"""The parts of a Transformer layer against loops and torch.nn; causality."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from transduce.attention.multihead import CrossAttention
from transduce.attention.positions import POSITIONS, Learned, NoPosition, Rotary, Sinusoidal
from transduce.attention.scores import Dot, ScaledDot
from transduce.attention.self_attention import SSRU, AverageAttention, scan
from transduce.contracts import SequenceContext
from transduce.decoders.convolutional import ConvolutionalDecoder
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.errors import InputError
from transduce.flow import Batch, Memory, Padded, map_tensors
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import FeedForward
from transduce.layers.norm import BatchNorm, RMSNorm
from transduce.layers.option_groups import AttentionOptions, FeedForwardOptions, SublayerOptions
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe

WIDTH, SIZE = 8, 9
SIZES = {"layers": 1, "width": WIDTH, "heads": 2, "ff_width": 12, "dropout": 0.0, "position": NoPosition}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def view(real: torch.Tensor | None = None) -> SequenceContext:
    places = torch.arange(1)[None]
    return SequenceContext(NoPosition(WIDTH, 1, True), places, places, real=real, padded=real is not None)


def test_grouped_query_attention_equals_repeated_keys():
    """Grouped heads equal full heads whose key and value matrices hold each group's rows again."""
    for kv_heads in (1, 2, 4):
        few = CrossAttention(WIDTH, 5, AttentionOptions(4, kv_heads, score=ScaledDot))
        full = CrossAttention(WIDTH, 5, AttentionOptions(4, 4, score=ScaledDot))
        with torch.no_grad():
            full.q_proj, full.out_proj = few.q_proj, few.out_proj
            for own, other in ((full.k_proj, few.k_proj), (full.v_proj, few.v_proj)):
                rows = other.weight.unflatten(0, (kv_heads, -1)).repeat_interleave(4 // kv_heads, 0)
                own.weight.copy_(rows.flatten(0, 1))
        rows, memory, mask = torch.randn(6, 3, WIDTH), torch.randn(2, 7, 5), torch.rand(2, 7) > 0.3
        mask[:, 0] = True
        got = few(rows, *few.keys_values(memory), mask, with_attention=True)
        expected = full(rows, *full.keys_values(memory), mask, with_attention=True)
        assert few.keys_values(memory)[0].shape == (2, kv_heads, 7, WIDTH // 4)
        assert_close(got, expected, **CLOSE)


def test_incompatible_heads_raise_input_errors():
    for heads, message in (
        (AttentionOptions(3, 3, score=ScaledDot), "3 heads"),
        (AttentionOptions(4, 3, score=ScaledDot), "3 key heads"),
        (AttentionOptions(4, 2, score=ScaledDot, projections="none"), "without projections"),
    ):
        with pytest.raises(InputError, match=message):
            CrossAttention(WIDTH, WIDTH, heads)
    with pytest.raises(InputError, match="no window"):
        TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, token_mixer=SSRU, window=2, **SIZES)
    with pytest.raises(InputError, match="Rotary positions"):
        TransformerEncoder(Embedding(SIZE, WIDTH), token_mixer=AverageAttention, **{**SIZES, "position": Rotary})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "choose kv_heads that divide heads"),
        ({"kv_heads": 0}, "greater than 0"),
        ({"window": 0}, "greater than 0"),
        ({"token_mixer": "ssru", "window": 2}, "leave window out"),
        ({"token_mixer": "average", "position": "alibi"}, "choose position: sinusoidal"),
        ({"projections": "none", "width": 32}, "one width"),
        ({"norm_kind": "group"}, "'layer', 'rms', 'batch'"),
        ({"kind": "convolutional", "position": "rotary"}, "choose position: sinusoidal"),
    ],
)
def test_invalid_options_raise_errors_with_a_remedy(options, message):
    decoder = {"kind": "transformer", "width": 16, **options}
    encoder = {"kind": "convolutional", "width": 16}
    with pytest.raises(InputError) as refused:
        complete_recipe(parse({"model": {"encoder": encoder, "decoder": decoder}}))
    assert message in str(refused.value)


def test_batch_norm_statistics_skip_non_finite_batches():
    norm = BatchNorm(WIDTH)
    norm(torch.full((1, 3, WIDTH), torch.nan))
    assert torch.isfinite(norm.eval()(torch.randn(1, 3, WIDTH))).all()


def test_attention_without_projections_against_loops():
    """y_i = sum_j softmax_j(x_i . x_j) x_j, over all rows or over those up to i."""
    attention = CrossAttention(WIDTH, WIDTH, AttentionOptions(1, 1, score=Dot, projections="none"))
    assert not list(attention.parameters())
    rows = torch.randn(1, 5, WIDTH)
    for causal in (False, True):
        got, weights = attention.attend_heads(
            attention.queries(rows), *attention.keys_values(rows), causal=causal, with_attention=True
        )
        for i in range(5):
            seen = rows[0, : i + 1 if causal else 5]
            expected = torch.stack([rows[0, i] @ other for other in seen]).softmax(0)
            assert_close(weights[0, 0, i, : len(seen)], expected)
            assert_close(got[0, i], sum(w * other for w, other in zip(expected, seen, strict=True)))


def test_projections_make_scores_asymmetric():
    """Of bare rows i is to j what j is to i, so log w_ij - log w_ji is a difference of two numbers, one a row, and
    vanishes around any triangle. With a query and a key for each row it does not."""

    def around(projections: str) -> torch.Tensor:
        torch.manual_seed(1)
        attention = CrossAttention(WIDTH, WIDTH, AttentionOptions(1, 1, score=Dot, projections=projections))
        rows = torch.randn(1, 3, WIDTH)
        _, weights = attention.attend_heads(attention.queries(rows), *attention.keys_values(rows), with_attention=True)
        gap = weights[0, 0].log() - weights[0, 0].log().T
        return (gap[0, 1] + gap[1, 2] + gap[2, 0]).abs()

    assert around("none") < 1e-4
    assert around("all") > 0.1


@pytest.mark.parametrize("window", [1, 2])
def test_window_limits_the_receptive_field(window):
    """A change moves the rows of one layer within the window alone; forwards only where the model is causal."""
    encoder = TransformerEncoder(Embedding(SIZE, WIDTH), window=window, **SIZES).eval()
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, window=window, **SIZES).eval()
    row = torch.tensor([[4, 5, 6, 7, 8, 4, 5, 6]])
    changed = row.clone()
    changed[0, 3] = 8
    real = torch.ones_like(row, dtype=torch.bool)
    moved = encoder(Batch(Padded(row, real))).values - encoder(Batch(Padded(changed, real))).values
    assert moved[0].abs().gt(1e-6).any(-1).nonzero().flatten().tolist() == list(range(3 - window, 4 + window))
    start = decoder.start(Memory.empty(1))
    moved = decoder.advance(row, start).logits - decoder.advance(changed, start).logits
    assert moved[0].abs().gt(1e-6).any(-1).nonzero().flatten().tolist() == list(range(3, 4 + window))
    seen = decoder.advance(row, start, with_attention=True).attention.past[0, 0, 0]
    assert (seen.tril(-window - 1) == 0).all()


def test_window_longer_than_the_sequence_is_no_limit():
    torch.manual_seed(1)
    free = TransformerEncoder(Embedding(SIZE, WIDTH), **SIZES).eval()
    wide = TransformerEncoder(Embedding(SIZE, WIDTH), window=20, **SIZES).eval()
    wide.load_state_dict(free.state_dict())
    batch = Batch(Padded.from_rows([[4, 5, 6, 2], [4, 2]]))
    assert_close(wide(batch).values[batch.source.mask], free(batch).values[batch.source.mask])


def test_batch_norm_equals_torch_over_unpadded_rows():
    own, theirs = BatchNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    for length in (5, 3, 1):
        values = torch.randn(3, length, WIDTH) * 3 + 1
        real = torch.arange(length) < torch.tensor([[length], [1], [max(1, length - 1)]])
        assert_close(own(values, real)[real], theirs(values[real]), **CLOSE)
        assert_close(own.mean, theirs.running_mean)
        assert_close(own.variance, theirs.running_var)
    own.eval(), theirs.eval()
    assert_close(own(values, real)[real], theirs(values[real]), **CLOSE)
    assert_close(own(values[:1, :1]), own(values)[:1, :1])  # a row knows nothing of its batch any more
    assert torch.isfinite(own.train()(values[:1, :1])).all()  # not even a batch of one row fails


def test_batch_norm_ignores_padding_in_training():
    """More padding changes neither what is trained nor what is remembered, in encoder and decoder."""
    results = []
    for extra in (0, 3):
        torch.manual_seed(1)
        options = {**SIZES, "norm_kind": "batch"}
        encoder = TransformerEncoder(Embedding(SIZE, WIDTH), **options).train()
        decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), WIDTH, **options).train()
        source = Padded.from_rows([[4, 5, 6, 2] + [0] * extra, [7, 2] + [0] * (2 + extra)])
        source = Padded(source.values, source.values != 0)
        tokens = torch.tensor([[1, 5, 6, 7] + [0] * extra, [1, 8, 0, 0] + [0] * extra])
        memory = encoder(Batch(source))
        logits = decoder.advance(tokens, decoder.start(memory)).logits
        results.append((memory.values[source.mask], logits[tokens != 0], dict(decoder.named_buffers())))
    assert_close(results[1], results[0], **CLOSE)


def test_rms_norm_and_gated_feed_forward_against_their_equations():
    values = torch.randn(2, 3, WIDTH)
    norm = RMSNorm(WIDTH)
    nn.init.normal_(norm.weight)
    assert_close(norm(values), values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)
    layer = FeedForward(WIDTH, 12, "silu", gated=True)
    w1, w3, w2 = layer.fc1.weight, layer.fc_gate.weight, layer.fc2.weight
    inner = values @ w1.T
    assert_close(layer(values), (inner * torch.sigmoid(inner) * (values @ w3.T)) @ w2.T, **CLOSE)
    assert not [name for name, _ in FeedForward(4, 6, "relu", bias=False).named_parameters() if "bias" in name]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6))
def test_parallel_scan_equals_the_loop(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    decay = torch.rand(2, steps, 3, generator=generator)
    inputs = torch.randn(2, steps, 3, generator=generator)
    products, cells = scan(decay, inputs)
    state, product = torch.zeros(2, 3), torch.ones(2, 3)
    for t in range(steps):
        state, product = decay[:, t] * state + inputs[:, t], product * decay[:, t]
        assert_close(cells[:, t], state, **CLOSE)
        assert_close(products[:, t], product, **CLOSE)


def test_ssru_against_loops():
    own, rows, before = SSRU(WIDTH, SublayerOptions()), torch.randn(2, 6, WIDTH), torch.randn(2, WIDTH)
    nn.init.normal_(own.forget.bias)
    got, after, _ = own(rows, before, view())
    cell = before
    for t in range(6):
        keep = torch.sigmoid(own.forget(rows[:, t]))
        cell = keep * cell + (1 - keep) * own.content(rows[:, t])
        assert_close(got[:, t], torch.relu(cell), **CLOSE)
    assert_close(after, cell, **CLOSE)


def test_average_attention_against_loops():
    own = AverageAttention(WIDTH, SublayerOptions(feed_forward=FeedForwardOptions(12)))
    rows = torch.randn(2, 6, WIDTH)
    real = torch.arange(6) < torch.tensor([[6], [4]])
    got, (total, count), _ = own(rows, own.start(2, rows), view(real))
    for row, length in enumerate((6, 4)):
        for t in range(length):
            mean = own.feed_forward(rows[row, : t + 1].mean(0))
            keep, take = torch.sigmoid(own.gates(torch.cat((rows[row, t], mean)))).chunk(2)
            assert_close(got[row, t], keep * rows[row, t] + take * mean, **CLOSE)
        assert_close(total[row], rows[row, :length].sum(0), **CLOSE)
        assert count[row] == length


@pytest.mark.parametrize("kind", [SSRU, AverageAttention, "convolutional"])
def test_state_of_ssru_and_average_attention_has_constant_size(kind):
    parts = (Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0)
    decoder = (
        ConvolutionalDecoder(*parts, width=WIDTH)
        if kind == "convolutional"
        else TransformerDecoder(*parts, token_mixer=kind, **SIZES)
    ).eval()
    sizes = []
    for length in (1, 30):
        counted: list[int] = []
        state = decoder.advance(torch.full((2, length), 5), decoder.start(Memory.empty(2))).state
        map_tensors(lambda x, counted=counted: counted.append(x.numel()) or x, state.past)
        sizes.append(sum(counted))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
def test_concatenated_positions(kind):
    """W [x; p] with W = [1 1] is x + p."""
    added, joined = kind(WIDTH, 1, True), kind(WIDTH, 1, True, join="concatenate")
    joined.load_state_dict({**joined.state_dict(), **added.state_dict()})
    with torch.no_grad():
        joined.concat_proj.weight.copy_(torch.cat((torch.eye(WIDTH), torch.eye(WIDTH)), 1))
    values, places = torch.randn(2, 5, WIDTH), torch.arange(5)[None]
    assert_close(joined.add(values, places), added.add(values, places))


@pytest.mark.parametrize("kind", POSITIONS)
def test_without_positions_the_encoder_is_permutation_equivariant(kind):
    """A memory of shuffled words is the shuffled memory, unless positions tell them apart."""
    encoder = TransformerEncoder(Embedding(SIZE, WIDTH), **{**SIZES, "position": POSITIONS[kind]}).eval()
    row, order = torch.tensor([[4, 5, 6, 7, 8, 2]]), torch.tensor([3, 1, 5, 0, 2, 4])
    real = torch.ones_like(row, dtype=torch.bool)
    plain, shuffled = encoder(Batch(Padded(row, real))).values, encoder(Batch(Padded(row[:, order], real))).values
    assert torch.allclose(shuffled, plain[:, order], **CLOSE) == (kind == "none")


@pytest.mark.parametrize(
    "options", [{}, {"token_mixer": SSRU}, {"token_mixer": AverageAttention}, {"norm_kind": "batch"}], ids=str
)
def test_half_precision_state_keeps_its_dtype(options):
    """Under mixed precision the past keeps a type that the next step can take, and says about the same."""
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, **SIZES, **options).eval()
    tokens = torch.tensor([[1, 5, 6, 7, 8]])
    state, logits = decoder.start(Memory.empty(1)), []
    exact = decoder.advance(tokens, state).logits
    with torch.autocast("cpu", torch.bfloat16):
        for step in range(5):
            one = decoder.advance(tokens[:, step : step + 1], state)
            state, logits = one.state, [*logits, one.logits]
    assert_close(torch.cat(logits, 1).float(), exact, rtol=0.1, atol=0.1)
