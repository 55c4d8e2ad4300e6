"""Image files: decoding rules and refused files."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from transduce.data.filters import Filters
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, UnreadableError
from transduce.modalities.image import Image
from transduce.modalities.image_files import fit, read_image
from transduce.modalities.sources import ModalitySource
from transduce.recipe import parse

RED, WHITE = (214, 40, 40), (255, 255, 255)


def saved(path: Path, picture, **options) -> Path:
    picture.save(path, **options)
    return path


def pixels(path: Path, channels: int = 3) -> np.ndarray:
    picture = read_image(path, channels)
    return fit(picture, picture.height, picture.width, "crop")


def bomb(path: Path, side: int) -> Path:
    """A PNG of a few hundred bytes that says it is huge."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


@pytest.mark.parametrize("side", [60_000, 9_000])  # beyond the library's limit, and only beyond ours
def test_decompression_bomb_is_refused_before_decoding(tmp_path, side):
    path = bomb(tmp_path / "bomb.png", side)
    assert path.stat().st_size < 500
    with pytest.raises(UnreadableError) as error:
        read_image(path)
    assert error.value.reason == "image too large"


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "empty", "text", "eps", "missing", "folder"])
def test_unreadable_image_files_are_refused(tmp_path, damage):
    path = tmp_path / "picture.jpg"
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    saved(path, Pillow.fromarray(noise))
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "corrupt":
        path.write_bytes(b"\xff\xd8\xff\xe0" + bytes(reversed(whole)))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("this is no picture")
    elif damage == "eps":  # which the library would hand to another program
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    else:
        path = tmp_path / "nowhere.jpg" if damage == "missing" else tmp_path
    with pytest.raises(UnreadableError) as error:
        read_image(path)
    wanted = "no such image" if damage in ("missing", "folder") else "not a readable image"
    assert error.value.reason == wanted
    assert str(path) in error.value.problem


def test_greyscale_cmyk_and_rgb_are_converted(tmp_path):
    grey = saved(tmp_path / "grey.png", Pillow.new("L", (5, 4), 77))
    assert pixels(grey).shape == (4, 5, 3)
    assert (pixels(grey) == 77).all()
    assert (pixels(grey, 1) == 77).all()
    cmyk = saved(tmp_path / "cmyk.jpg", Pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=95)
    assert np.abs(pixels(cmyk).astype(int) - (255, 0, 0)).max() < 12
    red = saved(tmp_path / "red.png", Pillow.new("RGB", (4, 4), RED))
    assert np.abs(pixels(red, 1).astype(int) - round(0.299 * 214 + 0.587 * 40 + 0.114 * 40)).max() <= 1


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA"])
def test_transparency_is_blended_onto_white(tmp_path, mode):
    if mode == "P":
        picture = Pillow.new("P", (6, 6), 1)
        picture.putpalette([0, 0, 0, *RED])
        picture.putpixel((0, 0), 0)
        path = saved(tmp_path / "p.png", picture, transparency=0)
        inside = RED
    else:
        picture = Pillow.new(mode, (6, 6), (*RED, 255) if mode == "RGBA" else (90, 255))
        picture.putpixel((0, 0), (0, 0, 0, 0) if mode == "RGBA" else (0, 0))
        path = saved(tmp_path / "a.png", picture)
        inside = RED if mode == "RGBA" else (90, 90, 90)
    found = pixels(path)
    assert tuple(found[0, 0]) == WHITE
    assert (found[1:, 1:] == inside).all()


def test_16_bit_values_keep_their_upper_byte(tmp_path):
    values = np.array([[0, 256, 65535], [32768, 255, 51200]], np.uint16)
    for ending in ("png", "tif"):
        path = saved(tmp_path / f"deep.{ending}", Pillow.fromarray(values))
        assert pixels(path, 1)[:, :, 0].tolist() == [[0, 1, 255], [128, 0, 200]]


