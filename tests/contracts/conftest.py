"""Fixtures over every model that the registries can build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from contract_fixtures import CASES, CPUSearchGraph, Reading, example_batch, fingerprint, read, shared

from transduce.flow import Batch
from transduce.kernels.cuda_graph import SearchGraphs


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    """All laws of a case run one after another, so that they can share what is computed once for them."""
    return str(request.param)


@pytest.fixture
def model(case: str) -> Iterator[torch.nn.Module]:
    """One model for all laws of a case. A law that changes its model takes a copy: `contract_fixtures.make`."""
    model = shared(case)
    before = fingerprint(model)
    yield model
    assert fingerprint(model) == before, f"a law changed the shared model of {case}"


@pytest.fixture(scope="module")
def batch() -> Batch:
    return example_batch([(5, 3), (2, 4), (7, 1), (1, 2)])


@pytest.fixture(scope="module")
def reading(case: str, batch: Batch) -> Reading:
    return read(shared(case), batch)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> SearchGraphs:
    """SearchGraphs without a GPU: fixed shapes, several steps between two checks, also after the end of a search."""
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    return SearchGraphs()
