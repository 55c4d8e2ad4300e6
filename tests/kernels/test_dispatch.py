"""Conditions under which Triton kernels apply, in training and in decoding."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transduce.kernels import dispatch
from transduce.kernels.dispatch import captured_pass

ON_GPU: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)


def test_without_triton_no_kernel_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with captured_pass():
        assert not dispatch.fused_training(ON_GPU)


@pytest.mark.usefixtures("compiler")
def test_no_kernel_applies_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with captured_pass():
        assert not dispatch.fused_training(ON_GPU)


@pytest.mark.usefixtures("compiler")
def test_kernels_apply_only_in_a_captured_training_pass() -> None:
    assert not dispatch.fused_training(ON_GPU)
    with captured_pass():
        assert dispatch.fused_training(ON_GPU)
        assert not dispatch.fused_training(torch.ones(1))
        with torch.no_grad():
            assert not dispatch.fused_training(ON_GPU)
    assert not dispatch.fused_training(ON_GPU)


@pytest.mark.usefixtures("compiler")
def test_a_captured_pass_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), captured_pass():
        raise KeyError
    assert not dispatch.fused_training(ON_GPU)


@pytest.mark.usefixtures("compiler")
def test_a_captured_pass_belongs_to_its_thread() -> None:
    found: list[bool] = []
    with captured_pass():
        other = threading.Thread(target=lambda: found.append(dispatch.fused_training(ON_GPU)))
        other.start()
        other.join()
    assert found == [False]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoding_kernels_apply_in_16_bits_without_gradients(dtype: torch.dtype) -> None:
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert not dispatch.fused_decoding(x)
    with torch.no_grad():
        assert dispatch.fused_decoding(x) == (dtype != torch.float32)
        assert not dispatch.fused_decoding(torch.ones(1, dtype=dtype))
