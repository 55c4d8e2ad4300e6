"""Pointer-generator against a direct, unvectorised computation of the mixture; refused models."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from transduce.decoders.copy import PointerGeneratorDecoder
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

SIZE, WIDTH = 9, 8
RECURRENT = {"kind": "recurrent", "width": WIDTH, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": WIDTH, "layers": 2, "heads": 2, "ff_width": 12, "dropout": 0.0}


def recipe(encoder, decoder, copying, shared=True):
    return parse({"tokens": {"shared": shared}, "model": {"encoder": encoder, "decoder": decoder, "copy": copying}})


def build(encoder, decoder, copying):
    torch.manual_seed(2)
    model = build_model(complete_recipe(recipe(encoder, decoder, copying)).model, SIZE, SIZE)
    return model.double().eval()


def a_batch() -> Batch:
    sources = [[5, 6, 5, EOS], [8, EOS]]  # 5 stands there twice, and 8 next to padding
    targets = [[BOS, 5, 7, EOS], [BOS, 8, EOS]]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets))


CASES = [
    (RECURRENT, RECURRENT, {}),
    ({**RECURRENT, "bidirectional": False, "reverse": True}, RECURRENT, {}),
    (TRANSFORMER, TRANSFORMER, {}),
    (RECURRENT, TRANSFORMER, {"layer": 0, "head": 1}),
]


@torch.no_grad()
@pytest.mark.parametrize(("encoder", "decoder", "copying"), CASES)
def test_copy_distribution_is_the_mixture(encoder, decoder, copying):
    model, batch = build(encoder, decoder, copying), a_batch()
    step = model(batch, with_attention=True)
    assert isinstance(model.decoder, PointerGeneratorDecoder)
    plain = model.decoder.decoder.advance(batch.decoder_inputs.values, model.start(batch), with_attention=True)
    for row in range(batch.size):
        source = batch.source.values[row][batch.source.mask[row]].tolist()
        for place in range(plain.logits.size(1)):
            hidden = plain.hidden[row, place]
            raw = float(sum(a * b for a, b in zip(model.decoder.gate.weight[0], hidden, strict=True)))
            gate = 1 / (1 + math.exp(-raw - float(model.decoder.gate.bias)))
            heads = plain.attention.cross[row, copying.get("layer", -1), :, place]  # H S
            looks = heads.mean(0) if "head" not in copying else heads[copying["head"]]
            sum_of_all = sum(math.exp(float(x)) for x in plain.logits[row, place])
            for word in range(SIZE):
                generated = math.exp(float(plain.logits[row, place, word])) / sum_of_all
                copied = sum(float(looks[s]) for s, token in enumerate(source) if token == word)
                wanted = math.log(gate * generated + (1 - gate) * copied)
                assert float(step.logits[row, place, word]) == pytest.approx(wanted, abs=1e-6)


LEMMA = {"kind": "multi_source", "width": WIDTH, "parts": {"lemma": RECURRENT, "features": {**RECURRENT}}}
SOURCES = {"lemma": "text", "features": "tags"}


@torch.no_grad()
@pytest.mark.parametrize("decoder", [RECURRENT, TRANSFORMER])
def test_only_the_named_source_is_copied(decoder):
    """Attention to the features, which are not copied, generates: the mixture by hand."""
    torch.manual_seed(2)
    content = {"encoder": LEMMA, "decoder": decoder, "copy": {"source": "lemma"}}
    made = complete_recipe(parse({"data": {"sources": SOURCES}, "tokens": {"shared": True}, "model": content}))
    model = build_model(made.model, SIZE, SIZE).double().eval()
    batch = Batch(
        Padded.from_rows([[5, 6, 5, EOS], [8, EOS]]),
        a_batch().target,
        extra={"features": Padded.from_rows([[7, EOS], [7, 6, 4, EOS]])},
    )
    step = model(batch)
    plain = model.decoder.decoder.advance(batch.decoder_inputs.values, model.start(batch), with_attention=True)
    gates = model.decoder.gate(plain.hidden).sigmoid()
    for row, lemma in enumerate(([5, 6, 5, EOS], [8, EOS])):
        for place in range(plain.logits.size(1)):
            looks, gate = plain.attention.cross[row, -1, :, place].mean(0), float(gates[row, place])
            generated = plain.logits[row, place].softmax(-1)
            for word in range(SIZE):
                copied = sum(float(looks[s]) for s, token in enumerate(lemma) if token == word)
                others = float(looks[len(lemma) :].sum())
                wanted = (gate + (1 - gate) * others) * float(generated[word]) + (1 - gate) * copied
                assert float(step.logits[row, place, word].exp()) == pytest.approx(wanted, abs=1e-6)
    assert_close(step.logits.exp().sum(-1), torch.ones(step.logits.shape[:2], dtype=step.logits.dtype))


@pytest.mark.parametrize("source", ["features2", "lemmas"])
def test_an_unknown_source_is_refused(source):
    content = {"encoder": LEMMA, "decoder": RECURRENT, "copy": {"source": source}}
    with pytest.raises(InputError, match="there is no text"):
        complete_recipe(parse({"data": {"sources": SOURCES}, "tokens": {"shared": True}, "model": content}))
    alone = {"encoder": RECURRENT, "decoder": RECURRENT, "copy": {"source": source}}
    with pytest.raises(InputError, match="one source"):
        complete_recipe(parse({"tokens": {"shared": True}, "model": alone}))


def test_logits_are_log_probabilities_and_finite():
    model, batch = build(RECURRENT, RECURRENT, {}), a_batch()
    model.decoder.gate.bias.data.fill_(-1e4)  # copies only: words that stand nowhere have chance 0
    logits = model(batch).logits
    assert torch.isfinite(logits).all()
    assert_close(logits.exp().sum(-1), torch.ones(logits.shape[:2], dtype=logits.dtype))
    assert float(logits[0, 0, 7].detach()) < -50  # not in this source
    logits[..., 7].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_attention_is_returned_only_on_request():
    model, batch = build(TRANSFORMER, TRANSFORMER, {}), a_batch()
    assert model(batch).attention is None
    assert model(batch, with_attention=True).attention.cross.shape == (2, 2, 2, 3, 4)


@pytest.mark.parametrize("reverse", [False, True])
def test_memory_tokens_are_the_source_tokens(reverse):
    """One direction: a token read last changes its own row alone, wherever the reading began."""
    model, batch = build({**RECURRENT, "bidirectional": False, "reverse": reverse}, RECURRENT, {}), a_batch()
    before, place = model.encoder(batch), 0 if reverse else 3
    assert torch.equal(before.tokens, batch.source.values)
    batch.source.values[0, place] = 8
    changed = (model.encoder(batch).values - before.values)[0].abs().sum(-1) > 0
    assert changed.nonzero().flatten().tolist() == [place]


REFUSED = [
    (RECURRENT, {**RECURRENT, "context": "initial"}, {}, True, "attends to the source"),
    (RECURRENT, {**RECURRENT, "context": "every_step"}, {}, True, "bahdanau or luong"),
    (RECURRENT, RECURRENT, {}, False, "tokens.shared: true"),
    (None, TRANSFORMER, {}, True, "needs an encoder"),
    (RECURRENT, TRANSFORMER, {"layer": 2}, True, "2 layers of 2 heads"),
    (RECURRENT, TRANSFORMER, {"head": 2}, True, "2 layers of 2 heads"),
]


@pytest.mark.parametrize(("encoder", "decoder", "copying", "shared", "words"), REFUSED)
def test_incompatible_decoders_raise_input_errors(encoder, decoder, copying, shared, words):
    with pytest.raises(InputError) as message:
        complete_recipe(recipe(encoder, decoder, copying, shared))
    assert words in str(message.value)
    assert "recipe: model" in str(message.value)
