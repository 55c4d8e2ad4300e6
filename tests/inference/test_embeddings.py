"""Files of sentence embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from transduce.inference.retrieval import write_npy


def random_vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("sizes", [[], [3], [2, 5, 1]])
def test_numpy_reads_streamed_vectors(sizes: list[int], tmp_path) -> None:
    blocks = [random_vectors(size, size, 4) for size in sizes]
    path = tmp_path / "vectors.npy"
    assert write_npy(iter(blocks), path) == (sum(sizes), 4 if sizes else 0)
    found = np.load(path, allow_pickle=False)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.concatenate(blocks) if blocks else np.zeros((0, 0)))
    assert [one.name for one in tmp_path.iterdir()] == ["vectors.npy"]
