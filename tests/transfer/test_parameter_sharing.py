"""Parameter sharing between encoder and decoder."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.inference import load
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe, count_parameters
from transduce.training.experiment import train

SIZE, WIDTH = 11, 8
GRU = {"kind": "recurrent", "width": WIDTH, "layers": 2, "dropout": 0.0}
ONE_WAY = {**GRU, "bidirectional": False}
STARTED = {**GRU, "context": "initial"}
TRANSFORMER = {"kind": "transformer", "width": WIDTH, "layers": 2, "heads": 2, "ff_width": 12, "dropout": 0.0}
BATCH = Batch(Padded.from_rows([[5, 6, EOS], [7, EOS]]), Padded.from_rows([[BOS, 6, 5, EOS], [BOS, 7, EOS]]))


def build(encoder, decoder, share, tie="none", shared=True):
    recipe = {
        "tokens": {"shared": shared},
        "model": {"encoder": encoder, "decoder": decoder, "share": share, "tie": tie},
    }
    torch.manual_seed(1)
    return build_model(complete_recipe(parse(recipe)).model, SIZE, SIZE)


def count(part, *inside: str) -> int:
    named = part.named_parameters()
    return sum(parameter.numel() for name, parameter in named if any(one in name for one in inside))


@pytest.mark.parametrize(
    ("encoder", "decoder", "inside"),
    [
        (ONE_WAY, STARTED, ("rnn.",)),
        (TRANSFORMER, TRANSFORMER, (".self_attention.", ".feed_forward.", "er.final_norm.")),
    ],
)
def test_sharing_reduces_the_number_of_parameters(encoder, decoder, inside):
    apart = build(encoder, decoder, "none")
    layers, all_of_it = (build(encoder, decoder, share) for share in ("layers", "all"))
    saved = count(apart, *(f"encoder.{one}" if one == "rnn." else one for one in inside))
    saved = saved if inside == ("rnn.",) else saved // 2  # both sides have been counted
    assert count_parameters(apart) - count_parameters(layers) == saved
    assert count_parameters(layers) - count_parameters(all_of_it) == SIZE * WIDTH


@pytest.mark.parametrize(("encoder", "decoder"), [(ONE_WAY, STARTED), (ONE_WAY, GRU), (TRANSFORMER, TRANSFORMER)])
@pytest.mark.parametrize(("share", "tie"), [("layers", "none"), ("all", "none"), ("all", "target"), ("layers", "all")])
def test_shared_gradient_is_the_sum_of_both_sides(encoder, decoder, share, tie):
    """A twin whose weights are apart but equal: the shared gradient is the sum of its two."""
    model, twin = build(encoder, decoder, share, tie), build(encoder, decoder, "none", tie)
    twin.load_state_dict(model.state_dict())
    for network in (model, twin):
        torch.nn.functional.cross_entropy(network(BATCH).logits.flatten(0, 1), BATCH.labels.values.flatten()).backward()
    assert_close(model(BATCH).logits, twin(BATCH).logits)
    places: dict[int, list[torch.Tensor]] = {}
    own = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(own[name])
    for parameter in model.parameters():
        distinct = {id(one): one.grad for one in places[id(parameter)]}
        assert_close(parameter.grad, sum(distinct.values()), rtol=1e-4, atol=1e-6)
    assert any(len({id(one) for one in several}) > 1 for several in places.values())


def test_norms_of_encoder_and_decoder_layers_are_not_shared():
    """The second norm of a decoder's block is that of its cross-attention; the encoder has none."""
    model = build(TRANSFORMER, TRANSFORMER, "layers")
    one, other = (
        {id(parameter) for residual in layer.residuals for parameter in residual.norm.parameters()}
        for layer in (model.encoder.layers[0], model.decoder.layers[0])
    )
    assert one
    assert other
    assert not one & other


@pytest.mark.parametrize(
    ("encoder", "decoder", "share", "shared", "words"),
    [
        (GRU, GRU, "layers", True, "bidirectional: false"),
        (ONE_WAY, TRANSFORMER, "layers", True, "one kind"),
        (ONE_WAY, {**STARTED, "layers": 3}, "layers", True, "number of layers"),
        (None, TRANSFORMER, "layers", True, "needs an encoder and a decoder"),
        (ONE_WAY, STARTED, "all", False, "tokens.shared: true"),
        (ONE_WAY, {**STARTED, "width": 10}, "all", True, "equal width"),
    ],
)
def test_impossible_sharing_is_rejected(encoder, decoder, share, shared, words):
    with pytest.raises(InputError) as message:
        build(encoder, decoder, share, shared=shared)
    assert words in str(message.value)


def test_shared_model_trains_saves_and_loads(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"a b {one}\t{one} b a\n" for one in "cdefgh" * 10))
    tokens = {"kind": "words"}
    recipe = {
        "data": {"train": str(path), "dev_size": 10, "cache": str(tmp_path / "cache")},
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {"encoder": ONE_WAY, "decoder": STARTED, "share": "all", "tie": "target"},
        "training": {"steps": 6, "batch_tokens": 128, "ema": 0.5},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    trained = train(recipe, tmp_path / "run")
    again = load(tmp_path / "run")
    assert again.parameters == trained.model.parameters
    stacks = again.network.encoder.rnn, again.network.decoder.rnn
    assert [id(p) for p in stacks[0].parameters()] == [id(p) for p in stacks[1].parameters()]
    pair = [("a b c", "c b a")]
    assert again.score(pair)[0].score == pytest.approx(trained.model.score(pair)[0].score)
