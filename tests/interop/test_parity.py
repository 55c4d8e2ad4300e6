"""Imported models against the library they came from: equal logits, attention, outputs of greedy and beam search."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from interop_fixtures import PIECES, make
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import transduce
from transduce.flow import EOS, Batch, Padded

TEXTS = ["w1 w2 w3 w4 w5 w6 w7", "w9", "w3 w3 nothing w12 w0", "w19 w18 w17 w2 w1 w0 w5 w6 w7 w8 w11"]
MORE = [*TEXTS, "w0 w1", "w14 w14 w15", "w2 w2 w2 w2", "w8 w10 w12", "w13", "w7 w6 w5", "w16 w4 w9 w1", "w11 w17"]
VARIANTS = {
    "marian": ("marian", {}),
    "marian relu": ("marian", {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 3}),
    "bart": ("bart", {}),
    "bart scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", {}),
    "pegasus": ("pegasus", {}),
    "t5": ("t5", {}),
    "t5 unscaled": ("t5", {"tie_word_embeddings": False}),
    "flan": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3}),
}


def theirs(model: transduce.Model, ids: list[int]) -> list[int]:
    """Our ids in their numbers, those of rows for which their tokenizer has no piece included."""
    known = model.source.vocabulary
    return [
        known.rows[number] if known.rows[number] >= 0 else int(known.pieces[number].strip("<unsed >")) for number in ids
    ]


def read_sources(model: transduce.Model, texts: list[str] = TEXTS) -> tuple[Padded, torch.Tensor, torch.Tensor]:
    """The same sources as both read them: ours, theirs with its mask."""
    rows = [[*ids, EOS] for ids in model.source.encode_sources(texts)]
    padded = Padded.from_rows(rows)
    numbers = torch.tensor([theirs(model, row) for row in padded.values.tolist()])
    return padded, numbers, padded.mask.long()


def expected_source(folder, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_cross_attention(name, tmp_path):
    family, changes = VARIANTS[name]
    library = make(family, tmp_path, **changes)
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = read_sources(model)
    assert [row[: int(real.sum())] for row, real in zip(numbers.tolist(), mask, strict=True)] == [
        expected_source(tmp_path, text) for text in TEXTS
    ]
    rows = model.source.vocabulary.backend_ids
    said = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4], [1, 8, 3, 10], [1, 7, 7, 2]])
    read = torch.tensor([theirs(model, row) for row in said.tolist()])
    with torch.no_grad():
        answer = library(input_ids=numbers, attention_mask=mask, decoder_input_ids=read, output_attentions=True)
        step = model.network.advance(said, model.network.start(Batch(source)), with_attention=True)
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    wanted = answer.logits[..., torch.tensor(rows)[known]]
    assert_close(step.logits[..., known], wanted, rtol=1e-4, atol=1e-4)
    # With all of a distribution: the row of <s>, which they have under another name, takes no part.
    assert_close(
        step.logits.log_softmax(-1)[..., known], answer.logits.log_softmax(-1)[..., torch.tensor(rows)[known]],
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    cross = torch.stack(answer.cross_attentions, 1)  # B L H T S
    assert_close(step.attention.cross, cross, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_t5_with_an_output_of_its_own(scaled, tmp_path):
    """As T5 1.1 and FLAN-T5 are stored: two matrices for tokens."""
    library = make("t5", tmp_path, tie_word_embeddings=scaled, feed_forward_proj="gated-gelu")
    library.lm_head.weight = torch.nn.Parameter(torch.randn_like(library.lm_head.weight))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.weight": library.lm_head.weight.detach()}, tmp_path / "model.safetensors")
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = read_sources(model)
    said = torch.tensor([[1, 5, 9, 7]] * len(TEXTS))
    read = torch.tensor([theirs(model, row) for row in said.tolist()])
    rows = model.source.vocabulary.backend_ids
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    with torch.no_grad():
        answer = library(input_ids=numbers, attention_mask=mask, decoder_input_ids=read).logits
        found = model.network.advance(said, model.network.start(Batch(source))).logits
    assert_close(found[..., known], answer[..., torch.tensor(rows)[known]], rtol=1e-4, atol=1e-4)


def generated(library, model, longest: int):
    """What both write for the same sources: their ids after the first, up to </s>."""
    _, numbers, mask = read_sources(model, MORE)
    end = library.config.eos_token_id
    pads = [[library.config.pad_token_id]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = library.generate(input_ids=numbers, attention_mask=mask, max_new_tokens=longest, bad_words_ids=pads)[
            :, 1:
        ].tolist()
    wanted = [row[: row.index(end) + 1] if end in row else row for row in rows]
    found = [theirs(model, list(one.decoded.hypothesis.ids)) for one in model.generate(MORE, max_length=longest)]
    return wanted, found


SEARCHES = {
    "greedy": {},
    "beam": {"num_beams": 4},
    "stops when full": {"num_beams": 4, "early_stopping": True},
    "never stops early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
    "short": {"num_beams": 4, "length_penalty": 0.2, "no_repeat_ngram_size": 2},
    "rules": {"num_beams": 3, "min_new_tokens": 6, "suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8, 9, 10]},
    "greedy rules": {"no_repeat_ngram_size": 2, "min_new_tokens": 3, "suppress_tokens": [4, 9]},
    "forced": {"num_beams": 4, "forced_bos_token_id": 3, "length_penalty": 1.5},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "flan", "pegasus", "mbart"])
def test_same_outputs_as_generate(name, search, tmp_path):
    """Token for token, with the settings that the folder itself brings along."""
    family, changes = VARIANTS[name]
    library = make(family, tmp_path, generation=SEARCHES[search], **changes)
    model = transduce.load(tmp_path, device="cpu")
    for longest in (12, 25):
        wanted, found = generated(library, model, longest=longest)
        assert found == wanted


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_outputs_end_in_different_ways(family, tmp_path):
    """The comparison above has teeth only where outputs end by themselves, at different lengths."""
    library = make(family, tmp_path, generation={"num_beams": 4})
    model = transduce.load(tmp_path, device="cpu")
    wanted, _ = generated(library, model, longest=25)
    assert len({len(row) for row in wanted}) > 1
    narrow = model.generate(MORE, max_length=25, strategy="beam")
    assert [theirs(model, list(one.decoded.hypothesis.ids)) for one in narrow] != wanted  # the other beam differs


def test_gpt2(tmp_path):
    """A decoder alone: the same logits after its first token, the same continuation of a beginning."""
    library = make("gpt2", tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    said = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4]])
    rows = model.target.vocabulary.backend_ids
    read = torch.tensor([theirs(model, row) for row in said.tolist()])
    with torch.no_grad():
        wanted = library(input_ids=read).logits
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    found = model.logits(target=said).log_softmax(-1)[..., known]
    assert_close(found, wanted.log_softmax(-1)[..., torch.tensor(rows)[known]], rtol=1e-4, atol=1e-4)
    begun = [23, 4, 7]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = library.generate(input_ids=torch.tensor([begun]), max_new_tokens=10, do_sample=False)[0, 1:].tolist()
    out = out[: out.index(23) + 1] if 23 in out else out
    one = model.generate(["w4 w7"], max_length=10)[0]
    assert theirs(model, list(one.decoded.hypothesis.ids)) == out


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}, {"num_beams": 3, "early_stopping": True}])
def test_gpt2_goes_on_as_generate_does(search, tmp_path):
    """Beginnings of several lengths, one at a time, as the library pads a batch on the left."""
    library = make("gpt2", tmp_path, generation=search)
    with torch.no_grad():
        library.transformer.wte.weight[23] *= 2  # some end by themselves
    library.save_pretrained(tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    for text in ("w4 w7", "w1", "w9 w9 w2 w5 w11", "w19 w3"):
        begun = [23, *(int(word[1:]) for word in text.split())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = library.generate(input_ids=torch.tensor([begun]), max_new_tokens=10, do_sample=False)[0, 1:].tolist()
        out = out[: out.index(23) + 1] if 23 in out else out
        found = model.generate([text], max_length=10)[0]
        assert theirs(model, list(found.decoded.hypothesis.ids)) == out, text


def test_bert(tmp_path):
    """An encoder alone: the same hidden states in a padded batch, to 1e-5, and their mean as the vector of a text."""
    library = make("bert", tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = read_sources(model)
    assert numbers[0].tolist() == expected_source(tmp_path, TEXTS[0]) + [0] * (numbers.size(1) - 9)
    with torch.no_grad():
        wanted = library(input_ids=numbers, attention_mask=mask).last_hidden_state
        found = model.network.encoder(Batch(source)).values
    real = source.mask
    assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)
    means = (wanted * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    np.testing.assert_allclose(model.embed(TEXTS), means.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_numbers_of_two_bytes(kind, tmp_path):
    """They are read as they are, and computed with in fp32."""
    make("marian", tmp_path)
    weights = {name: tensor.to(kind) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    network = transduce.load(tmp_path, device="cpu").network
    found = network.state_dict()["encoder.layers.1.feed_forward.fc1.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, weights["model.encoder.layers.1.fc1.weight"].float())


@pytest.mark.parametrize("family", ["marian", "bart", "t5", "gpt2"])
def test_text_comes_back(family, tmp_path):
    make(family, tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    ids = model.target.encode_batch(["w3 w19 w0"])[0]
    assert model.target.decode([*ids, EOS]) == "w3 w19 w0"
    assert theirs(model, ids) == [PIECES[family].index(word) for word in ("w3", "w19", "w0")]
