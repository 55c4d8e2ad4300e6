"""Devices, seeds and data-parallel processes."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from run_fixtures import settings
from training_fixtures import (
    FULL_SETTINGS,
    latest_tensors,
    logged_losses,
    run_processes,
)

from transduce.errors import InputError
from transduce.training import distributed
from transduce.training.checkpoint import CheckpointManager
from transduce.training.distributed import (
    GradientBuckets,
    Processes,
    agree_on_attempt,
    autocast,
    deterministic,
    environment,
    fill_missing_gradients,
    peak_memory,
    pick_device,
    seed_everything,
)
from transduce.training.experiment import train
from transduce.training.report import read_log

CPU = torch.device("cpu")


def test_auto_device_prefers_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert pick_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InputError, match=r"no device cuda:9: 4 CUDA devices"):
        pick_device("cuda:9")


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "tpu", "meta", ""])
def test_a_missing_device_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="device"):
        pick_device(name)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seed_step_and_row_determine_every_generator() -> None:
    seen: set[float] = set()
    for seed, step, part in ((1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0), (-1, 1, 0), (11, 1, 0), (1, 11, 0)):
        seed_everything(seed, step, part)
        first = draws()
        seed_everything(seed, step, part)
        assert draws() == first
        seen.update(first)
    assert len(seen) == 3 * 7


def test_a_single_process_communicates_nothing() -> None:
    with Processes.start(CPU) as alone:
        assert alone.is_main
        assert alone.all_reduce([1.0, 2.0]) == [1.0, 2.0]
        assert alone.broadcast({"a": [1, "é", None]}) == {"a": [1, "é", None]}
        assert alone.on_main(lambda: [1]) == [1]
        used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
        used.sum().backward()
        fill_missing_gradients([used, unused])
        assert used.grad is not None
        assert unused.grad is not None
        assert used.grad.tolist() == [1, 1]
        assert unused.grad.tolist() == [0, 0, 0]


def names_of_a_start(store: dist.Store, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as threads:
        return set(threads.map(lambda rank: agree_on_attempt(store, rank, size, timedelta(seconds=60)), range(size)))


def test_every_start_of_a_group_has_one_new_name_whatever_earlier_ones_left_in_the_store() -> None:
    store = dist.HashStore()
    earlier = [names_of_a_start(store, 3) for _ in range(3)]
    store.set("first process", "died before the others came")
    later = names_of_a_start(store, 2)
    store.set("first process", "died after one of the others came")
    store.set("died after one of the others came/1", "also dead")
    last = names_of_a_start(store, 4)
    assert [len(names) for names in (*earlier, later, last)] == [1] * 5
    assert len(set.union(*earlier, later, last)) == 5


def test_a_process_whose_group_does_not_start_ends_with_an_error() -> None:
    store = dist.HashStore()
    store.set("first process", "dead")
    store.set("dead/signatures", '["of another process"]')
    with pytest.raises(InputError, match="process 1 of 2: the first process did not answer within 0 seconds"):
        agree_on_attempt(store, 1, 2, timedelta(seconds=0.1))


def test_gradients_are_sent_within_the_last_backward_pass_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last layer on; those of earlier passes and of unused parameters are in the sums."""
    monkeypatch.setattr(distributed, "BUCKET_SIZE", 1)
    events: list[str] = []
    original = dist.all_reduce

    def recording(tensor: torch.Tensor, **options: Any) -> Any:
        events.append(f"{tensor.numel()} sent")
        return original(tensor, **options)

    layers = [torch.nn.Linear(size, size + 1, bias=False) for size in (2, 3, 4)]
    unused = torch.nn.Parameter(torch.ones(5))
    parameters = [unused, *(layer.weight for layer in layers)]
    for layer in layers:
        layer.register_full_backward_hook(lambda layer, *_: events.append(f"{layer.weight.numel()} computed"))
    with Processes.start(CPU, "fsdp"):
        monkeypatch.setattr(dist, "all_reduce", recording)
        buckets = GradientBuckets(parameters)
        for last in (False, True):
            if last:
                buckets.begin()
            torch.nn.Sequential(*layers)(torch.ones(1, 2, requires_grad=True)).sum().backward()
            assert last or not any("sent" in event for event in events)
        in_pass = events[3:]
        buckets.finish()
        outputs = torch.nn.Sequential(*layers[:2])(torch.ones(1, 2))
        assert torch.equal(layers[2].weight.grad, 2 * outputs.expand(5, 4))  # of both passes
        buckets.begin()
        layers[2](torch.ones(1, 4, requires_grad=True)).sum().backward()
        with pytest.raises(AssertionError, match="changed after it was sent"):
            layers[2](torch.ones(1, 4, requires_grad=True)).sum().backward()
        buckets.finish()
    assert in_pass.index("20 sent") < in_pass.index("6 computed")
    assert [event for event in events if "sent" in event][:4] == ["20 sent", "12 sent", "6 sent", "5 sent"]
    assert unused.grad is not None
    assert unused.grad.tolist() == [0.0] * 5


