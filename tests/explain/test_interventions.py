"""Interventions: against weights and masks changed by hand; no trace in the model; syntax and commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_fixtures import fingerprint, make, shared
from run_fixtures import Command, colour_pairs

import transduce
from transduce.decoders import DECODERS
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.explain.interventions import (
    KINDS,
    IntervenedAttend,
    Intervention,
    attention_modules,
    intervene,
    shared_copy,
)
from transduce.flow import BOS, EOS, Batch, Padded, Step

EVERY = [
    *(f"{encoder}>recurrent" for encoder in ENCODERS),
    *(f"transformer>{decoder}" for decoder in DECODERS if decoder != "recurrent"),
    *(f"alone>{decoder}" for decoder in DECODERS),
    "conformer>transformer+copy",
    "transformer>transformer+tie-all+share-all",
    "conformer>transformer+ctc-{'weight': 0.4}",
]
FORMS = {
    "mask-token": "mask-token:1",
    "mask-head": "mask-head:cross:0.0",
    "mask-layer": "mask-layer:cross:0",
    "skip-layer": "skip-layer:decoder:1",
    "uniform": "uniform:cross:all",
    "permute": "permute:cross:all",
    "force-attention": "force-attention:cross:all:2@1",
    "swap-memory": "swap-memory:other",
    "swap-summary": "swap-summary:other",
    "swap-row": "swap-row:1:other",
}
# The summary starts recurrent states, and nothing of a Transformer; the others act on every decoder or are refused.
WITHOUT_SUMMARY = (">transformer", ">convolutional", ">prefix")
SOURCE = Padded.from_rows([[6, 4, 10, 7, 5, EOS]])
OTHER = Batch(Padded.from_rows([[9, 8, 4, EOS]]))
READ = torch.tensor([[BOS, 5, 9, 4]])


def read(network: torch.nn.Module, source: Padded = SOURCE) -> Step:
    with torch.no_grad():
        return network.advance(READ, network.start(Batch(source)), with_attention=True)


def changed(network: torch.nn.Module, *forms: str) -> torch.nn.Module:
    return intervene(network, [Intervention.parse(form) for form in forms], lambda _: OTHER)


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    assert first.numpy() == pytest.approx(second.numpy(), abs=1e-5)


@pytest.mark.parametrize("case", EVERY)
def test_interventions_change_the_output_and_leave_no_trace(case: str) -> None:
    """Every kind acts or is refused; weights and later logits are the same bits; every weight is shared."""
    network = shared(case)
    before, weights = read(network).logits, fingerprint(network)
    parameters = {id(one) for one in network.parameters()}
    refused = []
    for kind, form in FORMS.items():
        try:
            other = changed(network, form)
            after = read(other).logits
        except InputError:
            refused.append(kind)
            continue
        assert torch.isfinite(after).all()
        idle = kind == "swap-summary" and any(part in case for part in WITHOUT_SUMMARY)
        assert torch.equal(after, before) == idle, form
        assert {id(one) for one in other.parameters()} <= parameters
    assert torch.equal(read(network).logits, before)
    assert fingerprint(network) == weights
    attends = bool(attention_modules(network, "cross"))
    assert ("uniform" in refused) != attends
    assert ("swap-row" in refused) == case.startswith("alone")
    assert ("mask-token" in refused) == (
        "edit_transducer" in case or (case.startswith("alone") and not case.endswith(("former", "prefix")))
    )


EXPLICIT = [
    *EVERY,
    "recurrent>recurrent,context=luong-coverage+tie-target+copy",
    "transformer,window=2,position=relative,norm=post>transformer,window=2,position=relative,norm=post",
    "transformer,kv_heads=1>transformer,kv_heads=1",
]


@pytest.mark.parametrize("case", EXPLICIT)
def test_explicit_attention_without_edits_equals_the_fused_one(case: str) -> None:
    network = shared(case)
    copied = shared_copy(network)
    for place in ("cross", "self", "encoder"):
        for module in attention_modules(copied, place):
            assert type(module.attend) is not IntervenedAttend or "share" in case
            edited = IntervenedAttend(module.attend, (), multihead=place != "cross" or hasattr(module, "heads"))
            module._modules["attend"] = edited
    close(read(copied).logits, read(network).logits)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("transformer>transformer", "mask-head:cross:1.1"),
        ("transformer>transformer", "mask-head:self:0.1"),
        ("transformer>transformer", "mask-head:encoder:1.0"),
        ("transformer>transformer", "mask-layer:cross:1"),
        ("convolutional>convolutional", "mask-layer:cross:0"),
    ],
)
def test_a_masked_head_has_no_rows_in_the_output_projection(case: str, form: str) -> None:
    network, one = make(case), Intervention.parse(form)
    expected = read(changed(network, form))
    module = attention_modules(network, one.place)[one.layer or 0]
    columns = slice(None)
    if one.head is not None:
        columns = slice(one.head * module.head_width, (one.head + 1) * module.head_width)
    with torch.no_grad():
        module.out_proj.weight[:, columns] = 0
    close(read(network).logits, expected.logits)
    assert not torch.allclose(expected.logits, read(shared(case)).logits, atol=1e-4)


@pytest.mark.parametrize("place", ["cross", "self", "encoder"])
def test_uniform_attention_is_that_of_equal_scores(place: str) -> None:
    """Oracle: a head whose queries are zero has the score 0 everywhere, so a softmax averages the values."""
    network = make("transformer>transformer")
    expected = read(changed(network, f"uniform:{place}:1.0"))
    module = attention_modules(network, place)[1]
    with torch.no_grad():
        module.q_proj.weight[: module.head_width] = 0
        module.q_proj.bias[: module.head_width] = 0
    close(read(network).logits, expected.logits)
    if place == "cross":
        close(expected.attention.cross[0, 1, 0], torch.full((4, 6), 1 / 6))


def test_uniform_attention_of_a_recurrent_decoder_averages_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    network = make("recurrent>recurrent")
    expected = read(changed(network, "uniform:cross:all")).logits
    memory = network.encoder(Batch(SOURCE))
    attend = network.decoder.context.attend

    def mean(query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return memory.values.mean(1, keepdim=True).expand(-1, query.size(1), -1), torch.full(
            (1, query.size(1), 6), 1 / 6
        )

    monkeypatch.setattr(attend, "forward", mean)
    close(read(network).logits, expected)


@pytest.mark.parametrize("encoder", [one for one in ENCODERS if one not in ("multi_source",)])
def test_a_masked_token_is_padding(encoder: str) -> None:
    network = shared(f"{encoder}>recurrent")
    found = read(changed(network, "mask-token:5", "mask-token:4"))
    assert found.attention.cross[..., 4:].abs().max() == 0
    if encoder not in (
        "recurrent",
        "elmo",
        "character_aware",
    ):  # which need padding at the end, and read zeros where a token is masked
        mask = SOURCE.mask.clone()
        mask[:, 4:] = False
        close(found.logits, read(network, Padded(SOURCE.values, mask)).logits)
        close(found.logits, read(network, Padded.from_rows([[6, 4, 10, 7]])).logits)


def test_a_masked_token_of_a_decoder_alone_is_seen_by_itself_only() -> None:
    found = read(changed(shared("alone>transformer"), "mask-token:2"))
    assert found.attention.past[..., 2].abs().max() == 0  # after the source
    assert found.attention.past.sum(-1).numpy() == pytest.approx(np.ones((1, 2, 2, 4)), abs=1e-5)


@pytest.mark.parametrize("case", ["transformer>transformer", "recurrent>recurrent", "convolutional>convolutional"])
def test_forced_and_permuted_attention(case: str) -> None:
    network = shared(case)
    plain = read(network).attention.cross
    forced = read(changed(network, "force-attention:cross:all:3")).attention.cross
    assert forced[..., 3].eq(1).all()
    once = read(changed(network, "force-attention:cross:all:3@2")).attention.cross
    assert once[..., 2, 3].eq(1).all()
    close(once[..., :2, :], plain[..., :2, :])
    assert not once[..., 3, 3].eq(1).any()
    first = read(changed(network, "permute:cross:0:7")).attention.cross[:, 0]
    close(first[:, :, 0].sort(-1).values, plain[:, 0, :, 0].sort(-1).values)
    assert (first - plain[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "form", ["force-attention:cross:all:1@1", "permute:self:all@2", "uniform:self:1.0", "mask-token:2"]
)
@pytest.mark.parametrize("case", ["transformer>transformer", "transformer>recurrent", "alone>transformer"])
def test_laws_hold_under_intervention(case: str, form: str) -> None:
    """All tokens at once equal one by one, and a line in a padded batch equals the line alone."""
    try:
        network = changed(shared(case), form)
    except InputError:
        assert "cross" in form or "self" in form
        return
    whole, batch = read(network), Batch(Padded.from_rows([[9, 8, 4, 5, 6, 7, 10, EOS], [6, 4, 10, 7, 5, EOS]]))
    with torch.no_grad():
        state = network.start(Batch(SOURCE))
        for step in range(READ.size(1)):
            made = network.advance(READ[:, step : step + 1], state)
            state = made.state
            close(made.logits, whole.logits[:, step : step + 1])
        both = network.advance(READ.repeat(2, 1), network.start(batch)).logits
        close(both[1:], whole.logits)


def test_rows_of_different_steps_are_changed_each_at_its_own() -> None:
    """Prefixes of two lengths in one batch: the padded call equals the calls of single rows."""
    network = changed(shared("transformer>transformer"), "force-attention:cross:all:1@2")
    tokens, mask = torch.tensor([[BOS, 5, 9], [BOS, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    with torch.no_grad():
        state = network.start(Batch(Padded(SOURCE.values.repeat(2, 1), SOURCE.mask.repeat(2, 1))))
        state = network.advance(tokens, state, mask).state
        after = network.advance(torch.tensor([[4], [9]]), state, with_attention=True)
    assert state.past["intervention_step"].tolist() == [2, 1]
    assert not after.attention.cross[0, ..., 1].eq(1).any()
    assert after.attention.cross[1, ..., 1].eq(1).all()


def test_swapped_states() -> None:
    network = shared("recurrent>recurrent")
    other = read(network, OTHER.source)
    close(read(changed(network, "swap-memory:x")).logits, other.logits)
    bottleneck = shared("recurrent,bidirectional=False>recurrent,context=initial+share-layers")
    close(read(changed(bottleneck, "swap-summary:x")).logits, read(bottleneck, OTHER.source).logits)
    memory, foreign = network.encoder(Batch(SOURCE)), network.encoder(OTHER)
    values = memory.values.clone()
    values[:, 2] = foreign.values[:, 2]
    with torch.no_grad():
        patched = network.advance(READ, network.decoder.start(replace(memory, values=values)))
    close(read(changed(network, "swap-row:2:x")).logits, patched.logits)


@pytest.mark.parametrize("form", [*FORMS.values(), "force-prefix:the: cat", "force-token:2:x", "permute:self:1:9@3"])
def test_interventions_are_written_as_they_are_read(form: str) -> None:
    read_form = Intervention.parse(form)
    assert Intervention.parse(str(read_form)) == read_form
    assert read_form.to_json()["form"] == str(read_form)
    assert form.split(":")[0] in KINDS


@pytest.mark.parametrize(
    "form",
    ["mask-hed:cross:1.1", "mask-head:cross", "mask-head:sideways:0.1", "mask-token:two", "mask-token:-1", "uniform"],
)
def test_unreadable_interventions_are_refused(form: str) -> None:
    with pytest.raises(InputError):
        Intervention.parse(form)


@pytest.mark.parametrize(
    "form",
    [
        "mask-head:cross:9.0",
        "mask-head:cross:0.9",
        "skip-layer:decoder:9",
        "mask-token:99",
        "force-attention:cross:0:99",
    ],
)
def test_interventions_beyond_the_model_are_refused(form: str) -> None:
    with pytest.raises(InputError, match=r"no (layer|head|row)"):
        read(changed(shared("transformer>transformer"), form))


def test_outputs_under_intervention(model: transduce.Model) -> None:
    """Generation, scores and explanations; afterwards the model gives the same bits."""
    (source, target), (other, _) = colour_pairs(2)
    plain, score = model.generate([source])[0], model.score([(source, target)])[0]
    first = model.target.piece(model.target.encode(colour_pairs(3)[2][1]).ids[0])
    forced = model.generate([source], interventions=[f"force-token:0:{first}"])[0]
    assert forced.tokens[0] == first
    assert forced.token_scores[0] == pytest.approx(model.score([(source, forced.text)])[0].token_scores[0], abs=1e-4)
    prefixed = model.generate([source], interventions=[f"force-prefix:{first}"])[0]
    assert prefixed.tokens[0] == first
    assert model.generate([source], interventions=[f"swap-memory:{other}"])[0].text == model.generate([other])[0].text
    uniform = model.score([(source, target)], interventions=["uniform:cross:all"])[0]
    assert uniform.score != score.score
    shown = model.explain(source, target, interventions=["force-attention:cross:all:1@0"])
    assert shown.attention[0, 0, 0].tolist() == [0.0, 1.0, *[0.0] * (len(shown.source_tokens) - 2)]
    masked = model.explain(source, target, ["occlusion"], interventions=["mask-token:0"])
    assert masked.attention[..., 0].max() == 0
    assert model.generate([source])[0].token_scores == plain.token_scores
    assert model.score([(source, target)])[0] == score
    with pytest.raises(InputError, match="target is given"):
        model.score([(source, target)], interventions=["force-prefix:a"])
    with pytest.raises(InputError, match="one token"):
        model.generate([source], interventions=["force-token:0:no such token"])


def test_commands_take_interventions(attention_run: Path, tmp_path: Path, command: Command) -> None:
    ((source, _),) = colour_pairs(1)
    lines = tmp_path / "lines.txt"
    lines.write_text(source + "\n")
    word = colour_pairs(2)[1][1].split()[0]
    called = command("generate", attention_run, lines, "--intervene", f"force-prefix:{word}")
    assert called.out.startswith(word), called.err
    called = command("explain", attention_run, source, "--intervene", "uniform:cross:all")
    assert called.code == 0, called.err
    called = command("explain", attention_run, source, "--intervene", "mask-head:cross:4.0")
    assert called.code != 0
    assert "no layer 4" in called.err