def test_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Pillow.new("RGB", (6, 6), colour) for colour in (RED, (0, 0, 255), WHITE)]
    path = tmp_path / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50)
    assert np.abs(pixels(path).astype(int) - RED).max() < 8


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_rotation_is_applied(tmp_path, turn):
    upright = np.zeros((6, 4, 3), np.uint8)
    upright[0, 0] = RED
    # What the eight numbers of EXIF mean: which corner of what is stored is the upper left one.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[turn]
    exif = Pillow.Exif()
    exif[0x0112] = turn
    path = saved(tmp_path / "turned.png", Pillow.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert np.array_equal(pixels(path), upright)


@pytest.mark.parametrize("how", ["crop", "pad", "stretch"])
def test_images_of_all_proportions_are_resized(how):
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 15:] = WHITE
    found = fit(Pillow.fromarray(wide), 8, 8, how)
    assert found.shape == (8, 8, 3)
    assert found[4, 0].max() < 40
    assert found[4, 7].min() > 215
    assert (found[0, 4] == 128).all() == (how == "pad")


def many(folder: Path) -> Path:
    """Three good pictures, and one of each kind that is refused."""
    good = [saved(folder / f"good{number}.png", Pillow.new("RGB", (9, 9), RED)) for number in range(3)]
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no")
    bomb(folder / "bomb.png", 60_000)
    names = [good[0].name, "empty.png", good[1].name, "bomb.png", "text.png", "away.png", good[2].name]
    (folder / "pairs.tsv").write_text("".join(f"{name}\ta thing\n" for name in names))
    return folder / "pairs.tsv"


def store_of(path: Path, invalid: str):
    recipe = parse({"data": {"train": str(path), "sources": {"seen": {"kind": "image"}}, "invalid": invalid}})
    target = Tokenizer.train(["a thing"], "words", 10, 1)
    perceived = ModalitySource.of({"seen": Image(size=8)}, "test")
    return build_store(recipe.data.train, perceived, target, Filters(), invalid, path.parent / "cache")


def test_unreadable_images_are_dropped_and_counted(tmp_path):
    store = store_of(many(tmp_path), "drop")
    assert len(store) == 3
    lines = "\n".join(store.describe())
    for reason, count, line in (
        ("not a readable image", 2, 2),
        ("image too large", 1, 4),
        ("no such image", 1, 6),
    ):
        message = next(line for line in lines.splitlines() if reason in line)
        assert str(count) in message
        assert f"pairs.tsv:{line}" in message
    assert store.items.items([2])[0].parts[0].shape == (8, 8, 3)


def test_first_unreadable_image_is_an_error_with_its_line(tmp_path):
    with pytest.raises(InputError) as error:
        store_of(many(tmp_path), "error")
    assert error.value.where.endswith("pairs.tsv:2")
    assert "empty.png" in error.value.problem


def test_image_named_twice_is_stored_once(tmp_path):
    saved(tmp_path / "one.png", Pillow.new("RGB", (9, 9), RED))
    (tmp_path / "pairs.tsv").write_text("one.png\ta\none.png\tthing\n")
    store = store_of(tmp_path / "pairs.tsv", "error")
    assert len(store) == 2
    assert (store.folder / "part.seen.data").stat().st_size == 8 * 8 * 3


def test_pixels_are_normalised_by_mean_and_spread(tmp_path):
    path = saved(tmp_path / "one.png", Pillow.new("RGB", (8, 8), (0, 255, 51)))
    plain, normalised = Image(size=8), Image(size=8, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    found = plain.collate([plain.read(str(path))])
    assert found.values[0, 0, 0].tolist() == pytest.approx([-1, 1, -0.6])
    assert found.mask.shape == (1, 8)
    assert found.mask.all()
    wanted = [(0 - 0.485) / 0.229, (1 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert normalised.collate([normalised.read(str(path))]).values[0, 3, 3].tolist() == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(InputError):
        Image(size=8, mean=(0.1, 0.2))


def test_corrupt_bytes_raise_only_unreadable_errors(tmp_path):
    good = io.BytesIO()
    Pillow.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(good, "PNG")
    chance = np.random.default_rng(3)
    path = tmp_path / "x.png"
    for _ in range(60):
        raw = bytearray(good.getvalue())
        for place in chance.integers(8, len(raw), 3):
            raw[place] = chance.integers(0, 256)
        path.write_bytes(raw)
        reason = "none"
        try:
            shape = pixels(path).shape
        except UnreadableError as error:
            reason, shape = error.reason, (0, 0, 3)
        assert reason in ("none", "not a readable image", "image too large")
        assert shape[2] == 3
