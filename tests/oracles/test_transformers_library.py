"""Our blocks against four model families of the transformers library, with copied random weights: equal logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.attention.positions import Learned, NoPosition, RelativeBias, Rotary
from transduce.attention.scores import Dot
from transduce.decoders.transformer import TransformerDecoder
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Memory, Padded
from transduce.layers.embedding import Embedding, Output

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, HIDDEN, SIZE, LAYERS = 16, 4, 40, 13, 2
SIZES = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "ff_width": HIDDEN, "dropout": 0.0}
SOURCE = Padded.from_rows([[5, 6, 7, 8, 2], [4, 9, 2], [8, 2]])
TARGET = torch.tensor([[1, 5, 6, 11], [1, 4, 4, 7], [1, 8, 7, 12]])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def copy(our_part: nn.Module, other: nn.Module, *, turned: bool = False) -> None:
    """Weight and bias of one layer. `turned`: the other keeps its matrix as inputs x outputs."""
    with torch.no_grad():
        our_part.weight.copy_(other.weight.T if turned else other.weight)
        if getattr(other, "bias", None) is not None:
            our_part.bias.copy_(other.bias)


def copy_all(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    for our_part, other in pairs:
        copy(our_part, other)


def copy_embedding(our_part: Embedding, other: nn.Module, scale: float = math.sqrt(WIDTH)) -> None:
    """Our embedding is scaled up on reading; `scale` takes that back where the other is not."""
    with torch.no_grad():
        our_part.weight.copy_(other.weight / scale)


def shake(model: nn.Module) -> nn.Module:
    """Norms and biases start at one and zero, where a mistake would not show."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def decode(decoder: TransformerDecoder, memory: Memory) -> torch.Tensor:
    return decoder.eval().advance(TARGET, decoder.start(memory)).logits


def copy_marian_layer(our_part: nn.Module, other: nn.Module) -> None:
    pairs = [(our_part.self_attention, other.self_attn)]
    norms = [other.self_attn_layer_norm]
    if our_part.cross_attention is not None:
        pairs.append((our_part.cross_attention, other.encoder_attn))
        norms.append(other.encoder_attn_layer_norm)
    for mine, theirs in pairs:
        copy_all(
            [
                (mine.q_proj, theirs.q_proj),
                (mine.k_proj, theirs.k_proj),
                (mine.v_proj, theirs.v_proj),
                (mine.out_proj, theirs.out_proj),
            ]
        )
    copy_all([(our_part.feed_forward.fc1, other.fc1), (our_part.feed_forward.fc2, other.fc2)])
    copy_all([(r.norm, n) for r, n in zip(our_part.residuals, [*norms, other.final_layer_norm], strict=True)])


def test_marian():
    """Encoder and decoder, norm after, three matrices tied; its waves are copied as a learned table."""
    config = transformers.MarianConfig(
        vocab_size=SIZE, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=HIDDEN, decoder_ffn_dim=HIDDEN, max_position_embeddings=32,
        activation_function="silu", scale_embedding=True, dropout=0.0, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1, decoder_vocab_size=SIZE,
    )  # fmt: skip
    theirs = shake(transformers.MarianMTModel(config))
    options = {**SIZES, "norm": "post", "activation": "silu", "position": Learned}
    embedding = Embedding(SIZE, WIDTH)
    encoder = TransformerEncoder(embedding, **options).eval()
    decoder = TransformerDecoder(embedding, Output(WIDTH, SIZE, embedding), WIDTH, **options)
    copy_embedding(embedding, theirs.model.shared, scale=1)
    with torch.no_grad():
        decoder.output.projection.bias.copy_(theirs.final_logits_bias[0])
        for our_part, other in ((encoder, theirs.model.encoder), (decoder, theirs.model.decoder)):
            our_part.position.embed_positions.weight[:32] = other.embed_positions.weight
            for mine, layer in zip(our_part.layers, other.layers, strict=True):
                copy_marian_layer(mine, layer)
        expected = theirs(input_ids=SOURCE.values, attention_mask=SOURCE.mask.long(), decoder_input_ids=TARGET).logits
        assert_close(decode(decoder, encoder(Batch(SOURCE))), expected, **CLOSE)


