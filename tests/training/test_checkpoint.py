"""Checkpoint directory: atomic writes, damage detection, recovery, averaging."""

from __future__ import annotations

import json
import os
import resource
import stat
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor, nn
from training_fixtures import TinyModel

from transduce.errors import InputError
from transduce.storage import WriteError
from transduce.training.checkpoint import Checkpoint, CheckpointManager, average_checkpoints

STATE = {"progress": {"step": 1, "rate": 0.1 + 0.2}, "name": "né"}


def tensors(value: float) -> dict[str, dict[str, Tensor]]:
    return {
        "weights": {"a": torch.full((3, 2), value), "count": torch.tensor(7)},
        "optimiser": {"a.exp_avg": torch.full((3, 2), -value), "a.step": torch.tensor(2.0)},
        "ema": {"a": torch.full((3, 2), value / 3)},
    }


def two(folder: Path) -> CheckpointManager:
    checkpoints = CheckpointManager(folder)
    checkpoints.save(5, tensors(5), STATE)
    checkpoints.save(10, tensors(10), STATE)
    return checkpoints


def same(checkpoint: Checkpoint | None, step: int) -> bool:
    assert checkpoint is not None
    expected = tensors(step)
    assert checkpoint.state == STATE | {"step": step}
    return checkpoint.step == step and all(
        torch.equal(tensor, checkpoint.tensors[kind][name]) and checkpoint.tensors[kind].keys() == expected[kind].keys()
        for kind, group in expected.items()
        for name, tensor in group.items()
    )


def test_a_saved_checkpoint_is_read_back_unchanged(tmp_path: Path) -> None:
    checkpoints = two(tmp_path / "new" / "checkpoints")
    assert same(checkpoints.latest(), 10)
    assert same(checkpoints.load(5), 5)
    assert checkpoints.steps() == [5, 10]
    names = {path.name for path in checkpoints.path(10).iterdir()}
    assert names == {
        "weights.safetensors",
        "optimiser.safetensors",
        "ema.safetensors",
        "state.json",
        "manifest.json",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in checkpoints.path(10).iterdir())
    only = checkpoints.latest(only=["weights"])
    assert only is not None
    assert set(only.tensors) == {"weights"}


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        empty = CheckpointManager(folder)
        assert empty.latest() is empty.best() is empty.for_inference() is empty.final() is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_dtype_and_memory_layout_is_preserved(dtype: torch.dtype, tmp_path: Path) -> None:
    given = {
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "turned": torch.arange(6).reshape(2, 3).to(dtype).T,
        "part": torch.arange(10).to(dtype)[2:5],
        "other part": torch.zeros(1),
    }
    CheckpointManager(tmp_path).save(1, {"weights": given}, {})
    read = CheckpointManager(tmp_path).load(1).weights
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in given.items())


def test_tied_weights_are_stored_once_and_restored_under_every_name(tmp_path: Path) -> None:
    model = TinyModel()
    CheckpointManager(tmp_path).save(1, {"weights": model.state_dict()}, {})
    size = (tmp_path / "step-00000001" / "weights.safetensors").stat().st_size
    assert size < sum(p.nbytes for p in model.parameters()) + 1000
    other = TinyModel(seed=1)
    other.load_state_dict(CheckpointManager(tmp_path).load(1).weights)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    flat = torch.arange(8.0)  # views of one buffer, overlapping or not, are no ties
    views = {"low": flat[:4], "high": flat[4:], "across": flat[2:6], "all": flat}
    CheckpointManager(tmp_path).save(2, {"weights": views}, {})
    read = CheckpointManager(tmp_path).load(2).weights
    assert all(torch.equal(read[name], view) for name, view in views.items())


@trials(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_anywhere_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    checkpoints = two(tmp_path_factory.mktemp("bits"))
    name = data.draw(st.sampled_from(sorted(path.name for path in checkpoints.path(10).iterdir())))
    path = checkpoints.path(10) / name
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.latest()
    if name == "manifest.json" and not caught:
        assert same(found, 10)  # a bit without effect on the content of the manifest
    else:
        assert same(found, 5)
        assert "step-00000010 is damaged" in str(caught[0].message)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimiser.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone", "longer"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(name: str, how: str, tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    path = checkpoints.path(10) / name
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-1], "empty": b"", "longer": content + b"x"}[how])
    with pytest.warns(UserWarning, match="step-00000010 is damaged"):
        assert same(checkpoints.latest(), 5)
    with pytest.raises(InputError, match="damaged"):
        checkpoints.load(10)
    (checkpoints.path(5) / "state.json").unlink()
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(InputError, match="all 2 checkpoints are damaged"):
        checkpoints.latest()


