"""Words composed from pieces: what the states of words depend on."""

from __future__ import annotations

import pytest
import torch
from contract_fixtures import SIZE, SMALL
from torch.testing import assert_close

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

STARTS = [False] * 4 + [number % 2 == 0 for number in range(4, SIZE)]  # ids 4, 6, 8, 10 begin a word
TEXT = [4, 5, 7, 6, 8, 5, EOS]  # words of 3, 1 and 2 pieces
TOKENS = {"source": {"kind": "bpe"}, "target": {"kind": "words"}}
WORDS = [0, 0, 0, 1, 2, 2, 3]


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    model = {"encoder": SMALL["character_aware"], "head": {"kind": "tagger"}}
    return build_model(complete_recipe(parse({"model": model, "tokens": TOKENS})).model, SIZE, SIZE, STARTS).eval()


@torch.no_grad()
def rows(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model.encoder(Batch(Padded.from_rows([ids]))).values[0]


def test_pieces_of_a_word_have_the_row_of_their_word():
    model, ids = network(), torch.tensor([TEXT])
    assert model.encoder.embedding.word_index(ids, torch.ones_like(ids, dtype=torch.bool)).tolist() == [WORDS]
    found = rows(model, TEXT)
    for first, second in ((0, 1), (1, 2), (4, 5)):
        assert_close(found[first], found[second])
    assert not torch.allclose(found[2], found[3])


def test_the_same_pieces_have_the_same_word_vector_wherever_the_word_stands():
    embedding = network().encoder.embedding
    vectors = embedding.rows(Padded.from_rows([TEXT, [10, 8, 5, 4, 5, 7, EOS]])).values[..., -16:]
    assert_close(vectors[0, 0], vectors[1, 3])
    assert_close(vectors[0, 4], vectors[1, 1])
    assert not torch.allclose(vectors[0, 0], vectors[0, 4])


def test_without_a_context_network_a_word_reads_its_own_pieces_alone():
    encoder = network().encoder
    source = encoder.embedding.rows(Padded.from_rows([TEXT]))
    index = torch.tensor([WORDS])
    pieces = source.values[..., : encoder.piece_width]
    changed = pieces.clone()
    changed[0, 4] += 1  # the first piece of word 2, beside word 1
    before, after = (encoder._spelling(one, source.mask, index) for one in (pieces, changed))
    assert_close(before[0, [0, 1, 3]], after[0, [0, 1, 3]])
    assert not torch.allclose(before[0, 2], after[0, 2])


def test_word_dropout_removes_word_vectors_in_training_alone():
    encoder = network().encoder
    vectors, mask, index = torch.ones(1, 64, 16), torch.ones(1, 64, dtype=torch.bool), torch.arange(64)[None]
    assert encoder._word_vectors(vectors, mask, index).eq(1).all()
    kept = encoder.train()._word_vectors(vectors, mask, index)[0]
    assert 0 < kept[:, 0].sum() < 64
    assert (kept == kept[:, :1]).all()  # whole vectors


def test_tokens_without_word_starts_and_even_kernels_are_refused():
    model = {"encoder": SMALL["character_aware"], "head": {"kind": "classifier"}}
    labels = {"target": {"kind": "labels"}}
    with pytest.raises(InputError, match="do not tell where a word begins"):
        complete_recipe(parse({"model": model, "tokens": {**labels, "source": {"kind": "chars"}}}))
    model["encoder"] = {**SMALL["character_aware"], "kernel": 4}
    with pytest.raises(InputError, match="no middle row"):
        complete_recipe(parse({"model": model, "tokens": labels}))


def test_a_word_whose_first_byte_is_never_merged_with_its_space_begins_a_word():
    tokenizer = Tokenizer.train(["the cat sat on the mat"] * 9, "bpe", 300)
    ids = tokenizer.encode("the ézé cat [ sat ]").ids
    assert sum(tokenizer.word_starts[number] for number in ids) == 6
