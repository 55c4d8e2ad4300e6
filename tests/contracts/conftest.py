"""Fixtures over every model that the registries can build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from contract_fixtures import CASES, CPUSearchGraph, example_batch, fingerprint, shared

from transduce.flow import Batch
from transduce.kernels.cuda_graph import SearchGraphs


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(case: str) -> Iterator[torch.nn.Module]:
    """One model for all laws of a case. A law that changes its model takes a copy: `contract_fixtures.make`."""
    model = shared(case)
    before = fingerprint(model)
    yield model
    assert fingerprint(model) == before, f"a law changed the shared model of {case}"


@pytest.fixture
def batch() -> Batch:
    return example_batch([(5, 4), (2, 6), (7, 1), (1, 3)])


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> SearchGraphs:
    """SearchGraphs without a GPU: fixed shapes, several steps between two checks, also after the end of a search."""
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    return SearchGraphs()
