"""Fully sharded data parallel training: the losses of one process, sharded checkpoints, faults of one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract_fixtures import CASES, SMALL
from fault_records import cases, record
from fuzzing import mutate_bytes
from safetensors.torch import load_file
from training_fixtures import TinyModel, latest_tensors, logged_losses, run_processes

from transduce.storage import WriteError
from transduce.training.checkpoint import SHARD, CheckpointManager
from transduce.training.distributed import Processes
from transduce.training.report import read_log

if TYPE_CHECKING:
    from transduce.training.fsdp import ShardedModel, ShardedSave

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FSDP = {"parallel": "fsdp"}
PLAIN = {"steps": 12, "ema": 0.9, "checkpoint_every": 4, "log_every": 1}
# Each kind of layer, of sharing weights and of head; all other cases of the laws were compared once.
SHAPES = [
    "recurrent>recurrent",
    "convolutional>convolutional",
    "transformer>transformer",
    "alone>recurrent",
    "alone>transformer",
    "elmo>recurrent",  # has a parameter that is a single number
    "conformer>transformer",
    "transformer>transformer+tie-all+share-all",
    "transformer,experts=3,experts_per_token=2,experts_first=1,gated=True>"
    "transformer,experts=3,experts_per_token=2,experts_first=1,gated=True",  # some experts get no token
]


def head(encoder: str, kind: str) -> dict[str, Any]:
    objective = {"kind": "ctc" if kind == "ctc" else "cross_entropy"}
    words = {"source": {"kind": "words"}, "target": {"kind": "words"}}
    return {
        "model": {"encoder": SMALL[encoder], "head": {"kind": kind}},
        "tokens": words,
        "training": {"objective": objective},
    }


def memory_saving(case: dict[str, Any]) -> dict[str, Any]:
    return {**case, "training": {**case["training"], "precision": "bf16", "gradient_checkpointing": True}}


def together(folder: Path, size: int, **options: Any) -> dict[str, Any]:
    return {"do": "together", "size": size, "options": {"folder": str(folder), **options}}


def test_two_processes_have_the_losses_of_one_process(tmp_path: Path) -> None:
    """Sharded, gathered at once or by layer, and with all weights in both. FSDP_RECORD: all models of the laws."""
    shapes = {name: CASES[name] for name in SHAPES}
    shapes |= {"tagger": head("transformer", "tagger"), "ctc": head("recurrent", "ctc")}
    shapes |= {"bf16, gradient checkpointing": memory_saving(CASES["transformer>transformer"])}
    if "FSDP_RECORD" in os.environ:
        shapes |= CASES
    found: dict[str, dict[str, list[float]]] = {}
    names = list(shapes)
    for first in range(0, len(names), 24):  # an answer has a time limit
        some = {name: shapes[name] for name in names[first : first + 24]}
        (codes,) = run_processes(together(tmp_path, 2, shapes=some))
        assert codes == [0, 0]
        found |= json.loads((tmp_path / "losses.json").read_text())
    assert found.keys() == shapes.keys()
    for name, losses in found.items():
        for kind in ("fsdp", "fsdp by layer", "ddp"):
            assert losses[kind] == pytest.approx(losses["one process"], abs=1e-5, rel=1e-6), (name, kind)
    if path := os.environ.get("FSDP_RECORD"):
        record_differences(Path(path), found)


@pytest.mark.parametrize("torch_2_11", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_that_runs_out_of_memory_within_a_pass_changes_no_loss(
    where: str, torch_2_11: bool, tmp_path: Path
) -> None:
    """In the last layer, after the weights of all others were gathered: both processes repeat the update. FSDP of torch
    before 2.13 has no function that forgets a pass."""
    part = {**SMALL["transformer"], "dropout": 0.0}
    case = {**CASES["transformer>transformer"], "model": {"encoder": part, "decoder": part}}
    shapes = {"fails": {**case, "out_of_memory": where, **({"old_torch": True} if torch_2_11 else {})}}
    (codes,) = run_processes(together(tmp_path, 2, shapes=shapes))
    assert codes == [0, 0]
    losses = json.loads((tmp_path / "losses.json").read_text())["fails"]
    for kind in ("fsdp", "fsdp by layer", "ddp"):
        assert losses[kind] == pytest.approx(losses["one process"], abs=1e-5, rel=1e-6), kind


def record_differences(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """The largest difference from the losses of one process, for docs/scale.md; of losses above 1 the relative one."""
    differences = {
        kind: max(
            abs(one - other) / max(1.0, abs(other))
            for losses in found.values()
            for one, other in zip(losses[kind], losses["one process"], strict=True)
        )
        for kind in ("ddp", "fsdp", "fsdp by layer")
    }
    content = {"models": len(found), "updates": 3, "processes": 2, "largest_difference": differences}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def test_a_sharded_run_continues_on_any_number_of_processes(tmp_path: Path) -> None:
    """Saved by two, continued by one, two and three, sharded or not, and the reverse; its end is an ordinary run."""
    half, whole = PLAIN | {"steps": 6}, PLAIN
    folders = {name: tmp_path / name for name in ("whole", "half", "1", "2", "3", "ddp", "from ddp")}
    run_processes(
        {"do": "train", "options": {"folder": str(folders["whole"]), "settings": whole}},
        together(folders["half"], 2, settings=half | FSDP),
        {"do": "train", "options": {"folder": str(folders["from ddp"]), "settings": half}},
    )
    assert len(list((folders["half"] / "checkpoints" / "step-00000006").glob(f"{SHARD}*"))) == 2
    for name in ("1", "2", "3", "ddp"):
        shutil.copytree(folders["half"], folders[name])
    codes = run_processes(
        *(together(folders[str(size)], size, settings=whole | FSDP) for size in (1, 2, 3)),
        together(folders["ddp"], 1, settings=whole),
        together(folders["from ddp"], 2, settings=whole | FSDP),
    )
    assert codes == [[0], [0, 0], [0, 0, 0], [0], [0, 0]]
    for name in ("1", "2", "3", "ddp", "from ddp"):
        assert logged_losses(folders[name]) == pytest.approx(logged_losses(folders["whole"]), abs=1e-5)
        for group in ("weights", "ema", "optimiser"):
            for key, tensor in latest_tensors(folders["whole"] / "checkpoints", group).items():
                other = latest_tensors(folders[name] / "checkpoints", group)[key]
                torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
        load_file(folders[name] / "checkpoints" / "final" / "weights.safetensors")


def test_one_process_without_a_group_trains_as_without_fsdp_and_several_continue_it(tmp_path: Path) -> None:
    half = PLAIN | {"steps": 6, "log_every": 1}
    folders = {name: tmp_path / name for name in ("ddp", "fsdp", "two")}
    codes = run_processes(
        *(
            {
                "do": "train",
                "options": {"folder": str(folders[name]), "settings": half | {"parallel": name}, "alone": True},
            }
            for name in ("ddp", "fsdp")
        )
    )
    assert codes == [0, 0]
    finals = [load_file(folders[name] / "checkpoints" / "final" / "weights.safetensors") for name in ("ddp", "fsdp")]
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert not list((folders["fsdp"] / "checkpoints" / "step-00000006").glob(f"{SHARD}*"))
    shutil.copytree(folders["fsdp"], folders["two"])
    codes = run_processes(
        {"do": "train", "options": {"folder": str(folders["ddp"]), "settings": PLAIN}},
        together(folders["two"], 2, settings=PLAIN | FSDP),
    )
    assert codes == [0, [0, 0]]
    assert logged_losses(folders["two"]) == pytest.approx(logged_losses(folders["ddp"]), abs=1e-5)


def test_faults_of_one_process_of_a_sharded_run_affect_all_alike(tmp_path: Path) -> None:
    """Out of memory: all repeat the update, in smaller parts. A loss that is not finite: all skip the update."""
    changes = {"settings": {"steps": 12, "clip": 0.5}, "failing": True}
    sharded = changes | {"settings": {**changes["settings"], **FSDP}}
    codes = run_processes(together(tmp_path / "one", 1, **changes), together(tmp_path / "two", 2, **sharded))
    assert codes == [[0], [0, 0]]
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    kinds = [[(line["event"], line["step"]) for line in log if line["kind"] == "event"] for log in logs]
    assert {("split", 2), ("dropped", 2), ("skipped", 4), ("dropped", 11)} <= set(kinds[1])
    texts = [[line["text"] for line in log if line.get("event") in ("dropped", "skipped")] for log in logs]
    assert texts[0] == texts[1]
    assert logged_losses(tmp_path / "two") == pytest.approx(logged_losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_processes_return_to_the_checkpoint_and_stop_together_where_one_has_a_nonfinite_loss(
    parallel: str, tmp_path: Path
) -> None:
    """Update 4 is not finite in one process, at every learning rate."""
    made = {"steps": 12, "checkpoint_every": 3, "max_nonfinite": 1, "parallel": parallel}
    (codes,) = run_processes(together(tmp_path, 2, settings=made, failing=True))
    assert codes == [70, 70]
    log = read_log(tmp_path / "log.jsonl")
    returns = [(line["step"], line["text"]) for line in log if line.get("event") == "rolled back"]
    assert [step for step, _ in returns] == [3, 3]
    assert "with 0.25 of the learning rate" in returns[1][1]
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [3]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_largest_batch_is_tried_before_the_first_update(parallel: str, tmp_path: Path) -> None:
    """It does not fit: it is reported, and the later batches are split without another failure."""
    made = {"settings": {"steps": 3, "parallel": parallel}, "folder": str(tmp_path), "memory": 3}
    (codes,) = run_processes({"do": "together", "size": 2, "options": made})
    assert codes == [0, 0]
    events = [(line["event"], line["step"]) for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "event"]
    assert events == [("preflight", 0), ("ended", 3)]
    (codes,) = run_processes(together(tmp_path / "roomy", 1, settings={"steps": 3}))
    assert logged_losses(tmp_path) == pytest.approx(logged_losses(tmp_path / "roomy"), abs=1e-5)


def test_killed_sharded_runs_resume_with_the_same_bits(tmp_path: Path) -> None:
    made = PLAIN | FSDP | {"checkpoint_every": 2, "steps": 8}
    options = [{"folder": str(tmp_path / name), "settings": made, "dropout": 0.1} for name in ("whole", "killed")]
    code, died, ended = run_processes(
        {"do": "train", "options": options[0]},
        {"do": "kill", "options": options[1], "kills": 4, "seed": 3},
        {"do": "train", "options": options[1]},
    )
    assert (code, ended) == (0, 0)
    assert died >= 2
    finals = [
        load_file(tmp_path / name / "checkpoints" / "final" / "weights.safetensors") for name in ("whole", "killed")
    ]
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before the tests fork their processes, and not where the file is only collected: it takes two seconds."""
    import transduce.training.fsdp  # noqa: F401


