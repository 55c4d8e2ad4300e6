"""g2p_en compared with its equations in numpy: equal phones, and refusals."""

from __future__ import annotations

import random
import struct
import zipfile
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.interop import recognises
from transduce.interop.g2p_en import FILE, PHONES, WEIGHTS

WIDTH, START, END = 24, 2, 3


SYMBOLS = ["<pad>", "<unk>", "</s>", *ascii_lowercase]


def draw(seed: int = 1, width: int = WIDTH) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    shapes = {"enc_emb": (29, width), "dec_emb": (74, width), "fc_w": (74, width), "fc_b": (74,)}
    for side in ("enc", "dec"):
        shapes |= {f"{side}_w_ih": (3 * width, width), f"{side}_w_hh": (3 * width, width)}
        shapes |= {f"{side}_b_ih": (3 * width,), f"{side}_b_hh": (3 * width,)}
    arrays = {name: chance.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["fc_b"][END] += 1.5  # some words end by themselves
    return arrays


def step(x: np.ndarray, h: np.ndarray, arrays: dict[str, np.ndarray], side: str) -> np.ndarray:
    """r, z = sigmoid(W x + U h), n = tanh(W x + r * (U h)), h' = (1 - z) n + z h (Cho 2014, as cuDNN has it)"""
    ahead = arrays[f"{side}_w_ih"] @ x + arrays[f"{side}_b_ih"]
    back = arrays[f"{side}_w_hh"] @ h + arrays[f"{side}_b_hh"]
    width = len(h)
    r, z = (1 / (1 + np.exp(-(ahead + back)[part * width : (part + 1) * width])) for part in (0, 1))
    n = np.tanh(ahead[2 * width :] + r * back[2 * width :])
    return (1 - z) * n + z * h


def pronounce(word: str, arrays: dict[str, np.ndarray]) -> tuple[list[int], float]:
    """Their numbers of the likeliest phones, at most 20, and how far the second likeliest ever was at least."""
    h = np.zeros(arrays["enc_w_hh"].shape[1], np.float32)
    for symbol in [*word, "</s>"]:
        number = SYMBOLS.index(symbol) if symbol in SYMBOLS else 1
        h = step(arrays["enc_emb"][number], h, arrays, "enc")
    decoder_ids, number, margin = [], START, np.inf
    for _ in range(20):
        h = step(arrays["dec_emb"][number], h, arrays, "dec")
        logits = arrays["fc_w"] @ h + arrays["fc_b"]
        number = int(logits.argmax())
        margin = min(margin, float(np.diff(np.sort(logits)[-2:])[0]))
        if number == END:
            break
        decoder_ids.append(number)
    return decoder_ids, margin


def words(count: int) -> list[str]:
    chance = random.Random(3)
    return ["".join(chance.choices(ascii_lowercase, k=chance.randint(1, 12))) for _ in range(count)]


def write(folder: Path, arrays: dict[str, np.ndarray], name: str = FILE) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


@pytest.mark.parametrize("whole", [True, False])
def test_phones_equal_the_equations(whole, tmp_path):
    """From the file itself, or from the folder where it lies."""
    arrays = draw()
    arrays["fc_b"][[0, 1, START]] = -20  # <pad>, <unk> and <s>, which no word is taught to say
    file = write(tmp_path, arrays)
    model = transduce.load(file if whole else tmp_path, device="cpu")
    asked = [*words(60), "naïve", "o'clock"]
    expected = [" ".join(PHONES[number - 4] for number in pronounce(word, arrays)[0]) for word in asked]
    assert [one.text for one in model.generate(asked)] == expected
    assert len({len(one.split()) for one in expected}) > 3
    assert max(len(one.split()) for one in expected) == 20


def test_convert_command_writes_a_run(tmp_path):
    write(tmp_path, draw(), "mine.npz")
    assert recognises(tmp_path / "mine.npz")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "mine.npz"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    run, given = (transduce.load(tmp_path / name, device="cpu") for name in ("run", "mine.npz"))
    assert [one.text for one in run.generate(words(5))] == [one.text for one in given.generate(words(5))]


def refused(folder: Path, arrays: dict[str, np.ndarray], problem: str) -> None:
    file = write(folder, arrays)
    with pytest.raises(InputError) as caught:
        transduce.load(file)
    assert problem in caught.value.problem


def test_missing_unexpected_and_misshapen_arrays_are_refused(tmp_path):
    arrays = draw()
    refused(tmp_path, {name: array for name, array in arrays.items() if name != "dec_b_hh"}, "are missing: dec_b_hh")
    refused(tmp_path, {**arrays, "more": arrays["fc_b"]}, "would be dropped: more")
    refused(tmp_path, {**arrays, "fc_w": arrays["fc_w"][:-1]}, "fc_w is (73, 24)")
    refused(tmp_path, {**arrays, "fc_w": arrays["fc_w"].astype(np.float64)}, "does not match its header")
    refused(tmp_path, {**arrays, "fc_b": np.full(74, np.nan, np.float32)}, "not finite")
    refused(tmp_path, {**arrays, "fc_b": np.array([None] * 74)}, "does not match its header")  # pickled


def test_header_larger_than_the_array_is_refused_before_allocation(tmp_path):
    """An array that announces more than is there is found out before room is made for it."""
    file = write(tmp_path, draw())
    with zipfile.ZipFile(file) as content:
        members = {name: content.read(name) for name in content.namelist()}
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"
    members["fc_b.npy"] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 16
    with zipfile.ZipFile(file, "w") as content:
        for name, data in members.items():
            content.writestr(name, data)
    with pytest.raises(InputError, match="does not match its header"):
        transduce.load(file)


def test_symbolic_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "inner").mkdir()
    file = write(tmp_path, draw())
    (tmp_path / "inner" / FILE).symlink_to(file)
    with pytest.raises(InputError, match="leads out of its folder"):
        transduce.load(tmp_path / "inner")


def test_every_array_has_a_native_name():
    assert set(WEIGHTS) == set(draw())
    assert len(PHONES) == 70


def test_bridge_is_required_where_states_differ():
    """Nothing leads from a wider summary, or to a state of several parts, but a bridge."""
    from transduce.recipe import parse
    from transduce.recipe.build import complete_recipe

    part = {"kind": "recurrent", "width": 16}
    for other in ({"width": 8}, {"layers": 2}, {"cell": "lstm"}):
        model = {"encoder": part, "decoder": {**part, "bridge": "none", "context": "initial", **other}}
        with pytest.raises(InputError, match="without a bridge"):
            complete_recipe(parse({"model": model}))
    complete_recipe(parse({"model": {"encoder": part, "decoder": {**part, "bridge": "none"}}}))
