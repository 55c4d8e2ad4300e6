"""EfficientNet-Lite0: safe conversion of weights, padding, stored features."""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from transduce.errors import InputError
from transduce.flow import Padded
from transduce.interop import frozen_networks as networks
from transduce.modalities.image import CHANNELS, EfficientNetLite0, FeatureGrid, ImageFeatures, load_efficientnet

NAMES = (
    (r"^stem\.conv", "_conv_stem"),
    (r"^stem\.norm", "_bn0"),
    (r"^head\.conv", "_conv_head"),
    (r"^head\.norm", "_bn1"),
    (r"^labels", "_fc"),
    (r"^blocks\.(\d+)\.(expand|depthwise|project)\.conv", r"_blocks.\1._\2_conv"),
    (r"^blocks\.(\d+)\.expand\.norm", r"_blocks.\1._bn0"),
    (r"^blocks\.(\d+)\.depthwise\.norm", r"_blocks.\1._bn1"),
    (r"^blocks\.(\d+)\.project\.norm", r"_blocks.\1._bn2"),
)


def theirs(name: str) -> str:
    for ours, other in NAMES:
        name = re.sub(ours, other, name)
    return name


@pytest.fixture(scope="module")
def network() -> EfficientNetLite0:
    torch.manual_seed(4)
    made = EfficientNetLite0().eval()
    for name, buffer in made.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return made


@pytest.fixture(scope="module")
def file(network, tmp_path_factory):
    """As PyTorch wrote it before 1.6."""
    path = tmp_path_factory.mktemp("network") / "efficientnet-lite0.pth"
    weights = {theirs(name): tensor for name, tensor in network.state_dict().items()}
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    return path


def test_number_of_parameters_agrees_with_the_paper(network):
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008
    assert len(network.blocks) == 16


def test_every_weight_of_the_file_is_used(network, file, tmp_path):
    found = networks.convert(file, tmp_path / "lite0.safetensors")
    assert found.parameters == 4_652_008
    opened = load_efficientnet(str(tmp_path / "lite0.safetensors"))
    for name, tensor in network.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in opened.parameters())
    pixels = torch.rand(1, 3, 64, 64) * 255
    with torch.no_grad():
        assert torch.equal(opened(pixels), network(pixels))
        for side, channels in CHANNELS.items():
            assert opened.cells(pixels, side).shape == (1, channels, 64 // side, 64 // side)


def test_same_padding_adds_more_at_the_end(network):
    with torch.no_grad():
        assert network.cells(torch.zeros(1, 3, 75, 33), 32).shape == (1, 320, 3, 2)


class Harm:
    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize("damage", ["cut", "missing", "shape", "text", "code"])
def test_invalid_weight_files_are_refused(file, tmp_path, damage, capsys):
    path = tmp_path / "efficientnet.pth"
    weights = torch.load(file, weights_only=True)
    if damage == "missing":
        del weights["_fc.bias"]
    elif damage == "shape":
        weights["_fc.bias"] = torch.zeros(7)
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100_000])
    elif damage == "text":
        path.write_text("hello")
    elif damage == "code":
        path.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError):
        networks.convert(path, tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()
    assert capsys.readouterr().out == ""


def test_normalised_features_do_not_depend_on_their_scale():
    features = torch.randn(2, 3, 3, 8, generator=torch.Generator().manual_seed(1))
    plain, normalised = (FeatureGrid(16, shape=(3, 3, 8), position="none", normalise=one) for one in (False, True))
    normalised.load_state_dict(plain.state_dict())
    mean, deviation = features.mean(-1, keepdim=True), features.std(-1, correction=0, keepdim=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    wanted = plain(Padded((features - mean) / deviation, mask)).values
    assert torch.allclose(normalised(Padded(5 * features + 2, mask)).values, wanted, atol=1e-4)
    assert not torch.allclose(plain(Padded(5 * features + 2, mask)).values, wanted, atol=1e-4)


def test_features_are_stored_with_a_thumbnail(file, tmp_path):
    networks.convert(file, tmp_path / "lite0.safetensors")
    modality = ImageFeatures(network=str(tmp_path / "lite0.safetensors"), size=64)
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:32, 32:] = (10, 200, 30)
    Pillow.fromarray(picture).save(tmp_path / "x.png")
    kept = modality.read(str(tmp_path / "x.png"))
    assert kept.dtype == np.float16
    assert modality.length(kept) == 2
    assert modality.shape == (2, 2, 320)
    batch = modality.collate([kept, kept])
    with torch.no_grad():
        wanted = load_efficientnet(str(tmp_path / "lite0.safetensors")).cells(
            torch.from_numpy(picture).permute(2, 0, 1)[None].float(), 32
        )
    assert torch.allclose(batch.values[1].permute(2, 0, 1), wanted[0], rtol=2e-3, atol=2e-3)
    front = FeatureGrid(24, shape=modality.shape)
    assert front.rows(batch).values.shape == (2, 4, 24)
    assert front.grid(2) == (2, 2)
    scene = modality.visualise(kept, (2, 2))
    assert scene.pixels.shape == (16, 16, 3)
    assert np.abs(scene.pixels[2, 12].astype(int) - (10, 200, 30)).max() < 3
    assert scene.pixels[12, 2].max() < 3
    with pytest.raises(InputError, match="no such network"):
        ImageFeatures(size=64).read(str(tmp_path / "x.png"))
