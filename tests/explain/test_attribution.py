"""Attribution methods against Captum and brute force, and the explanation of an encoder with a head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_fixtures import CASES, make, shared
from run_fixtures import Command, colour_pairs
from torch import Tensor, nn

import transduce
from transduce.decoders import DECODERS
from transduce.encoders import ENCODERS
from transduce.encoders.character_aware import WordPieceEmbedding
from transduce.errors import InputError
from transduce.explain.attention import AttentionMap
from transduce.explain.attribution import (
    METHODS,
    AttributionInput,
    attribute,
    front_ends,
    integrated_gradients,
    source_attention,
)
from transduce.explain.faithfulness import FRACTIONS, measure, spearman
from transduce.explain.records import page_record
from transduce.flow import EOS, Batch, Padded

HEAD_ENCODERS = {
    "transformer": {"kind": "transformer", "width": 16, "layers": 2, "heads": 2, "ff_width": 16},
    "recurrent": {"kind": "recurrent", "width": 8, "layers": 1},
}
TASKS = {"classifier": ["good", "bad"], "tagger": ["A B C", "B B"]}


WITH_ENCODER = [*(f"{encoder}>recurrent" for encoder in ENCODERS), *(f"transformer>{decoder}" for decoder in DECODERS)]
# One table of embeddings, which the decoder reads too: its rows must not be scaled with those of the source.
SHARED_TABLES = [case for case in CASES if case.endswith("+tie-all") and "multi" not in case and "hard" not in case]
PAIRS = [*WITH_ENCODER, *SHARED_TABLES, "alone>transformer"]
IDS = (5, 9, 4, EOS)


def pair_of(network: nn.Module) -> AttributionInput:
    return AttributionInput(network, Batch(Padded.from_rows([[6, 4, 10, 7, 5, EOS]])), IDS)


def zero_token(network: nn.Module, token: int) -> None:
    """The embedding of a token becomes zero, in every table that a source is read with."""
    for table in front_ends(network) or [network.decoder.embedding]:
        with torch.no_grad():
            if isinstance(table, WordPieceEmbedding):  # a word of this one piece has a vector too
                table.words.weight[table._buckets(torch.tensor([[token]]), torch.ones(1, 1, dtype=torch.bool))] = 0
                table = table.pieces
            table.weight[token] = 0


# The edit transducer reads the tokens of the source too, to copy them; two encoders of one text have two rows a token.
@pytest.mark.parametrize("case", [one for one in PAIRS[:-1] if "edit" not in one and "multi" not in one])
def test_occlusion_is_the_change_of_log_p_without_a_row(case: str) -> None:
    """Oracle: each token in turn is replaced by one whose embedding is zero."""
    network = make(case)
    zero_token(network, 8)
    inputs = pair_of(network)
    found, ids = attribute(inputs, "occlusion"), inputs.batch.source.values
    with torch.no_grad():
        whole = inputs.log_probabilities(inputs.batch)[0]
        for row in range(5):
            changed = ids.clone()
            changed[0, row] = 8
            without = inputs.log_probabilities(Batch(Padded(changed, inputs.batch.source.mask)))[0]
            assert found[:, row].numpy() == pytest.approx((whole - without).numpy(), abs=1e-5)
    assert found.shape == (4, 6)
    assert found.abs().max() > 1e-4


# The Conformer has no absolute positions: its first layer norm does not depend on the scale of the embeddings, and the
# whole change happens at the baseline, where no step of the mean is.
@pytest.mark.parametrize("case", [one for one in PAIRS if "conformer" not in one])
def test_integrated_gradients_are_complete(case: str) -> None:
    """Their sum is log p of the source minus log p of a source of zeros."""
    inputs = pair_of(shared(case))
    found = attribute(inputs, "integrated_gradients")
    rows = found.size(1)
    with torch.no_grad():
        whole, none = inputs.scaled_log_probabilities(torch.tensor([[1.0], [0.0]]).expand(-1, rows))
    change = (whole - none).numpy()
    assert found.sum(1).numpy() == pytest.approx(change, abs=0.01 * float(np.abs(change).max()) + 1e-3)
    assert np.abs(change).max() > 0.01
    assert not any(one._forward_hooks for one in inputs.network.modules())


@pytest.mark.parametrize(
    "case", [*(f"{one}>{one}" for one in ("transformer", "recurrent", "convolutional")), *SHARED_TABLES[:1]]
)
def test_integrated_gradients_equal_captum(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from captum.attr import IntegratedGradients  # here: every worker collects this file, one runs it

    inputs = pair_of(shared(case))
    table, rows = inputs.network.encoder.embedding, inputs.batch.source.values.size(1)
    embed = table.forward

    def forward(values: Tensor) -> Tensor:
        with monkeypatch.context() as patch:  # a decoder with the same table reads fewer rows
            patch.setattr(table, "forward", lambda ids: values if ids.size(1) == rows else embed(ids))
            return inputs.log_probabilities(inputs.copies(len(values)))

    embedded = table(inputs.batch.source.values).detach()
    oracle = IntegratedGradients(forward)
    for position, row in enumerate(integrated_gradients(inputs, 24).float()):
        expected = oracle.attribute(embedded, target=position, n_steps=24, method="riemann_middle").sum(-1)[0]
        assert row.numpy() == pytest.approx(expected.detach().numpy(), abs=1e-4)
        assert np.abs(expected.detach().numpy()).max() > 1e-4


@pytest.mark.parametrize("case", ["transformer>transformer", "transformer,kv_heads=1>transformer,kv_heads=1"])
def test_attention_norms_and_rollout_by_their_definitions(case: str) -> None:
    inputs = pair_of(shared(case))
    network = inputs.network
    with torch.no_grad():
        step = inputs.step(inputs.batch, with_attention=True)
        weights = source_attention(step, inputs.batch)[0]  # L H T S
        memory = network.encoder(inputs.batch, with_attention=True)
        norms = []
        for layer, a in zip(network.decoder.layers, weights, strict=True):
            part = layer.cross_attention
            values = part.v_proj(memory.values)[0].unflatten(-1, (part.kv_heads, -1))  # S G K
            total = torch.zeros(4, 6, 16)
            for head in range(part.heads):
                value = values[:, head * part.kv_heads // part.heads]
                width = value.size(-1)
                transformed = value @ part.out_proj.weight[:, head * width : (head + 1) * width].T  # S D
                total += a[head][..., None] * transformed
            norms.append(total.norm(dim=-1))
        expected = torch.stack(norms).mean(0)
        product = torch.eye(6)
        for layer in memory.attention[0].mean(1):
            product = (0.5 * layer + 0.5 * torch.eye(6)) @ product
    found = attribute(inputs, "attention_norm")
    assert found.numpy() == pytest.approx((expected / expected.sum(1, keepdim=True)).numpy(), abs=1e-5)
    assert attribute(inputs, "rollout").numpy() == pytest.approx((weights.mean((0, 1)) @ product).numpy(), abs=1e-5)


@pytest.mark.parametrize("case", ["transformer>transformer", "convolutional>convolutional", "recurrent>recurrent"])
def test_value_zeroing_removes_what_a_row_adds(case: str) -> None:
    """Oracle: values of zero written into the state of the decoder."""
    inputs = pair_of(shared(case))
    found, distances = attribute(inputs, "value_zeroing"), []
    with torch.no_grad():
        whole = inputs.step(inputs.batch).hidden
        for row in range(6):
            state = inputs.network.start(inputs.batch)
            values = [one for _, one in state.fixed["memory"]] if "memory" in state.fixed else [state.fixed["values"]]
            for one in values:
                one[..., row, :] = 0
            distances.append(1 - torch.cosine_similarity(whole, inputs.advance(state, 1).hidden, dim=-1)[0])
    expected = torch.stack(distances, -1).clamp(min=0)
    assert found.numpy() == pytest.approx((expected / expected.sum(-1, keepdim=True)).numpy(), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", PAIRS)
def test_every_method_fits_or_says_why_not(case: str, method: str) -> None:
    inputs = pair_of(shared(case))
    try:
        found = attribute(inputs, method)
    except InputError:
        assert method not in ("occlusion", "integrated_gradients", "input_x_gradient")
        return
    assert found.shape[0] == 4
    assert torch.isfinite(found).all()
    if method in ("attention", "attention_norm", "rollout", "posterior", "value_zeroing"):
        assert found.sum(1).numpy() == pytest.approx(np.ones(4), abs=1e-4)


def test_a_posterior_knows_the_token_that_attention_does_not() -> None:
    """Another last token changes the posterior of its step alone, and the attention of no step."""
    inputs = pair_of(shared("transformer>hard_attention"))
    other = replace(inputs, ids=(*IDS[:-1], 7))
    for method, changed in (("attention", [False] * 4), ("posterior", [False, False, False, True])):
        difference = (attribute(inputs, method) - attribute(other, method)).abs().amax(1)
        assert (difference > 1e-6).tolist() == changed
    with pytest.raises(InputError, match="sums over its alignments"):
        attribute(pair_of(shared("transformer>transformer")), "posterior")


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(InputError, match="occlusion"):
        attribute(pair_of(shared("recurrent>recurrent")), "oclusion")


def test_deletions_remove_the_marked_rows() -> None:
    """Oracle: the row of the largest weight is replaced by a token whose embedding is zero."""
    network = make("transformer>transformer")
    zero_token(network, 8)
    inputs = pair_of(network)
    weights = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    weights[:, 5] = 0  # </s> is never the top row, so that the oracle needs no other token for it
    measured = measure(inputs, {"random": weights}, weights)["random"]
    expected = []
    with torch.no_grad():
        whole = inputs.log_probabilities(inputs.batch)[0]
        for token, row in enumerate(weights.argmax(1).tolist()):
            changed = inputs.batch.source.values.clone()
            changed[0, row] = 8
            without = inputs.log_probabilities(Batch(Padded(changed, inputs.batch.source.mask)))[0]
            expected.append((whole - without)[token].item())
    assert FRACTIONS[:4] == (0.01, 0.05, 0.1, 0.2)  # one row of six each
    assert measured.deletion_curve[:4] == pytest.approx([np.mean(expected)] * 4, abs=1e-5)
    assert measured.rank_correlation == pytest.approx(1.0)


def test_spearman_equals_scipy() -> None:
    from scipy.stats import spearmanr

    chance = np.random.default_rng(3)
    for size in (2, 5, 9):
        first, second = chance.integers(0, 4, size).astype(float), chance.normal(size=size)
        expected = spearmanr(first, second).statistic
        found = spearman(first, second)
        assert (found is None and np.isnan(expected)) or found == pytest.approx(expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier and a tagger, hardly trained."""
    folder, made = tmp_path_factory.mktemp("heads"), {}
    for head, encoder in (("classifier", "transformer"), ("tagger", "recurrent")):
        rows = [pair for number in range(20) for pair in ((f"a film {number}", 0), (f"dull {number}", 1))]
        path = folder / f"{head}.tsv"
        path.write_text("".join(f"{text}\t{TASKS[head][label]}\n" for text, label in rows))
        recipe: dict[str, Any] = {
            "data": {"train": str(path), "dev_size": 4, "cache": str(folder / "cache")},
            "tokens": {"source": {"kind": "words"}, "target": {"kind": "words" if head == "tagger" else "labels"}},
            "model": {"encoder": HEAD_ENCODERS[encoder], "head": {"kind": head}},
            "training": {"steps": 2, "validate_every": 2, "checkpoint_every": 2, "batch_tokens": 256},
            "evaluation": {"metrics": ["exact"], "resamples": 2},
        }
        made[head] = transduce.train(recipe, folder / head).run.folder
    return made


