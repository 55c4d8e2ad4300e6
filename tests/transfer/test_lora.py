"""LoRA adapters: initial outputs, checkpoints, resuming, merging."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import RECURRENT, Command, colour_pairs, settings
from torch import Tensor, nn

import transduce
from transduce import transfer
from transduce.errors import InputError
from transduce.recipe import AdaptersRecipe, build, parse
from transduce.run import Run
from transduce.training.experiment import train
from transduce.training.resolve import resolve
from transduce.transfer.lora import BASE_FINGERPRINT, add_adapters, fingerprint, merge_weights

BLOCKS = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "ff_width": 32, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": BLOCKS, "decoder": BLOCKS},
    "recurrent": {"encoder": {**RECURRENT, "width": 16}, "decoder": {**RECURRENT, "width": 16, "context": "luong"}},
}
TEXTS = ["red blue", "green", "white black red"]


def recipe(pairs: Path, model: dict[str, Any], base: Path | None = None, **training: Any) -> dict[str, Any]:
    content = settings(pairs, model, "words", **{"steps": 6, "checkpoint_every": 3, "validate_every": 3, **training})
    if base is not None:
        content["init"] = {"model": str(base)}
        content["training"].setdefault("adapters", {"rank": 2, "alpha": 4})
    return content


@pytest.fixture(scope="module")
def bases(bench: Path, pairs: Path) -> dict[str, Path]:
    folder = bench / "adapters"
    for name, model in MODELS.items():
        train(recipe(pairs, model, steps=20), folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def other_pairs(bench: Path) -> Path:
    """The same words, not turned around."""
    file = bench / "straight.tsv"
    file.write_text("".join(f"{one}\t{one.upper()}\n" for one, _ in colour_pairs(200, seed=2)))
    return file


@pytest.fixture(scope="module", params=MODELS)
def adapted(request: pytest.FixtureRequest, bases: dict[str, Path], other_pairs: Path) -> transduce.Model:
    """The network training ended with, its run beside it."""
    name = request.param
    folder = bases[name].with_name(f"adapted-{name}")
    return train(recipe(other_pairs, MODELS[name], bases[name]), folder).model


def folder_of(model: transduce.Model) -> Path:
    base = Path(str(model.recipe.init.model))
    return base.with_name(f"adapted-{base.name}")


def logits(model: transduce.Model) -> Tensor:
    ids = torch.tensor([[4, 5, 6, 2]])
    return model.logits(source=ids, target=torch.tensor([[1, 4, 5, 6]]))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", MODELS)
def test_new_adapters_do_not_change_the_output(name: str) -> None:
    model = build.complete_recipe(parse({"model": MODELS[name]})).model
    network = build.build_model(model, 9, 9).eval()
    batch = transduce.flow.Batch(
        transduce.flow.Padded.from_rows([[4, 5, 2], [6, 2]]), transduce.flow.Padded.from_rows([[1, 7, 8, 2], [1, 5, 2]])
    )
    with torch.no_grad():  # to the bit, as it is read; training may add up in another order
        before, names = network(batch).logits, list(network.state_dict())
        add_adapters(network, AdaptersRecipe(rank=3), names)
        assert torch.equal(network(batch).logits, before)
    learned = network.state_dict()
    assert all(".adapters." in one for one in learned if one != BASE_FINGERPRINT)
    for one, parameter in network.named_parameters():
        if one.endswith(".lora_b"):
            nn.init.normal_(parameter)
    moved = network(batch).logits
    assert not torch.allclose(moved, before)
    # The oracle: the same matrices added up by hand, in a network that knows nothing of adapters.
    plain = build.build_model(model, 9, 9).eval()
    values = {one: tensor.detach() for one, tensor in network.named_parameters() if ".adapters." not in one}
    for one in names:
        path, _, last = one.rpartition(".")
        part = f"{path}.adapters.{last}"
        if f"{part}.lora_b" in learned:
            values[one] = values[one] + 16 / 3 * learned[f"{part}.lora_b"] @ learned[f"{part}.lora_a"]
    plain.load_state_dict(values, strict=False)
    torch.testing.assert_close(plain(batch).logits, moved, atol=1e-5, rtol=1e-4)


def test_attention_and_recurrent_matrices_get_adapters(adapted: transduce.Model) -> None:
    names = [name for name, _ in adapted.network.named_parameters() if name.endswith(".lora_a")]
    kind = adapted.recipe.model.encoder["kind"]  # type: ignore[index]
    looked_for = (
        "encoder.rnn.layers.0.adapters.weight_hh_l0"
        if kind == "recurrent"
        else "cross_attention.q_proj.adapters.weight"
    )
    assert any(looked_for in name for name in names)
    moved = [p for name, p in adapted.network.named_parameters() if name.endswith(".lora_b") and p.abs().sum() > 0]
    assert len(moved) == len(names)


def test_adapted_model_has_the_same_logits_after_loading(adapted: transduce.Model) -> None:
    loaded = transduce.load(folder_of(adapted), device="cpu")
    assert not any("adapters" in name for name in loaded.network.state_dict())  # put together on loading
    torch.testing.assert_close(logits(loaded), logits(adapted), atol=1e-5, rtol=1e-5)
    assert [one.text for one in loaded.generate(TEXTS)] == [one.text for one in adapted.generate(TEXTS)]


def test_checkpoints_hold_adapters_only(adapted: transduce.Model) -> None:
    run = Run(folder_of(adapted))
    base = Run(Path(str(adapted.recipe.init.model))).checkpoints.for_inference()
    assert base is not None
    for step in run.checkpoints.steps():
        held = run.checkpoints.load(step)
        assert not held.weights.keys() & base.weights.keys()
        assert all(".adapters." in name for name in held.weights if name != BASE_FINGERPRINT)
        assert all(".adapters." in name for name in held.tensors["optimiser"])


def test_training_adapters_does_not_change_the_base_run(
    bases: dict[str, Path], other_pairs: Path, tmp_path: Path
) -> None:
    before = files(bases["transformer"])
    train(recipe(other_pairs, MODELS["transformer"], bases["transformer"]), tmp_path / "run")
    assert files(bases["transformer"]) == before


def test_merged_run_has_the_same_outputs(adapted: transduce.Model, tmp_path: Path, command: Command) -> None:
    folder = folder_of(adapted)
    assert command("merge", folder, tmp_path / "merged").code == 0
    merged = transduce.load(tmp_path / "merged", device="cpu")
    assert merged.recipe.training.adapters is None
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)
    again = command("merge", folder, tmp_path / "merged")
    assert (again.code, "already" in again.err) == (2, True)
    plain = command("merge", tmp_path / "merged", tmp_path / "twice")
    assert (plain.code, "no adapters" in plain.err) == (2, True)


@pytest.mark.parametrize("training", [{"average_checkpoints": 2}, {"ema": 0.9, "unfreeze": 2, "layer_decay": 0.5}])
def test_resumed_adapter_training_equals_an_uninterrupted_run(
    training: dict[str, Any], bases: dict[str, Path], other_pairs: Path, tmp_path: Path
) -> None:
    def until(steps: int, folder: str) -> Any:
        constant = {"schedule": {"kind": "constant", "warmup": 0}}
        wanted = recipe(other_pairs, MODELS["transformer"], bases["transformer"], **training, **constant, patience=None)
        wanted["training"]["steps"] = steps
        return train(wanted, tmp_path / folder, resume=True)

    whole = until(6, "whole")
    until(3, "parts")
    parts = until(6, "parts")
    kinds = [Run(tmp_path / one).checkpoints.load(6).tensors for one in ("whole", "parts")]
    assert kinds[0].keys() == kinds[1].keys()
    for kind in kinds[0]:
        assert kinds[0][kind].keys() == kinds[1][kind].keys()
        assert all(torch.equal(kinds[0][kind][name], kinds[1][kind][name]) for name in kinds[0][kind])
    assert torch.equal(logits(whole.model), logits(parts.model))
    torch.testing.assert_close(logits(transduce.load(tmp_path / "parts", device="cpu")), logits(parts.model))


def test_a_new_head_is_trained_in_full_with_adapters(bases: dict[str, Path], bench: Path, tmp_path: Path) -> None:
    labelled = bench / "labelled.tsv"
    labelled.write_text("".join(f"{one}\t{one.split()[0]}\n" for one, _ in colour_pairs(100)))
    wanted = recipe(labelled, {"encoder": BLOCKS, "head": {"kind": "classifier"}}, bases["transformer"])
    wanted["tokens"]["target"] = {"kind": "labels"}
    wanted["evaluation"] = {"metrics": ["accuracy"]}
    trained = train(wanted, tmp_path / "labels")
    held = trained.run.checkpoints.for_inference()
    assert held is not None
    assert any(name.startswith("head.") for name in held.weights)
    assert not any(name.startswith("encoder.") and ".adapters." not in name for name in held.weights)
    loaded = transduce.load(tmp_path / "labels", device="cpu")
    assert [one.text for one in loaded.generate(TEXTS)] == [one.text for one in trained.model.generate(TEXTS)]
    # And a run may begin from such a run: what it gives is put together first.
    (pretrained,) = transfer.open_pretrained(parse({"init": {"model": str(tmp_path / "labels")}}).init)
    assert pretrained.weights.keys() == loaded.network.state_dict().keys()


def test_a_missing_or_changed_base_is_rejected(bases: dict[str, Path], other_pairs: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases["transformer"], base)
    wanted = recipe(other_pairs, MODELS["transformer"], base)
    train(wanted, tmp_path / "run")
    base.rename(tmp_path / "away")
    with pytest.raises(InputError, match="base of these adapters is gone"):
        transduce.load(tmp_path / "run")
    shutil.copytree(bases["transformer"], base)
    transduce.load(tmp_path / "run")
    weights = Run(base).checkpoints.for_inference()
    assert weights is not None
    name = "encoder.layers.0.self_attention.q_proj.weight"
    Run(base).checkpoints.save_final(20, {**weights.weights, name: weights.weights[name] + 1e-3}, {})
    with pytest.raises(InputError, match="other weights than when they were trained"):
        transduce.load(tmp_path / "run")
    longer = {**wanted, "training": {**wanted["training"], "steps": 9}}
    with pytest.raises(InputError, match="other weights than when they were trained"):
        train(longer, tmp_path / "run", resume=True)


def test_impossible_adapter_settings_are_rejected_early(bases: dict[str, Path], pairs: Path) -> None:
    base, model = bases["transformer"], MODELS["transformer"]
    alone = recipe(pairs, model, adapters={"rank": 2})
    with pytest.raises(InputError, match=r"init\.model"):
        resolve(alone)
    with pytest.raises(InputError, match="a single base"):
        resolve({**alone, "init": {"model": str(base), "encoder": str(base)}})
    with pytest.raises(InputError, match=r"did you mean .*decoder"):
        resolve(recipe(pairs, model, base, adapters={"targets": "decodr"}))
    with pytest.raises(InputError, match="rank"):
        resolve(recipe(pairs, model, base, adapters={"rank": 0}))


def test_tied_matrices_get_no_adapter() -> None:
    model = build.complete_recipe(parse({"model": {**MODELS["transformer"], "tie": "target"}})).model
    network = build.build_model(model, 9, 9)
    assert "decoder.output.projection.weight" not in transfer.adapter_targets(network, AdaptersRecipe())
    with pytest.raises(InputError, match=r"decoder\.output"):
        transfer.adapter_targets(network, AdaptersRecipe(targets=("decoder.output",)))


def test_merge_weights_computes_w_plus_scaled_b_a() -> None:
    base = {"a.weight": torch.eye(3), "a.bias": torch.ones(3)}
    up, down = torch.randn(3, 2), torch.randn(2, 3)
    learned = {"a.adapters.weight.lora_b": up, "a.adapters.weight.lora_a": down, BASE_FINGERPRINT: fingerprint(base)}
    whole = merge_weights(base, learned, list(base), AdaptersRecipe(rank=2, alpha=6), "base")
    torch.testing.assert_close(whole["a.weight"], torch.eye(3) + 3 * up @ down)
    assert torch.equal(whole["a.bias"], base["a.bias"])
    with pytest.raises(InputError, match="other weights"):
        merge_weights({**base, "a.bias": torch.zeros(3)}, learned, list(base), AdaptersRecipe(rank=2), "base")