def test_a_crafted_manifest_cannot_refer_to_other_folders(tmp_path: Path) -> None:
    """Files a manifest leaves out are not read: nothing unchecked gets in."""
    checkpoints = two(tmp_path)
    path = checkpoints.path(10) / "manifest.json"
    content = json.loads(path.read_text())
    del content["files"]["weights.safetensors"]
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="manifest"):
        assert same(checkpoints.latest(), 5)


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_save_that_fails_at_any_file_operation_keeps_earlier_checkpoints(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = two(tmp_path)
    real, failures = getattr(os, call), 0
    for after in range(20):
        left = [after]

        def fail(*arguments: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, call, fail)
        try:
            checkpoints.save(15, tensors(15), STATE)
        except InputError as error:
            failures += 1
            assert "No space left on device" in str(error)  # noqa: PT017
            assert "earlier checkpoints are intact" in str(error)  # noqa: PT017
        else:
            break
        finally:
            monkeypatch.setattr(os, call, real)
        found = checkpoints.latest()
        assert found is not None
        assert same(found, 15 if 15 in checkpoints.steps() else 10)  # a sync after the rename may fail too
        assert same(checkpoints.load(5), 5)
        assert not list(tmp_path.glob(".part-*"))
    assert failures >= {"fsync": 6, "replace": 1, "chmod": 3}[call]
    assert same(checkpoints.latest(), 15)


def test_a_full_disk_is_reported_and_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, {"weights": {"a": torch.arange(1000.0)}}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(WriteError) as told:
            checkpoints.save(2, {"weights": {"a": torch.arange(100_000.0)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path / 'step-00000002'}: cannot be written: File too large" in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert torch.equal(found.weights["a"], torch.arange(1000.0))


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2, every=10)
    for step in (10, 13, 20, 30, 40, 45):
        checkpoints.save(step, tensors(step), STATE)
        if step == 10:
            checkpoints.mark_best(10, 0.5)
        checkpoints.prune()
    assert checkpoints.steps() == [10, 30, 40, 45]
    assert same(checkpoints.best(), 10)
    assert checkpoints.steps_to_average(2) == [40, 45]
    assert checkpoints.steps_to_average(9) == [10, 30, 40, 45]
    (checkpoints.path(10) / "weights.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="the best, is damaged"):
        assert same(checkpoints.best(), 45)


def test_incomplete_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    (tmp_path / ".part-step-00000015").mkdir()
    (tmp_path / ".part-step-00000015" / "weights.safetensors").write_bytes(b"half")
    (tmp_path / ".part-best.json").write_text("{")
    assert same(checkpoints.latest(), 10)
    assert (tmp_path / ".part-best.json").exists()  # readers leave it alone: its writer may be alive
    checkpoints.remove_incomplete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]


def test_damaged_checkpoints_are_renamed_on_resume(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    checkpoints.quarantine_after(5)
    assert checkpoints.steps() == [5]
    assert (tmp_path / "damaged-step-00000010").is_dir()


def test_inference_prefers_the_final_weights_to_the_best(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    checkpoints.mark_best(5, 1.0)
    chosen = checkpoints.for_inference()
    assert chosen is not None
    assert chosen.step == 5
    checkpoints.save_final(10, {"a": torch.ones(2)}, {"from": "average"})
    checkpoints.save_final(10, {"a": torch.zeros(2)}, {"from": "average"})  # a second time: replaced
    chosen = checkpoints.for_inference()
    assert chosen is not None
    assert torch.equal(chosen.weights["a"], torch.zeros(2))
    assert chosen.state == {"from": "average", "step": 10}
    checkpoints.remove_final()
    assert checkpoints.final() is None


def test_checkpoint_average_is_the_mean_of_the_weights(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    models = [nn.BatchNorm1d(4) for _ in range(3)]
    for step, model in enumerate(models):
        model(torch.randn(5, 4))
        nn.init.normal_(model.weight)
        checkpoints.save(step, {"weights": model.state_dict()}, {})
    mean = average_checkpoints([checkpoints.load(step) for step in range(3)])
    expected = torch.stack([model.weight.detach().double() for model in models]).mean(0).float()
    torch.testing.assert_close(mean["weight"], expected, rtol=0, atol=0)
    assert mean["num_batches_tracked"] == 1


def test_nan_in_the_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        CheckpointManager(tmp_path).save(1, tensors(1), {"loss": float("nan")})


def test_inference_uses_the_moving_average(tmp_path: Path) -> None:
    """Validation scores the moving average, so inference with an unfinished run uses it too."""
    checkpoints = CheckpointManager(tmp_path)
    plain, buffer = {"a": torch.zeros(2), "running": torch.ones(1)}, {"a": torch.ones(2)}
    checkpoints.save(1, {"weights": plain, "ema": buffer}, {})
    chosen = checkpoints.for_inference()
    assert chosen is not None
    assert torch.equal(chosen.weights["a"], torch.ones(2))
    assert torch.equal(chosen.weights["running"], torch.ones(1))
    assert torch.equal(chosen.tensors["weights"]["a"], torch.zeros(2))
