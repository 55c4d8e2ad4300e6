"""Image front ends: grid sizes, locality, independence of rows in a batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.modalities.image import CNNGrid, PatchEmbedding, PositionEmbedding2D
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe


def batch(values: torch.Tensor) -> Padded:
    return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))


FRONT_ENDS = {
    "patches": lambda position="none": PatchEmbedding(16, shape=(24, 16, 3), patch_size=8, position=position),
    "cls": lambda position="none": PatchEmbedding(16, shape=(24, 16, 3), patch_size=8, position=position, leading=2),
    "grid": lambda position="none": CNNGrid(16, shape=(24, 16, 3), channels=8, stages=3, position=position),
    "shallow": lambda position="none": CNNGrid(
        16, shape=(24, 16, 1), channels=12, stages=2, blocks=0, position=position
    ),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal"])
def test_rows_match_the_grid_and_images_are_independent(name, position):
    front = FRONT_ENDS[name](position)
    values = torch.randn(3, 24, 16, 1 if name == "shallow" else 3)
    found = front.rows(batch(values))
    down, across = front.grid(24)
    assert found.values.shape == (3, front.leading + down * across, 16)
    assert found.mask.all()
    alone = front.rows(batch(values[1:2]))
    assert torch.allclose(found.values[1], alone.values[0], atol=1e-5)


def test_patch_depends_only_on_its_pixels():
    front = FRONT_ENDS["cls"]()
    values = torch.randn(1, 24, 16, 3)
    before = front.rows(batch(values)).values
    values[0, 8:16, 8:16] += 1
    changed = (front.rows(batch(values)).values != before).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [2 + 3]


def test_distant_cells_do_not_depend_on_a_change():
    front = CNNGrid(8, shape=(64, 64, 3), channels=8, stages=2, blocks=0, position="none")
    values = torch.randn(1, 64, 64, 3)
    before = front.rows(batch(values)).values
    values[0, :8, :8] += 1
    changed = (front.rows(batch(values)).values != before).any(-1)[0].view(16, 16)
    assert changed[:2, :2].all()
    assert not changed[4:].any()
    assert not changed[:, 4:].any()


def test_sinusoidal_positions_are_distinct():
    table = PositionEmbedding2D((5, 7), 16, "sinusoidal").weight
    distance = torch.cdist(table, table) + torch.eye(35) * 9
    assert distance.min() > 0.1
    assert not torch.allclose(table[1], table[7])


def test_sizes_that_do_not_tile_are_refused():
    for make in (
        lambda: PatchEmbedding(16, shape=(20, 16, 3), patch_size=8),
        lambda: CNNGrid(16, shape=(20, 16, 3), stages=3),
        lambda: PatchEmbedding(18, shape=(16, 16, 3), patch_size=8, position="sinusoidal"),
    ):
        with pytest.raises(InputError):
            make()


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 3))
def test_position_embedding_is_interpolated_to_another_size(down, across, times):
    position = PositionEmbedding2D((down, across), 4, "learned")
    same = position.refit("weight", position.weight.data)
    assert torch.allclose(same, position.weight, atol=1e-6)
    given = torch.arange(down * times, dtype=torch.float)[:, None, None].expand(-1, across * times, 4).reshape(-1, 4)
    found = position.refit("weight", given.contiguous()).view(down, across, 4)
    assert torch.allclose(found, found[:, :1].expand_as(found), atol=1e-4)  # what differs by rows alone still does
    assert (found[1:, 0, 0] > found[:-1, 0, 0]).all()


def test_position_embedding_of_no_grid_is_not_interpolated():
    assert PositionEmbedding2D((4, 4), 4, "learned").refit("weight", torch.zeros(7, 4)) is None
    assert PositionEmbedding2D((4, 4), 4, "learned").refit("weight", torch.zeros(16, 5)) is None
    assert PositionEmbedding2D((4, 4), 4, "sinusoidal").refit("weight", torch.zeros(25, 4)) is None


@pytest.mark.parametrize("kind", ["transformer", "convolutional"])
def test_front_end_has_the_width_of_embeddings(kind):
    front = {"kind": "patches", "patch_size": 4}
    encoder = {"kind": kind, "width": 16, "layers": 1, "embedding_width": 12, "front": front}
    model = {"encoder": encoder, "decoder": {"kind": "transformer", "width": 16}}
    sources = {"picture": {"kind": "image", "size": 8, "channels": 1}}
    recipe = complete_recipe(parse({"data": {"sources": sources}, "model": model}))
    network = build_model(recipe.model, 10, 10).eval()
    memory = network.encoder(Batch(batch(torch.randn(2, 8, 8, 1))))
    assert memory.values.shape == (2, 4, network.encoder.width)
