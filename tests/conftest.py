"""One thread a process: with more, two busy processes spin at each other's barriers and take ten times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

# A search for counter-examples belongs to development; what lands must not depend on its luck.
settings.register_profile("landing", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("landing" if os.environ.get("CI") else "search")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
