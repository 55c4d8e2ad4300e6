"""Devices, processes and seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from transduce.errors import InputError
from transduce.training.distributed import Processes, autocast, deterministic, peak_memory, pick_device, seed_everything

CPU = torch.device("cpu")


def test_auto_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="device"):
        pick_device(name)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_fixes_every_generator_and_each_step_and_part_has_its_own() -> None:
    seen: set[float] = set()
    for seed, step, part in ((1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0), (-1, 1, 0), (11, 1, 0), (1, 11, 0)):
        seed_everything(seed, step, part)
        first = draws()
        seed_everything(seed, step, part)
        assert draws() == first
        seen.update(first)
    assert len(seen) == 3 * 7


def test_alone_nothing_is_sent() -> None:
    with Processes.start(CPU) as alone:
        assert alone.is_main
        assert alone.all_reduce([1.0, 2.0]) == [1.0, 2.0]
        assert alone.broadcast({"a": [1, "é", None]}) == {"a": [1, "é", None]}
        alone.barrier()
        used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
        used.sum().backward()
        alone.all_reduce_gradients([used, unused])
        assert used.grad is not None
        assert unused.grad is not None
        assert used.grad.tolist() == [1, 1]
        assert unused.grad.tolist() == [0, 0, 0]


def test_deterministic_mode_ends_with_its_block() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_autocast_and_memory() -> None:
    layer = torch.nn.Linear(2, 2)
    with autocast(CPU, "bf16"):
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with autocast(CPU, "fp32"):
        assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert peak_memory(CPU) > 10_000_000