def copy_t5_layer(our_part: nn.Module, other: nn.Module) -> None:
    *attentions, feed = other.layer
    mine = [our_part.self_attention, *([our_part.cross_attention] if our_part.cross_attention is not None else [])]
    names = ["SelfAttention", "EncDecAttention"]
    for attention, layer, name in zip(mine, attentions, names, strict=False):
        theirs = getattr(layer, name)
        copy_all([(attention.q_proj, theirs.q), (attention.k_proj, theirs.k), (attention.v_proj, theirs.v)])
        copy(attention.out_proj, theirs.o)
    dense = feed.DenseReluDense
    copy_all([(our_part.feed_forward.fc1, dense.wi_0), (our_part.feed_forward.fc_gate, dense.wi_1)])
    copy(our_part.feed_forward.fc2, dense.wo)
    copy_all([(r.norm, layer.layer_norm) for r, layer in zip(our_part.residuals, other.layer, strict=True)])


def test_t5():
    """RMS norm before, gated GELU, no biases, dot products without a scale, one relative bias for all layers."""
    config = transformers.T5Config(
        vocab_size=SIZE, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=HIDDEN, num_layers=LAYERS,
        num_decoder_layers=LAYERS, num_heads=HEADS, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    theirs = shake(transformers.T5ForConditionalGeneration(config))

    def position(width: int, heads: int, causal: bool) -> RelativeBias:
        return RelativeBias(width, heads, causal, buckets=8, max_distance=16)

    options = {**SIZES, "norm_kind": "rms", "gated": True, "activation": "gelu_tanh", "bias": False, "score": Dot}
    encoder = TransformerEncoder(Embedding(SIZE, WIDTH), position=position, **options).eval()
    decoder = TransformerDecoder(Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), WIDTH, position=position, **options)
    with torch.no_grad():
        for our_part, other in ((encoder, theirs.encoder), (decoder, theirs.decoder)):
            copy_embedding(our_part.embedding, theirs.shared)
            copy(
                our_part.position.relative_attention_bias,
                other.block[0].layer[0].SelfAttention.relative_attention_bias,
            )
            copy(our_part.final_norm, other.final_layer_norm)
            for mine, layer in zip(our_part.layers, other.block, strict=True):
                copy_t5_layer(mine, layer)
        copy(decoder.output.projection, theirs.lm_head)
        expected = theirs(input_ids=SOURCE.values, attention_mask=SOURCE.mask.long(), decoder_input_ids=TARGET).logits
        assert_close(decode(decoder, encoder(Batch(SOURCE))), expected, **CLOSE)


