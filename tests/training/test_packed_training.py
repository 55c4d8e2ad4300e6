"""Training with packed batches (`training.packing`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_batch_size import small_recipe
from torch.testing import assert_close

from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.errors import InputError
from transduce.objectives import CrossEntropy, MinimumRisk
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.training.experiment import train
from transduce.training.resolve import resolve, with_packing

pytestmark = pytest.mark.slow


def changed(recipe: Recipe, **training: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})


def test_a_resumed_packed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    recipe = changed(small_recipe(tmp_path), packing=True, batch_tokens=600, steps=6, checkpoint_every=3)
    whole = train(recipe, tmp_path / "whole").model.network.state_dict()
    train(changed(recipe, steps=3), tmp_path / "parts")
    parts = train(changed(recipe, packing="auto"), tmp_path / "parts", resume=True).model.network.state_dict()
    assert Run(tmp_path / "parts").recipe().training.packing is True
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name])


def test_packed_and_padded_batches_give_the_same_update(tmp_path: Path) -> None:
    """One update over all pairs: packed in one micro-batch, packed in three, and padded."""
    found = []
    for number, options in enumerate(({"packing": True}, {"packing": True, "accumulate": 3}, {"packing": False})):
        recipe = changed(small_recipe(tmp_path), batch_tokens=4096, steps=1, **options)
        assert recipe.model.encoder is not None
        assert recipe.model.decoder is not None
        recipe.model.encoder["dropout"] = recipe.model.decoder["dropout"] = 0.0
        found.append(train(recipe, tmp_path / f"run-{number}").model.network.state_dict())
    for other in found[1:]:
        assert_close(found[0], other, atol=1e-5, rtol=1e-3)


def resolved_packing(recipe: Recipe, objective: Any = None, device: str = "cuda", processes: int = 1) -> bool | str:
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    made = with_packing(recipe, tokenizers, data, objective or CrossEntropy(), torch.device(device), processes)
    return made.training.packing


def test_auto_packing_applies_with_cuda_graphs_and_fused_attention(tmp_path: Path) -> None:
    recipe = changed(small_recipe(tmp_path), batch_tokens=4096)
    assert resolved_packing(recipe) is True
    assert resolved_packing(recipe, device="cpu") is False
    assert resolved_packing(changed(recipe, cuda_graphs=False)) is False
    for parallel, processes, packed in (("ddp", 2, True), ("fsdp", 1, True), ("fsdp", 2, False)):
        assert resolved_packing(changed(recipe, parallel=parallel), processes=processes) is packed
    assert resolved_packing(changed(recipe, packing=False)) is False
    kinds = {"position": {"rotary": True, "learned": True, "relative": False, "alibi": False}}
    kinds |= {"normaliser": {"softmax": True, "sparsemax": False}, "score": {"scaled_dot": True, "mlp": False}}
    for option, names in kinds.items():
        for name, packed in names.items():
            assert resolved_packing(with_parts(recipe, kind="transformer", **{option: name})) is packed
    assert resolved_packing(changed(with_parts(recipe, kind="transformer", position="alibi"), packing=True)) is True


def test_packing_is_refused_with_the_reason(tmp_path: Path) -> None:
    recipe = changed(small_recipe(tmp_path), batch_tokens=4096, packing=True)
    short = {"kind": "learned", "max_positions": 40}
    cases: list[tuple[Recipe, Any, str]] = [
        (changed(recipe, batch_tokens=200), None, "200 tokens are not one row"),
        (recipe, MinimumRisk(), "this objective"),
        (with_parts(recipe, kind="recurrent"), None, "only a Transformer"),
        (with_parts(recipe, kind="transformer", token_mixer="average"), None, "only a Transformer"),
        (with_parts(recipe, kind="transformer", position=short), None, "the model has 40"),
    ]
    for one, objective, reason in cases:
        with pytest.raises(InputError, match=reason) as error:
            resolved_packing(one, objective)
        assert "false" in (error.value.remedy or "")
        assert resolved_packing(changed(one, packing="auto"), objective) is False


def with_parts(recipe: Recipe, **options: Any) -> Recipe:
    part = {
        "width": 8,
        "layers": 1,
        **({} if options["kind"] == "recurrent" else {"heads": 2, "ff_width": 8}),
        **options,
    }
    model = recipe.model.model_copy(update={"encoder": dict(part), "decoder": dict(part)})
    data = recipe.data.model_copy(update={"max_length": 30})
    return resolve(recipe.model_copy(update={"model": model, "data": data}))


def test_packing_with_bpe_dropout_is_refused(tmp_path: Path) -> None:
    recipe = changed(small_recipe(tmp_path), batch_tokens=4096, packing=True)
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    side = recipe.tokens.source.model_copy(update={"dropout": 0.1})
    recipe = recipe.model_copy(update={"tokens": recipe.tokens.model_copy(update={"source": side})})
    with pytest.raises(InputError, match="lengths of texts change"):
        with_packing(recipe, tokenizers, data, CrossEntropy(), torch.device("cpu"))