def test_a_classifier_is_explained_by_attribution_and_self_attention(runs: dict[str, Path]) -> None:
    explained = transduce.load(runs["classifier"]).explain("what a film", nbest=4, beam=4)
    assert explained.attention is None
    assert explained.self_attention is not None
    assert explained.self_attention.shape == (2, 2, 4, 4)
    shown = explained.map()
    assert shown.target_tokens == [explained.output, "what", "a", "film", "</s>"]
    assert shown.weights.sum(1) == pytest.approx(np.ones(5), abs=1e-5)
    assert shown.weights[1:] == pytest.approx(explained.self_attention.mean((0, 1)))
    assert {text for text, _ in explained.nbest} <= {"good", "bad"}
    content = page_record([explained], "run")
    assert content["run"]["shape"] == "encoder-head"
    assert list(content["explanations"][0]["attributions"]) == ["integrated_gradients"]
    assert content["explanations"][0]["explanation"]["kinds"] == {"encoder": [2, 2, 4, 4]}


def test_a_recurrent_tagger_has_attributions_alone(runs: dict[str, Path]) -> None:
    explained = transduce.load(runs["tagger"]).explain("so dull")
    assert explained.self_attention is None
    assert len(explained.map().target_tokens) == 2


def test_explain_says_what_it_shows(runs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    pictures = ("--html", tmp_path / "a.html", "--png", tmp_path / "a.png")
    called = command("explain", runs["classifier"], "what a film", *pictures)
    assert called.code == 0, called.err
    assert "attribution" in called.out
    assert "does not attend" not in called.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<title>classifier: attention</title>" in (tmp_path / "a.html").read_text()


def test_the_picture_shows_the_first_method(
    attention_run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[AttentionMap] = []
    monkeypatch.setattr("transduce.explain.png.draw_map", lambda shown, path, **titles: drawn.append(shown))
    ((source, target),) = colour_pairs(1)
    given = (attention_run, source, "--target", target, "--level", "token", "--png", tmp_path / "a.png")
    methods = ("--method", "occlusion", "--method", "attention_norm")
    for extra in ((), methods, methods[2:], ("--method", "attention")):
        assert command("explain", *given, *extra).code == 0
    explained = transduce.load(attention_run).explain(source, target, ["occlusion", "attention_norm"], measures=False)
    norms, losses = (explained.attribution_map(name).weights for name in ("attention_norm", "occlusion"))
    for shown, wanted in zip(drawn, (explained.map().weights, losses, norms, explained.map().weights), strict=True):
        assert shown.weights == pytest.approx(wanted, abs=1e-5)


def test_attributions_are_shown_and_written(attention_run: Path, tmp_path: Path, command: Command) -> None:
    methods = ("--method", "occlusion", "--method", "attention_norm", "--json", tmp_path / "a.json")
    ((source, target),) = colour_pairs(1)
    called = command("explain", attention_run, source, "--target", target, *methods)
    assert called.code == 0, called.err
    assert "occlusion: comprehensiveness" in called.out
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["output"] == target
    assert {name: np.shape(one) for name, one in record["attributions"].items()} == {
        "occlusion": (len(record["target_tokens"]), len(record["source_tokens"])),
        "attention_norm": (len(record["target_tokens"]), len(record["source_tokens"])),
    }
    for measured in record["faithfulness"].values():
        assert measured["verdict"] in " ".join(called.out.split())


def test_attributions_need_a_known_method_and_a_source(attention_run: Path, command: Command) -> None:
    called = command("explain", attention_run, "abc", "--method", "saliency")
    assert called.code != 0
    assert "no attribution method is called" in called.err
    assert "Traceback" not in called.err


def test_occlusion_marks_the_rows_that_matter(model: transduce.Model) -> None:
    """On a trained model the rows it marks cost more than random rows, for each of twelve sources: p = 2^-12."""
    for source, target in colour_pairs(12):
        measured = model.explain(source, target, ["occlusion"]).faithfulness["occlusion"]
        assert measured.comprehensiveness > measured.random_comprehensiveness
        assert measured.rank_correlation == pytest.approx(1.0)


def test_a_randomised_decoder_gives_another_map(attention_run: Path) -> None:
    model = transduce.load(attention_run)
    ((source, target),) = colour_pairs(1)
    before = model.explain(source, target, ["attention"]).attributions["attention"]
    with torch.no_grad():
        for weight in model.network.decoder.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.3)
    after = model.explain(source, target, ["attention"]).attributions["attention"]
    assert np.abs(before - after).max() > 0.1
