"""Multi-source encoders: independence of padding and batch, the order of the parts, copying."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
RECURRENT = {"kind": "recurrent", "width": 8, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 12, "layers": 1, "heads": 2, "ff_width": 16, "dropout": 0.0}
PLAIN = {"kind": "identity", "width": 8, "dropout": 0.0}
SOURCES = {"one": "text", "two": "text", "three": "text"}
PARTS = {"one": RECURRENT, "two": TRANSFORMER, "three": PLAIN}
DECODER = {"kind": "recurrent", "width": 16, "dropout": 0.0}
rows = st.lists(st.integers(4, 10), min_size=0, max_size=5)


def recipe(parts=PARTS, sources=SOURCES, tokens=None, **model) -> dict:
    return {
        "data": {"sources": sources},
        "tokens": {"shared": True, **(tokens or {})},
        "model": {"encoder": {"kind": "multi_source", "width": 16, "parts": parts}, "decoder": DECODER, **model},
    }


def make(**changes) -> torch.nn.Module:
    torch.manual_seed(2)
    return build_model(complete_recipe(parse(recipe(**changes))).model, 11, 11).eval()


def sources(*examples: tuple[list[int], ...], more: int = 0) -> Batch:
    """Examples of three texts each, with so many columns more than they need."""
    sides = [Padded.from_rows([[*text, EOS] for text in side]) for side in zip(*examples, strict=True)]
    wider = [
        Padded(torch.nn.functional.pad(side.values, (0, more), value=5), torch.nn.functional.pad(side.mask, (0, more)))
        for side in sides
    ]
    return Batch(wider[0], extra={"two": wider[1], "three": wider[2]})


@given(st.lists(st.tuples(rows, rows, rows), min_size=1, max_size=4), st.integers(0, 3))
def test_memory_does_not_depend_on_padding_or_batch(examples, more):
    encoder = make().encoder
    together = encoder(sources(*examples, more=more))
    for row, example in enumerate(examples):
        alone = encoder(sources(example))
        real = sum(len(text) + 1 for text in example)
        assert alone.mask.all()
        assert together.mask[row].tolist() == [place < real for place in range(together.mask.size(1))]
        assert_close(together.values[row, :real], alone.values[0], **CLOSE)
        assert_close(together.summary[row], alone.summary[0], **CLOSE)
        assert together.tokens[row, :real].tolist() == [token for text in example for token in [*text, EOS]]
        assert [grid[0] for grid in encoder.grids([len(text) + 1 for text in example])] == [
            len(text) + 1 for text in example
        ]


def test_each_encoder_reads_its_own_source_and_adds_its_source_embedding():
    encoder = make().encoder
    same = encoder(sources(([4, 5], [4, 5], [4, 5])))
    assert not torch.allclose(same.values[0, 0:3], same.values[0, 6:9], atol=1e-3)
    changed = encoder(sources(([4, 5], [4, 6], [4, 5])))
    moved = (changed.values[0] - same.values[0]).abs().amax(1) > 1e-6
    assert moved.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    with torch.no_grad():
        encoder.source_embedding[1] += 1
    tagged = encoder(sources(([4, 5], [4, 5], [4, 5])))
    assert_close(tagged.values[0, 3:6], same.values[0, 3:6] + 1, **CLOSE)
    assert_close(tagged.values[0, :3], same.values[0, :3], **CLOSE)


def test_texts_of_equal_width_share_their_embedding():
    parts = make().encoder.encoders
    assert parts["one"].embedding is parts["three"].embedding
    assert parts["one"].embedding is not parts["two"].embedding


def test_tokens_of_all_text_sources_can_be_copied():
    model = make(copy={})
    batch = sources(([4], [5], [6]))
    step = model.advance(torch.ones(1, 1, dtype=torch.long), model.start(batch))
    assert step.logits.isfinite().all()
    # A gate that only copies: every token of any part, and no other, has a chance.
    with torch.no_grad():
        model.decoder.gate.bias.fill_(-50)
        model.decoder.gate.weight.zero_()
    probabilities = model.advance(torch.ones(1, 1, dtype=torch.long), model.start(batch)).logits[0, 0].softmax(-1)
    assert [place for place, chance in enumerate(probabilities.tolist()) if chance > 1e-6] == [EOS, 4, 5, 6]


NUMBERED = {"oov_placeholders": 5, "source": {"kind": "words"}, "target": {"kind": "words"}}
PICTURE = {**PLAIN, "front": {"kind": "patches", "patch_size": 4}}
SEEN = {"picture": {"kind": "image", "size": 8}, "question": "text"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tie": "all"}, "tie: all needs a text of width 16"),
        ({"tokens": NUMBERED}, "one source text"),
        ({"share": "layers"}, "no weights of equal name and shape"),
        ({"parts": {"two": RECURRENT, "one": RECURRENT}}, "sources one, two, three but encoders for two, one"),
        ({"parts": {}}, "multi_source needs parts"),
        ({"parts": {**PARTS, "two": PICTURE}}, "two needs no front"),
        ({"sources": SEEN, "parts": {"picture": RECURRENT, "question": RECURRENT}}, "picture is not a text"),
        ({"sources": SEEN, "parts": {"picture": PICTURE, "question": RECURRENT}, "copy": {}}, "nothing to copy"),
    ],
)
def test_incompatible_recipes_raise_input_errors(changes, problem):
    with pytest.raises(InputError, match=problem):
        complete_recipe(parse(recipe(**changes)))


def test_embedding_of_a_source_of_equal_width_can_be_tied():
    model = make(parts={**PARTS, "two": {**RECURRENT, "width": 16}}, tie="all")
    assert model.encoder.encoders["two"].embedding.weight is model.decoder.output.projection.weight