@pytest.fixture(scope="module")
def sharded() -> Iterator[ShardedModel]:
    from transduce.training.fsdp import ShardedModel

    with Processes.start(CPU, "fsdp"):
        yield ShardedModel(TinyModel(), CPU, 1)


def save(sharded: ShardedModel, manager: CheckpointManager, step: int, go: Event | None = None) -> ShardedSave:
    from transduce.training.fsdp import ShardedSave

    def complete() -> None:
        assert go is None or go.wait(60)
        manager.complete_shards(step, {}, {"output.weight": "embedding.weight"})

    tensors = {f"weights/{name}": sharded.on_cpu(p) for name, p in sharded.model.named_parameters()}
    return ShardedSave(tensors, manager.begin_shards(step), sharded.save_group, complete)


def test_a_checkpoint_in_the_background_has_the_weights_of_its_step_and_exists_when_it_is_durable(
    sharded: ShardedModel, tmp_path: Path
) -> None:
    manager, go = CheckpointManager(tmp_path), Event()
    expected = {name: tensor.full_tensor().clone() for name, tensor in sharded.model.state_dict().items()}
    saving = save(sharded, manager, 3, go)
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.add_(1.0)  # training goes on
    assert manager.steps() == []
    assert manager.latest() is None
    go.set()
    saving.wait()
    found = manager.load(3).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {path.suffix for path in manager.path(3).iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "no manifest"])
