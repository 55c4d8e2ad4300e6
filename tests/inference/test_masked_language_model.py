"""Masked language models and denoising: refused recipes, loss masks, mask filling, fine-tuning."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close

from transduce.autoconfig import recipe_for
from transduce.data.batching import DataPosition
from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.errors import InputError
from transduce.evaluation.held_out import load_held_out, predict
from transduce.flow import BOS, EOS, UNK, Batch, Padded
from transduce.inference import load
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.recipe.registry import user_classes
from transduce.training.experiment import train

ENCODER = {"kind": "elmo", "width": 8, "layers": 2, "dropout": 0.0}
LINES = [f"the {one} {two} the {three}" for one in "abcd" for two in ("sees", "hears") for three in "abcd"]


def recipe(tmp_path, **model):
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in LINES))
    noise = "nothing" if model.get("head", {}).get("kind") == "bilm" else "mask_tokens"
    words = {"kind": "words", "size": 50}
    return {
        "data": {
            "format": "text",
            "train": str(tmp_path / "text.txt"),
            "noise": {"kind": noise},
            "cache": str(tmp_path / "cache"),
        },
        "tokens": {"source": words, "target": words},
        "model": {"encoder": ENCODER, **model},
        "training": {"steps": 2, "validate_every": 2, "batch_tokens": 64, "objective": {"label_smoothing": 0.0}},
        "evaluation": {"metrics": ["accuracy", "perplexity"], "resamples": 10},
    }


@pytest.fixture
def run(tmp_path):
    train(recipe(tmp_path, head={"kind": "mlm"}, tie="target"), tmp_path / "run")
    return tmp_path / "run"


def test_only_masks_are_filled(run):
    model = load(run)
    known = {model.target.piece(number) for number in range(4, model.target.size)}
    found = model.generate(["the a sees the <mask>", "<mask> <mask> sees", "the b hears the d", ""])
    assert found[0].text.split()[:4] == ["the", "a", "sees", "the"]
    assert len(found[0].text.split()) == 5
    assert found[0].text.split()[4] in known
    assert found[1].text.split()[2] == "sees"
    assert found[2].text == "the b hears the d"  # nothing is masked, so nothing is changed
    assert found[3].text == ""
    assert len(found[0].tokens) == 6
    assert found[0].tokens[:2] == ("the", "a")
    assert [score < -1e-3 for score in found[0].token_scores] == [False, False, False, False, True, False]
    rivals = model.generate(["the a sees the <mask>"], nbest=4, beam=4)[0].nbest
    assert len({one.text for one in rivals}) == len(rivals) > 1
    assert [one.score for one in rivals] == sorted((one.score for one in rivals), reverse=True)
    with pytest.raises(InputError, match="restores noised text"):
        model.score([("the a", "the a")])
    assert model.explain("the a sees the <mask>").source_tokens[-2:] == [" <mask>", "</s>"]


def test_the_same_tokens_are_asked_for_every_time(run):
    model = load(run)
    _, lines = load_held_out(model, None)
    one, two = (predict(model, lines, ["accuracy", "perplexity"]) for _ in range(2))
    assert one == two
    assert one.noised is not None
    for line, source, references in zip(lines, one.noised.sources, one.noised.references, strict=True):
        assert len(references[0].split()) == 1  # 15 % of five tokens, at least one
        changed = [a for a, b in zip(line.references[0].split(), source.split(), strict=True) if a != b]
        assert set(changed) <= set(references[0].split())
    assert [scored.tokens for scored in one.scored] == [1] * len(lines)


def test_the_output_layer_is_the_embedding(run):
    network = load(run).network
    assert network.head.output.projection.weight is network.encoder.embedding.weight


def test_damage_is_another_in_every_epoch_and_the_same_again(tmp_path):
    completed = complete_recipe(parse(recipe(tmp_path, head={"kind": "mlm"})))
    tokenizers = train_tokenizers(completed)
    one, two = (prepare_data(completed, tokenizers) for _ in range(2))
    batches, again = one.batches(completed, tokenizers), two.batches(completed, tokenizers)

    def sources(made, epoch):
        found = {}
        for index in range(made.batches_in(epoch)):
            batch = made.at(DataPosition(epoch, index))
            assert torch.equal(batch.target.values[:, 1:][batch.labels.mask], batch.labels.values[batch.labels.mask])
            found.update(zip(batch.rows, batch.source.values.tolist(), strict=True))
        return found

    assert sources(batches, 0) == sources(again, 0)
    assert sources(batches, 0) != sources(batches, 1)
    first, second = ([batch.source.values.tolist() for batch in data.dev_batches(completed)] for data in (one, two))
    assert first == second


def test_the_encoder_is_taken_over_by_a_classifier(tmp_path, run):
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line.split()[2]}\n" for line in LINES))
    content = recipe(tmp_path, head={"kind": "classifier"})
    content["data"] = {"train": str(tmp_path / "pairs.tsv"), "cache": str(tmp_path / "cache")}
    content["tokens"]["target"] = {"kind": "labels"}
    content["init"] = {"encoder": str(run)}
    content["training"]["freeze"] = ["encoder"]
    content["evaluation"] = {"metrics": ["accuracy"], "resamples": 10}
    taught = train(content, tmp_path / "tuned").model
    origin = load(run)
    assert taught.source.fingerprint == origin.source.fingerprint
    assert_close(taught.network.encoder.state_dict(), origin.network.encoder.state_dict(), rtol=0, atol=0)
    event = json.loads((tmp_path / "tuned" / "log.jsonl").read_text().splitlines()[0])
    assert len(event["runs"][0]["loaded"]) == len(origin.network.encoder.state_dict())


def test_fine_tuning_takes_tokenizer_and_encoder_of_the_pretrained_run(tmp_path, run):
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line.split()[2]}\n" for line in LINES))
    chosen = recipe_for(str(tmp_path / "pairs.tsv"), [f"init.encoder={run}", "model.encoder.dropout=0.2"], "classify")
    assert chosen.model.encoder == {**ENCODER, "cell": "lstm", "dropout": 0.2}
    assert chosen.tokens.source == load(run).recipe.tokens.target
    assert chosen.tokens.target.kind == "labels"
    content = recipe(tmp_path, decoder={"kind": "recurrent", "width": 8})
    train(content, tmp_path / "both")
    joined = recipe_for(str(tmp_path / "pairs.tsv"), [f"init.model={tmp_path / 'both'}"])
    assert joined.tokens.shared
    assert joined.model == load(tmp_path / "both").recipe.model


def test_masked_training_is_initialised_from_a_masked_run(tmp_path, run):
    """One text, one vocabulary: the one that was lent."""
    content = {**recipe(tmp_path, head={"kind": "mlm"}, tie="target"), "init": {"model": str(run)}}
    (tmp_path / "text.txt").write_text("the zebra sees the a\nthe b sees the zebra\nthe c hears the d\n")
    model = train(content, tmp_path / "more").model
    assert model.source is model.target
    assert model.source.fingerprint == load(run).source.fingerprint


def test_a_task_without_a_recipe(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in LINES))
    chosen = complete_recipe(recipe_for(str(tmp_path / "text.txt"), [], "mask"))
    assert chosen.data.format == "text"
    assert chosen.data.noise["kind"] == "mask_tokens"
    assert chosen.model.head["kind"] == "mlm"
    (tmp_path / "pairs.tsv").write_text("a man sleeps\the is awake\tno\n" * 5)
    entailed = recipe_for(str(tmp_path / "pairs.tsv"), [f"data.test={tmp_path / 'pairs.tsv'}"], "entail")
    assert entailed.data.train[0].source_columns == entailed.data.test[0].source_columns == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"data": {"format": "text"}}, "mlm reads lines of text with noise mask_tokens, not text with none"),
        (
            {"data": {"format": "text"}, "model": {"encoder": ENCODER, "decoder": {"kind": "recurrent"}}},
            "an encoder needs a source",
        ),
        ({"data": {"noise": {"kind": "mask_tokens"}}}, "mlm reads lines of text"),
        ({"data": {"format": "text", "noise": {"kind": "delete"}}}, "mlm reads lines of text"),
        ({"model": {"encoder": ENCODER, "head": {"kind": "bilm"}}}, "bilm reads lines of text"),
        (
            {
                "data": {"format": "text", "noise": {"kind": "nothing"}},
                "model": {"encoder": {"kind": "recurrent"}, "head": {"kind": "bilm"}},
            },
            "would attend to its own label",
        ),
        ({"data": {"format": "text", "noise": {"kind": "mask_tokens", "rat": 1}}}, "unknown key 'mask_tokens.rat'"),
        ({"data": {"format": "text", "noise": {"kind": "mask_tokens", "rate": 0}}}, "mask_tokens.rate"),
        ({"data": {"format": "text", "noise": {"kind": "masks"}}}, "mlm reads lines of text"),
        (
            {"data": {"format": "text", "noise": {"kind": "delete"}}, "model": {"decoder": {"kind": "recurrent"}}},
            "noise needs an encoder",
        ),
        (
            {"data": {"noise": {"kind": "delete"}}, "model": {"encoder": ENCODER, "decoder": {"kind": "recurrent"}}},
            "noise needs lines of text",
        ),
        (
            {
                "data": {},
                "tokens": {"target": {"kind": "labels"}},
                "model": {"encoder": ENCODER, "head": {"kind": "classifier"}, "tie": "target"},
            },
            "only a head that predicts source tokens can be tied",
        ),
        ({"model": {"encoder": ENCODER, "head": {"kind": "mlm"}, "output": "deep"}}, "output: deep is for decoders"),
    ],
)
def test_incompatible_recipes_are_refused(change, problem):
    content = {
        "data": {"format": "text", "noise": {"kind": "mask_tokens"}},
        "model": {"encoder": ENCODER, "head": {"kind": "mlm"}},
        **change,
    }
    with pytest.raises(InputError, match=problem):
        complete_recipe(parse(content))


def test_noise_of_the_user_counts_as_user_code():
    content = {"data": {"format": "text", "noise": {"kind": "mine:Storm"}}, "model": {"decoder": {"kind": "recurrent"}}}
    assert user_classes(parse(content)) == ["mine:Storm"]


def elmo(head: str = "bilm"):
    torch.manual_seed(1)
    content = {"data": {"format": "text", "noise": {"kind": "nothing"}}, "model": {"encoder": ENCODER, "head": head}}
    content["model"]["head"] = {"kind": head}
    return build_model(complete_recipe(parse(content)).model, 12, 12).eval()


@pytest.mark.parametrize("place", range(5))
def test_a_token_never_sees_itself(place):
    model, ids = elmo(), [5, 6, 7, 8, 9]
    changed = [*ids[:place], 11, *ids[place + 1 :]]

    def outputs(row):
        return model(Batch(Padded.from_rows([[*row, EOS]]), Padded.from_rows([[BOS, *ids, EOS]]))).logits[0]

    before, after = outputs(ids), outputs(changed)
    assert_close(before[place], after[place], rtol=0, atol=0)
    others = [other for other in range(5) if other != place]
    assert (before[others] - after[others]).abs().amax(-1).min() > 1e-4  # and all others do see it


def test_layers_are_mixed_as_the_paper_says():
    encoder, source = elmo().encoder, Padded.from_rows([[5, 6, 7, EOS], [8, EOS]])
    with torch.no_grad():
        encoder.layer_weights.copy_(torch.tensor([0.3, -0.2, 0.5]))
        encoder.gamma.fill_(1.7)
        layers = []
        for chosen in range(3):  # each layer alone, by a weight that leaves nothing to the others
            alone = elmo().encoder
            alone.layer_weights.copy_(torch.full((3,), -100.0).index_fill(0, torch.tensor([chosen]), 100.0))
            layers.append(alone(Batch(source)).values)
        weights = torch.tensor([0.3, -0.2, 0.5]).softmax(0)
        wanted = 1.7 * sum(weight * layer for weight, layer in zip(weights, layers, strict=True))
        assert_close(encoder(Batch(source)).values, wanted)
        embedded = encoder.input_proj(encoder.embedding(source.values))
        assert_close(layers[0], torch.cat((embedded, embedded), -1))


def test_the_directions_never_meet():
    encoder = elmo().encoder
    plain, changed = (encoder(Batch(Padded.from_rows([[5, 6, middle, 8, EOS]]))).values[0] for middle in (7, 9))
    differs = (plain - changed).abs().reshape(5, 2, 4).amax(-1) > 1e-6
    assert differs[:, 0].tolist() == [False, False, True, True, True]
    assert differs[:, 1].tolist() == [True, True, True, False, False]


def test_an_unknown_word_is_not_asked_for(tmp_path):
    completed = complete_recipe(parse(recipe(tmp_path, head={"kind": "bilm"})))
    tokenizers = train_tokenizers(completed)
    (tmp_path / "text.txt").write_text("".join(f"the zebra sees the {one}\n" for one in "abcd"))
    data = prepare_data(completed, tokenizers)
    batch = data.batches(completed, tokenizers).at(DataPosition())
    assert (batch.labels.values == UNK).any()
    assert not (batch.labels.mask & (batch.labels.values == UNK)).any()
