"""VQ tokenizer: codebook, round trips, files, reconstruction error."""

from __future__ import annotations

import io
import json
import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Picture
from safetensors.torch import load, save
from torch.testing import assert_close
from typer.testing import CliRunner

from transduce.cli import app
from transduce.errors import InputError
from transduce.modalities import image_tokenizers
from transduce.modalities.image_files import fit
from transduce.modalities.image_tokenizers import CODE_SIZE, VQVAE, Codebook, VQTokenizer, load_image_tokenizer
from transduce.synthetic.media import generate_icons


def icons(seed: int, count: int, size: int) -> list[np.ndarray]:
    made = islice(generate_icons(random.Random(seed), False), count)
    opened = (Picture.open(io.BytesIO(one.files["png"])).convert("RGB") for one in made)
    return [fit(picture, size, size, "crop") for picture in opened]


@pytest.fixture(scope="module")
def untrained() -> VQTokenizer:
    torch.manual_seed(1)
    network = VQVAE(5, 2).eval()
    torch.nn.init.normal_(network.codebook.codes)
    return VQTokenizer(network, 4, 6, 2)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 99))
def test_nearest_code_is_chosen(count, vectors, seed):
    draw = torch.Generator().manual_seed(seed)
    book = Codebook(count)
    book.codes = torch.randn(count, CODE_SIZE, generator=draw)
    values = torch.randn(vectors, CODE_SIZE, generator=draw)
    distances = (values[:, None] - book.codes).square().sum(-1)
    assert_close(distances.gather(1, book.nearest(values)[:, None])[:, 0], distances.min(1).values)


def test_gradients_pass_straight_through():
    torch.manual_seed(1)
    book = Codebook(4).eval()
    torch.nn.init.normal_(book.codes)
    vectors, wanted = torch.randn(7, CODE_SIZE, requires_grad=True), torch.randn(7, CODE_SIZE)
    found, cost = book(vectors)
    assert_close(found, book.codes[book.nearest(vectors)])
    (gradient,) = torch.autograd.grad((found * wanted).sum(), vectors, retain_graph=True)
    assert_close(gradient, wanted)
    (towards,) = torch.autograd.grad(cost, vectors)
    assert_close(towards, 2 * (vectors - found).detach() / vectors.numel())


def test_codes_are_means_of_their_vectors_and_all_are_used():
    torch.manual_seed(1)
    middles = 10 * torch.randn(6, CODE_SIZE)
    book = Codebook(12).train()
    for _ in range(1500):
        book(middles.repeat_interleave(20, 0) + 0.1 * torch.randn(120, CODE_SIZE))
    nearest = torch.cdist(middles, book.codes)
    assert nearest.min(1).values.max() < 0.5  # every cloud has a code of its own
    assert nearest.min(0).values.max() < 2  # and no code lies anywhere else


def test_unused_code_is_reinitialised():
    book = Codebook(3).train()
    book(torch.randn(30, CODE_SIZE))
    book.codes[2], book.sums[2], book.counts[2] = 99.0, 99.0 * 0.05, 0.05
    book(torch.randn(30, CODE_SIZE))
    assert book.codes.abs().max() < 9


def test_vq_decodes_invalid_lines_as_far_as_possible(untrained):
    whole = "c1 c2 c3 c0 c4 c1"
    drawn, fits = untrained.decode(whole)
    assert fits
    assert drawn.shape == (4, 6, 3)
    for line in ("c1 c2", f"{whole} c0", "c1 c2 <unk> c0 c4 c1", "c1 c2 c5 c0 c4 c1", ""):
        other, fits = untrained.decode(line)
        assert not fits
        assert other.shape == drawn.shape
    assert np.array_equal(untrained.decode(f"{whole} c0")[0], drawn)


def test_vq_tokenizer_is_saved_and_loaded(untrained, tmp_path):
    path = tmp_path / "codes.safetensors"
    untrained.save(path)
    again = load_image_tokenizer(path)
    assert isinstance(again, VQTokenizer)
    picture = np.random.default_rng(1).integers(0, 256, (4, 6, 3), np.uint8)
    line = untrained.encode(picture)
    assert again.encode(picture) == line
    assert len(line.split()) == again.tokens == 6
    assert np.array_equal(again.decode(line)[0], untrained.decode(line)[0])
    with pytest.raises(ValueError, match="an image of"):
        again.encode(picture[:2])