def test_deterministic_mode_ends_with_its_block() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
        assert environment(CPU, 1)["native kernels"] is False
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_deterministic_training_does_not_depend_on_threads_or_native_kernels(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default setting, the bits depend on both: the check below would fail."""
    wide = {"kind": "transformer", "layers": 1, "width": 64, "heads": 2, "ff_width": 256, "dropout": 0.1}

    def weights(threads: int, native: str, deterministic: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setenv("TRANSDUCE_NATIVE", native)
        torch.set_num_threads(threads)
        made = settings(pairs, {"encoder": wide, "decoder": wide}, "chars", steps=3, deterministic=deterministic)
        folder = tmp_path / f"{threads}{native}{deterministic}"
        return train(made, folder).model.network.state_dict()

    def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], two[name]) for name in one)

    alike = weights(1, "1", True)
    assert same(alike, weights(2, "1", True))
    assert same(alike, weights(1, "0", True))
    assert not same(weights(1, "1", False), weights(1, "0", False))


def test_autocast_precision_and_peak_memory() -> None:
    layer = torch.nn.Linear(2, 2)
    with autocast(CPU, "bf16"):
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with autocast(CPU, "fp32"):
        assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert peak_memory(CPU) > 10_000_000


@pytest.mark.slow
def test_any_number_of_processes_computes_the_same_run(tmp_path: Path) -> None:
    """Also when the number changes on resume, and with dropout if the micro-batches are the same."""
    plain = {"steps": 12, "ema": 0.9, "checkpoint_every": 4, "optimiser": {"learning_rate": 0.01, "weight_decay": 0.1}}
    third, twice = plain | {"steps": 4}, plain | {"accumulate": 2}

    def task(folder: str, made: dict[str, Any], size: int, dropout: float = 0.0) -> dict[str, Any]:
        options = {"settings": made, "folder": str(tmp_path / folder), "dropout": dropout, "rows": 5}
        return {"do": "together" if size > 1 else "train", "options": options, "size": size}

    codes = run_processes(
        task("one", plain, 1),
        task("two", plain, 2),
        task("six", plain, 6),  # more processes than rows: one of them has none
        task("mixed", third, 2),
        task("mixed", plain | {"steps": 8}, 1),
        task("mixed", plain, 2),
        task("fsdp", plain | {"parallel": "fsdp"}, 2),
        task("dropout one", twice, 1, 0.2),
        task("dropout two", plain, 2, 0.2),
    )
    assert all(set(code) == {0} if isinstance(code, list) else code == 0 for code in codes)
    expected = logged_losses(tmp_path / "one")
    assert len(expected) == 12
    for folder in ("two", "six", "mixed", "fsdp"):
        assert logged_losses(tmp_path / folder) == pytest.approx(expected, abs=1e-6)
        for kind in ("weights", "ema"):
            for name, tensor in latest_tensors(tmp_path / "one" / "checkpoints", kind).items():
                other = latest_tensors(tmp_path / folder / "checkpoints", kind)[name]
                torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
    assert logged_losses(tmp_path / "dropout two") == pytest.approx(logged_losses(tmp_path / "dropout one"), abs=1e-5)


@pytest.mark.slow
def test_out_of_memory_and_nonfinite_loss_in_one_process_affect_all_alike(tmp_path: Path) -> None:
    """Both processes act alike, and as a single process would."""
    folders = {size: tmp_path / str(size) for size in (1, 2)}
    codes = run_processes(
        *(
            {
                "do": "together",
                "size": size,
                "options": {"settings": {"steps": 12, "clip": 0.5}, "folder": str(folder), "failing": True},
            }
            for size, folder in folders.items()
        )
    )
    assert codes == [[0], [0, 0]]
    logs = {size: read_log(folder / "log.jsonl") for size, folder in folders.items()}
    events = {
        size: [(line["event"], line["step"], line["text"]) for line in log if line["kind"] == "event"]
        for size, log in logs.items()
    }
    told = [(kind, step) for kind, step, _ in events[2] if kind != "split"]
    assert told == [("dropped", 2), ("skipped", 4), ("dropped", 11), ("ended", 12)]
    assert "example 7" in next(text for kind, _, text in events[2] if kind == "dropped")
    assert "first in the loss" in next(text for kind, _, text in events[2] if kind == "skipped")
    assert [event for event in events[1] if event[0] != "split"] == [
        event for event in events[2] if event[0] != "split"
    ]
    assert logged_losses(folders[2]) == pytest.approx(logged_losses(folders[1]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_ends_training_with_a_checkpoint(size: int, tmp_path: Path) -> None:
    made = FULL_SETTINGS | {"steps": 10**6, "checkpoint_every": 10**6, "validate_every": 10**6}
    options = {"settings": made, "folder": str(tmp_path), "dropout": 0.1}
    tasks = [
        {"do": "interrupt", "options": options, "signal": number, "size": size}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ]
    codes = run_processes(*tasks)
    assert codes == [[128 + task["signal"]] * size for task in tasks]  # also those that were not sent the signal
    steps = CheckpointManager(tmp_path / "checkpoints").steps()
    assert steps
    assert read_log(tmp_path / "log.jsonl")[-1]["text"].endswith("interrupted")