def test_gpt2():
    """A decoder alone: norm before, learned positions, GELU by tanh, tied output."""
    config = transformers.GPT2Config(
        vocab_size=SIZE, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = shake(transformers.GPT2LMHeadModel(config))
    decoder = TransformerDecoder(
        Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, activation="gelu_tanh", position=Learned, **SIZES
    )
    with torch.no_grad():
        copy_embedding(decoder.embedding, theirs.transformer.wte)
        decoder.output.projection.weight.copy_(theirs.lm_head.weight)
        decoder.position.embed_positions.weight[:32] = theirs.transformer.wpe.weight
        copy(decoder.final_norm, theirs.transformer.ln_f)
        for our_part, other in zip(decoder.layers, theirs.transformer.h, strict=True):
            attention = our_part.self_attention
            for number, layer in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
                part = slice(number * WIDTH, (number + 1) * WIDTH)
                layer.weight.copy_(other.attn.c_attn.weight[:, part].T)
                layer.bias.copy_(other.attn.c_attn.bias[part])
            copy(attention.out_proj, other.attn.c_proj, turned=True)
            copy(our_part.feed_forward.fc1, other.mlp.c_fc, turned=True)
            copy(our_part.feed_forward.fc2, other.mlp.c_proj, turned=True)
            copy_all([(our_part.residuals[0].norm, other.ln_1), (our_part.residuals[1].norm, other.ln_2)])
        assert_close(decode(decoder, Memory.empty(3)), theirs(TARGET).logits, **CLOSE)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(kv_heads):
    """A decoder alone: RMS norm before, rotary positions, grouped heads, gated SiLU, no biases."""
    config = transformers.LlamaConfig(
        vocab_size=SIZE, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = shake(transformers.LlamaForCausalLM(config))
    decoder = _llama(theirs, kv_heads=kv_heads)
    with torch.no_grad():
        assert_close(decode(decoder, Memory.empty(3)), theirs(TARGET).logits, **CLOSE)


def test_mistral_window():
    """The same with a sliding window. Theirs counts the row itself, ours how far it may look beside it."""
    config = transformers.MistralConfig(
        vocab_size=SIZE, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, sliding_window=2, head_dim=WIDTH // HEADS,
    )  # fmt: skip
    theirs = shake(transformers.MistralForCausalLM(config))
    decoder = _llama(theirs, kv_heads=2, window=1)
    free = _llama(theirs, kv_heads=2)
    with torch.no_grad():
        expected = theirs(TARGET).logits
        assert_close(decode(decoder, Memory.empty(3)), expected, **CLOSE)
        assert not torch.allclose(decode(free, Memory.empty(3)), expected, **CLOSE)


def _llama(theirs: nn.Module, **options: int) -> TransformerDecoder:
    decoder = TransformerDecoder(
        Embedding(SIZE, WIDTH), Output(WIDTH, SIZE), 0, norm_kind="rms", gated=True, activation="silu",
        bias=False, position=Rotary, **SIZES, **options,
    )  # fmt: skip
    copy_embedding(decoder.embedding, theirs.model.embed_tokens)
    copy(decoder.output.projection, theirs.lm_head)
    copy(decoder.final_norm, theirs.model.norm)
    for our_part, other in zip(decoder.layers, theirs.model.layers, strict=True):
        attention, feed = our_part.self_attention, our_part.feed_forward
        copy_all(
            [
                (attention.q_proj, other.self_attn.q_proj),
                (attention.k_proj, other.self_attn.k_proj),
                (attention.v_proj, other.self_attn.v_proj),
                (attention.out_proj, other.self_attn.o_proj),
                (feed.fc1, other.mlp.gate_proj),
                (feed.fc_gate, other.mlp.up_proj),
                (feed.fc2, other.mlp.down_proj),
                (our_part.residuals[0].norm, other.input_layernorm),
                (our_part.residuals[1].norm, other.post_attention_layernorm),
            ]
        )
    return decoder


def test_bert_layers():
    """An encoder alone: norm after, GELU; fed with the sum of its embeddings."""
    config = transformers.BertConfig(
        vocab_size=SIZE, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=HIDDEN, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = shake(transformers.BertModel(config))
    encoder = TransformerEncoder(
        Embedding(SIZE, WIDTH), norm="post", activation="gelu", position=NoPosition, **SIZES
    ).eval()
    with torch.no_grad():
        for our_part, other in zip(encoder.layers, theirs.encoder.layer, strict=True):
            attention = our_part.self_attention
            copy_all(
                [
                    (attention.q_proj, other.attention.self.query),
                    (attention.k_proj, other.attention.self.key),
                    (attention.v_proj, other.attention.self.value),
                    (attention.out_proj, other.attention.output.dense),
                    (our_part.residuals[0].norm, other.attention.output.LayerNorm),
                    (our_part.feed_forward.fc1, other.intermediate.dense),
                    (our_part.feed_forward.fc2, other.output.dense),
                    (our_part.residuals[1].norm, other.output.LayerNorm),
                ]
            )
        embedded = theirs.embeddings(input_ids=SOURCE.values)
        encoder.embedding.forward = lambda ids: embedded
        expected = theirs(input_ids=SOURCE.values, attention_mask=SOURCE.mask.long()).last_hidden_state
        assert_close(encoder(Batch(SOURCE)).values[SOURCE.mask], expected[SOURCE.mask], **CLOSE)
