"""<cls> before the texts that an encoder reads."""

from __future__ import annotations

import pytest

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe
from transduce.training.experiment import train

PART = {"kind": "transformer", "width": 8, "layers": 1, "heads": 2, "ff_width": 8}
BOTH = {"source": {"cls": True}, "target": {"cls": True}, "shared": True}
SHORT = {"steps": 2, "validate_every": 2, "batch_tokens": 200, "checkpoint_every": 2}


def recipe(data: str, **tokens: object) -> dict:
    return {
        "data": {"train": data, "dev_size": 4},
        "tokens": {"source": {"kind": "bpe", "size": 300, **tokens}, "target": {"kind": "labels"}},
        "model": {"encoder": PART, "head": {"kind": "classifier", "pooling": "first"}},
        "training": SHORT,
        "evaluation": {"metrics": ["accuracy"]},
    }


@pytest.fixture
def labelled(tmp_path) -> str:
    lines = [f"{'good' if number % 2 else 'bad'} film {number}\t{number % 2}\n" for number in range(20)]
    (tmp_path / "labelled.tsv").write_text("".join(lines))
    return str(tmp_path / "labelled.tsv")


def test_every_source_begins_with_cls_in_training_and_afterwards(labelled, tmp_path):
    trained = train(recipe(labelled, cls=True, dropout=0.3), tmp_path / "run").model
    loaded = transduce.load(tmp_path / "run")
    for model in (trained, loaded):
        (ids,) = model.source_encoding.encode(["a good film"])
        assert ids[0] == BOS
        assert BOS not in ids[1:]
        assert model.source.decode(ids) == "a good film"
    assert loaded.generate(["a good film"])[0].text in "01"


def test_cls_may_be_added_to_the_tokenizer_of_another_run(labelled, tmp_path):
    train(recipe(labelled), tmp_path / "plain")
    marked = recipe(labelled, cls=True) | {"init": {"encoder": str(tmp_path / "plain")}}
    result = train(marked, tmp_path / "marked")
    log = (tmp_path / "marked" / "log.jsonl").read_text().splitlines()[0]
    assert "encoder.embedding.weight" in log  # the same vocabulary
    assert result.model.source.encode_source("film").ids[0] == BOS


def test_both_sides_of_an_embedder_have_cls(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"a {n}\tb {n}\n" for n in range(12)))
    wanted = recipe(str(tmp_path / "pairs.tsv"), cls=True)
    wanted["tokens"] = {"source": wanted["tokens"]["source"], "target": wanted["tokens"]["source"], "shared": True}
    wanted["model"]["head"] = {"kind": "embedder", "pooling": "first"}
    wanted["training"] = {**SHORT, "objective": {"kind": "contrastive"}}
    wanted["evaluation"] = {"metrics": ["recall@1"]}
    seen = []
    model = train(wanted, tmp_path / "run").model
    model.network.encoder.register_forward_pre_hook(lambda part, given: seen.append(given[0].source))
    model.embed(["a 1", "b 12"])
    assert all((one.values[:, 0] == BOS).all() and EOS in one.values for one in seen)


def test_sources_of_a_decoder_begin_with_cls(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"a {n}\tb {n}\n" for n in range(12)))
    wanted = recipe(str(tmp_path / "pairs.tsv"), cls=True)
    wanted["tokens"]["target"] = {"kind": "words"}
    wanted["model"] = {"encoder": PART, "decoder": PART}
    wanted["evaluation"] = {"metrics": ["exact"]}
    model = train(wanted, tmp_path / "run").model
    seen = []
    model.network.encoder.register_forward_pre_hook(lambda part, given: seen.append(given[0].source.values))
    (output,) = model.generate(["a 1"], strategy="greedy")
    assert all((ids[:, 0] == BOS).all() for ids in seen)
    assert len(seen) > 0
    assert BOS not in model.target.encode(output.text or "b 1").ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": {"target": {"cls": True}}, "model": {"encoder": PART, "decoder": PART}}, "that an encoder reads"),
        ({"tokens": BOTH, "model": {"encoder": PART, "decoder": PART}}, "a vocabulary of their own"),
        ({"tokens": {"target": {"kind": "labels", "cls": True}}}, "not for `kind: labels`"),
    ],
)
def test_cls_elsewhere_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        complete_recipe(parse({**recipe("pairs.tsv"), **change}))