def test_a_damaged_shard_falls_back_to_the_previous_checkpoint(how: str, sharded: ShardedModel, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        save(sharded, manager, step).wait()
    (shard,) = manager.path(2).glob(f"{SHARD}*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    if how == "no manifest":
        (manager.path(2) / "manifest.json").unlink()
    elif how == "gone":
        shard.unlink()
    else:
        shard.write_bytes(bytes(content) if how == "flipped" else bytes(content[:-1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = manager.latest()
    assert found is not None
    assert found.step == 1
    assert "step-00000002 is damaged" in str(caught[0].message)


def test_every_byte_of_a_sharded_checkpoint_is_synced_before_the_folder_gets_its_name(
    sharded: ShardedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written through a buffer is synced after the buffer was emptied."""
    synced: dict[str, int] = {}
    named: list[dict[str, int]] = []
    sync, replace = os.fsync, os.replace

    def recording_sync(descriptor: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size
        sync(descriptor)

    def recording_replace(source: Path, target: Path) -> None:
        if Path(source).is_dir():
            named.append({path.name: path.stat().st_size for path in Path(source).iterdir()})
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", recording_sync)
        patched.setattr(os, "replace", recording_replace)
        save(sharded, CheckpointManager(tmp_path), 1).wait()
    (files,) = named
    assert any(name.startswith(SHARD) for name in files)
    assert {name: synced.get(name) for name in files} == files


def test_every_damage_of_a_sharded_checkpoint_is_found(sharded: ShardedModel, tmp_path: Path) -> None:
    """Any change of any byte of any file: the checkpoint before it is used, with a warning."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        save(sharded, manager, step).wait()
    files = {path: path.read_bytes() for path in sorted(manager.path(2).iterdir())}
    count, found = cases(16), 0
    for seed in range(count):
        draw = random.Random(seed)
        path = draw.choice(sorted(files))
        damaged = mutate_bytes(draw, files[path])
        if damaged == files[path]:
            damaged = damaged[:-1]
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="step-00000002 is damaged"):
            checkpoint = manager.latest()
        assert checkpoint is not None
        found += checkpoint.step == 1
        path.write_bytes(files[path])
    assert found == count
    record("damaged sharded checkpoint", "found, the previous one used with a warning", count, found)


def test_a_full_disk_is_reported_and_leaves_the_previous_checkpoint(
    sharded: ShardedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save(sharded, manager, 1).wait()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="No space left"):
            save(sharded, manager, 2).wait()
    assert manager.steps() == [1]
    assert manager.latest() is not None