def test_invalid_vq_files_are_refused(untrained, tmp_path):
    path = tmp_path / "codes.safetensors"
    untrained.save(path)
    content = path.read_bytes()
    tensors, sizes = load(content), {"height": 4, "width": 6, "cell": 2, "count": 5}
    name = next(iter(tensors))
    missing = {other: values for other, values in tensors.items() if other != name}
    bad = [
        (tensors, {**sizes, "count": 6}),
        (tensors, {**sizes, "cell": 3}),
        (tensors, {**sizes, "height": 5}),
        (tensors, {**sizes, "width": 10**9}),
        (tensors, {**sizes, "height": "4"}),
        (tensors, [1]),
        (missing, sizes),
        ({**tensors, name: torch.full_like(tensors[name], torch.nan)}, sizes),
    ]
    wrong = [b"", content[:200], save(tensors), *(save(one, {"codes": json.dumps(header)}) for one, header in bad)]
    for broken in wrong:
        path.write_bytes(broken)
        with pytest.raises(InputError, match="not a file of codes"):
            load_image_tokenizer(path)
    with pytest.raises(InputError, match="no such file"):
        load_image_tokenizer(tmp_path / "none.json")


def test_cells_must_tile_the_image():
    with pytest.raises(InputError, match="a multiple of 4"):
        VQTokenizer.fit([np.zeros((6, 8, 3), np.uint8)], 4, 4, updates=1)


def test_same_images_give_the_same_codes():
    pictures = icons(1, 8, 8)
    before = torch.get_rng_state()
    one, other = (VQTokenizer.fit(pictures, 8, 4, updates=3) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.network.state_dict().values(), other.network.state_dict().values(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), before)


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_commands_encode_and_decode_images(tmp_path, monkeypatch):
    monkeypatch.setattr(image_tokenizers, "UPDATES", 3)
    call("data", "icons", "--count", 6, "--output", tmp_path / "icons")
    pairs = tmp_path / "icons" / "pairs.tsv"
    message = call(
        "encode-images", pairs, "--kind", "vq", "--size", 8, "--codebook-size", 8, "--output", tmp_path / "drawn"
    )
    assert "6 images of 8 x 8 pixels, 4 tokens each, 8 codes" in message
    lines = [line.split("\t")[1] for line in (tmp_path / "drawn" / "pairs.tsv").read_text().splitlines()]
    assert [len(line.split()) for line in lines] == [4] * 6
    kept = tmp_path / "drawn" / "codes.safetensors"
    call("encode-images", pairs, "--tokenizer", kept, "--output", tmp_path / "again")
    assert (tmp_path / "again" / "pairs.tsv").read_text() == (tmp_path / "drawn" / "pairs.tsv").read_text()
    listed = tmp_path / "lines.txt"
    listed.write_text("".join(f"{line}\n" for line in lines))
    call("decode-images", listed, "--tokenizer", kept, "--output", tmp_path / "made", "--scale", 1)
    shown = np.asarray(Picture.open(tmp_path / "made" / "00003.png"))
    assert np.array_equal(shown, VQTokenizer.load(kept).decode(lines[2])[0])
    wrong = CliRunner().invoke(
        app, ["encode-images", str(pairs), "--kind", "vq", "--size", "9", "--output", str(tmp_path / "no")]
    )
    assert wrong.exit_code != 0


def test_pairs_of_images_become_pairs_of_sequences(tmp_path):
    """A mirrored image has the tokens of each row in the other order, since both sides have one palette."""
    lines = []
    for number, picture in enumerate(icons(2, 5, 6)):
        for name, pixels in (("one", picture), ("mirrored", picture[:, ::-1])):
            Picture.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / f"{name}{number}.png")
        lines.append(f"one{number}.png\tmirrored{number}.png\n")
    (tmp_path / "images.tsv").write_text("".join(lines))
    call("encode-images", tmp_path / "images.tsv", "--both", "--size", 6, "--output", tmp_path / "coded")
    for line in (tmp_path / "coded" / "pairs.tsv").read_text().splitlines():
        source, target = (np.array(side.split()).reshape(6, 6) for side in line.split("\t"))
        assert (source[:, ::-1] == target).all()
        assert len(set(source.flatten())) > 1
    (tmp_path / "images.tsv").write_text("one0.png\n")
    wrong = CliRunner().invoke(
        app, ["encode-images", str(tmp_path / "images.tsv"), "--both", "--output", str(tmp_path / "no")]
    )
    assert "no second image" in str(wrong.exception)
