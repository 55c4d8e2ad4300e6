"""Damaged and hostile checkpoints: each is refused, and nothing in it ever runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from legacy_fixtures import WORDS, Reference, randomised, save_joeynmt, save_opennmt

import transduce
from transduce.errors import InputError
from transduce.interop.huggingface.folder import read_tensor
from transduce.interop.legacy.checkpoint_process import open_checkpoint
from transduce.interop.legacy.safe_pickle import PickleReader, RefusedError
from transduce.interop.legacy.unpack import unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_joeynmt(tmp_path / "given", randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True)), before=True)
    return tmp_path / "given"


def refused(path: Path, problem: str, remedy: str = "") -> None:
    with pytest.raises(InputError) as caught:
        transduce.load(path)
    assert problem in caught.value.problem, caught.value
    assert remedy in caught.value.remedy, caught.value


def write(path: Path, pickled: bytes, numbers: bytes = b"", kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", numbers)
        archive.writestr("archive/version", "3\n")
    return path


class Calls:
    """An object that a pickle would make by calling something."""

    def __init__(self, function, *arguments) -> None:
        self.made = function, arguments

    def __reduce__(self):
        return self.made


MARK = Path("/tmp") / f"transduce-was-here-{os.getpid()}"


CALLS = {
    "os.system": (Calls(os.system, f"touch {MARK}"), "system"),
    "eval": (Calls(eval, f"open({str(MARK)!r}, 'w')"), "eval"),
    "getattr chain": (Calls(getattr, Calls(__import__, "os"), "system"), "getattr"),
    "numpy": (np.zeros(3), "numpy"),
    "a class": (Path("x"), "pathlib"),
    "a function": ({"model": print}, "print"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickled_calls_are_refused_and_never_run(name, protocol, tmp_path):
    thing, named = CALLS[name]
    path = write(tmp_path / "model.pt", pickle.dumps({"model": thing, "opt": {}}, protocol=protocol))
    with pytest.raises(InputError) as caught:
        transduce.load(path)
    assert named in caught.value.problem or "the pickle has an opcode that no checkpoint needs" in caught.value.problem
    assert not MARK.exists()


def test_parent_process_never_unpickles(folder, monkeypatch):
    def never(*_, **__):
        raise AssertionError("unpickled")

    transduce.load(folder, device="cpu")  # what is imported on the way may unpickle what it likes
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    assert transduce.load(folder, device="cpu").target.size == len(WORDS) + 1


def tensor_pickle(shape=(2,), strides=(1,), offset=0, kind="FloatStorage", key="0") -> bytes:
    """A checkpoint with one tensor that claims what it likes, as opcodes."""

    def number(value: int) -> bytes:
        return b"\x8a" + bytes([8]) + struct.pack("<q", value)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(2) + b"tQ"
    sizes, steps = (b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides))
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes + steps + b"\x89}tR"
    return b"\x80\x02}(" + text("model") + b"}" + text("w") + rebuilt + b"s" + text("opt") + b"}u."


def test_intact_checkpoint_is_read(tmp_path):
    """The pickles made here are sound but for what each test breaks."""
    path = write(tmp_path / "model.pt", tensor_pickle(), struct.pack("<2f", 1.5, 2.5))
    with open_checkpoint(path) as checkpoint:
        assert read_tensor(checkpoint.weights["model/w"]).tolist() == [1.5, 2.5]


BROKEN = {
    "storage out of bounds": ({"offset": 1}, "reaches beyond"),
    "huge": ({"shape": (2**40,)}, "reaches beyond"),
    "huge in several ways": ({"shape": (2**40, 2**40), "strides": (0, 0)}, "repeats its elements"),
    "strides out of bounds": ({"shape": (2, 1), "strides": (5, 1)}, "reaches beyond"),
    "overlapping": ({"shape": (2, 2), "strides": (0, 1)}, "repeats its elements"),
    "negative": ({"shape": (-1,)}, "is not a valid size"),
    "negative stride": ({"strides": (-1,)}, "is not a valid size"),
    "negative offset": ({"offset": -4}, "is not a valid size"),
    "uneven": ({"shape": (1, 2)}, "differ in length"),
    "another kind": ({"kind": "QInt8Storage"}, "torch.QInt8Storage"),
    "another type": ({"kind": "Tensor"}, "torch.Tensor"),
    "missing numbers": ({"key": "7"}, "is missing"),
    "a key that climbs": ({"key": "../0"}, "storage of the type"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_outside_their_storage_are_refused(name, tmp_path):
    changes, problem = BROKEN[name]
    refused(write(tmp_path / "model.pt", tensor_pickle(**changes), struct.pack("<2f", 1, 2)), problem)


def test_overlapping_strides_are_refused(tmp_path):
    """Three numbers as two times two, by steps that overlap: none is out of bounds, but more than there are."""
    pickled = tensor_pickle(shape=(2, 2), strides=(1, 1))
    refused(write(tmp_path / "model.pt", pickled, struct.pack("<3f", 1, 2, 3)), "would be larger than its storage")


def nested_lists(depth: int) -> bytes:
    return b"\x80\x02}X\x03\x00\x00\x00opt" + b"]" * depth + b"a" * (depth - 1) + b"s."


def doubled_lists(times: int) -> bytes:
    """Lists of twice the list before: few bytes, more items than there is room for."""
    doubled = b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(times))
    return b"\x80\x02}X\x03\x00\x00\x00opt]q\x00" + doubled.replace(b"](", b"0](") + b"s."


@pytest.mark.parametrize("pickled", [nested_lists(100_000), doubled_lists(60)], ids=["deep", "doubled"])
def test_unbounded_settings_are_refused(pickled, tmp_path):
    refused(write(tmp_path / "model.pt", pickled), "nested more deeply")


@pytest.mark.parametrize(
    "pickled",
    [b"", b"\x80\x02", b"\x80\x02.", b"\x80\x02}u.", b"\x80\x02h\x05.", b"\x80\x02}X\xff\xff\xff\x7fabc.", b"garbage"],
)
def test_damaged_pickles_are_refused(pickled, tmp_path):
    refused(write(tmp_path / "model.pt", pickled), "")


def test_truncated_checkpoint_is_refused(folder):
    path = folder / "best.ckpt"
    path.write_bytes(path.read_bytes()[:-200])
    refused(folder, "damaged")


def test_flipped_bit_is_refused(folder):
    path = folder / "best.ckpt"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda one: one.file_size)
    content[info.header_offset + 200] ^= 1
    path.write_bytes(content)
    refused(folder, "damaged")


def save_as_before_1_6(path: Path) -> None:
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)


def test_format_before_torch_1_6_is_read(folder):
    before = transduce.load(folder, device="cpu").network.state_dict()
    save_as_before_1_6(folder / "best.ckpt")
    after = transduce.load(folder, device="cpu").network.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    content = (folder / "best.ckpt").read_bytes()
    for damaged in (content[:-4], content[:-2000], content[:400], content[:60], b"x" + content):
        (folder / "best.ckpt").write_bytes(damaged)
        with pytest.raises(Exception):  # noqa: B017  -- the child process names whatever is wrong
            unpack(folder / "best.ckpt", folder)
    refused(folder, "damaged")


MAGIC = [pickle.dumps(one, protocol=2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]


@pytest.mark.parametrize("name", ["os.system", "eval", "a function"])
def test_calls_before_torch_1_6_are_refused_and_never_run(name, tmp_path):
    thing, named = CALLS[name]
    for place in range(5):  # each of the five pickles of a file
        pickles = [*MAGIC, pickle.dumps({"model": {}, "opt": {}}, protocol=2), pickle.dumps([], protocol=2)]
        pickles[place] = pickle.dumps(thing, protocol=2)
        (tmp_path / "model.pt").write_bytes(b"".join(pickles))
        with pytest.raises(RefusedError, match=named):
            unpack(tmp_path / "model.pt", tmp_path)
    assert not MARK.exists()


STORED = {
    "intact": (["0"], struct.pack("<q2f", 2, 1.5, 2.5), None),
    "cut": (["0"], struct.pack("<qf", 2, 1.5), "beyond the file"),
    "huge": (["0"], struct.pack("<q2f", 2**40, 1.5, 2.5), "beyond the file"),
    "negative": (["0"], struct.pack("<q2f", -1, 1.5, 2.5), "is not a valid size"),
    "small": (["0"], struct.pack("<qf", 1, 1.5), "reaches beyond its storage"),
    "twice": (["0", "0"], struct.pack("<q2fq", 2, 1.5, 2.5, 0), "that no tensor, or one before"),
    "absent": ([], b"", "is missing"),
    "no list": ("0", b"", "no list of storages"),
}


@pytest.mark.parametrize("name", STORED)
def test_storages_before_torch_1_6_are_checked(name, tmp_path):
    keys, stored, problem = STORED[name]
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join((*MAGIC, tensor_pickle(), pickle.dumps(keys, protocol=2), stored)))
    if problem is not None:
        with pytest.raises(RefusedError, match=problem):
            unpack(path, tmp_path)
    else:
        with open_checkpoint(path) as checkpoint:
            assert read_tensor(checkpoint.weights["model/w"]).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_sets_and_counters_are_read_as_data(protocol):
    things = [{"x"}, frozenset("y"), set(), Counter("zz"), defaultdict(None, a=1)]
    pickled = pickle.dumps(things, protocol=protocol)
    assert PickleReader().run(pickled) == [["x"], ["y"], [], {"z": 2}, {"a": 1}]


def test_compressed_member_is_refused(tmp_path):
    path = write(tmp_path / "model.pt", tensor_pickle(), bytes(10**6), zipfile.ZIP_DEFLATED)
    refused(path, "is compressed")


@pytest.mark.parametrize("name", ["../evil", "/evil", "archive/../../evil", "a\\b"])
def test_member_names_outside_the_archive_are_refused(name, tmp_path):
    path = write(tmp_path / "model.pt", tensor_pickle(), struct.pack("<2f", 1, 2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    refused(path, "it has a member named")


def test_symbolic_link_out_of_the_folder_is_refused(folder, tmp_path):
    link = tmp_path / "elsewhere.ckpt"
    link.symlink_to(folder / "best.ckpt")
    refused(link, "leads out of its folder")
    (folder / "best.ckpt").rename(folder / "500.ckpt")
    (folder / "best.ckpt").symlink_to("500.ckpt")  # as JoeyNMT has it
    assert transduce.load(folder, device="cpu").recipe.generation.beam == 4
    (folder / "src_vocab.txt").rename(tmp_path / "words")
    (folder / "src_vocab.txt").symlink_to(tmp_path / "words")
    refused(folder, "leads out of its folder")


def changed(path: Path, change) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_nan_is_refused(folder):
    def change(content):
        content["model_state"]["decoder.layers.0.x_layer_norm.bias"].data[2] = torch.nan

    changed(folder / "best.ckpt", change)
    refused(folder, "not finite")


def test_quantised_weights_are_refused(folder):
    def change(content):
        name = "src_embed.lut.weight"
        content["model_state"][name] = content["model_state"][name].detach().to(torch.int8)

    changed(folder / "best.ckpt", change)
    refused(folder, "has the dtype I8")


def test_missing_unexpected_and_misshapen_weights_are_refused(folder):
    path = folder / "best.ckpt"
    name = "encoder.layers.1.feed_forward.pwff_layer.0.weight"
    changed(path, lambda content: content["model_state"].update({"encoder.adapter.weight": torch.zeros(2)}))
    refused(folder, "encoder.adapter.weight would be dropped")
    changed(path, lambda content: content["model_state"].pop("encoder.adapter.weight"))
    kept = torch.load(path, weights_only=False)["model_state"][name]
    changed(path, lambda content: content["model_state"].pop(name))
    refused(folder, "encoder.layers.1.feed_forward.fc1.weight are missing")
    changed(path, lambda content: content["model_state"].update({name: kept[:3].detach().clone()}))
    refused(folder, "would be (3, 8)")


def test_settings_that_contradict_the_weights_are_refused(folder):
    text = (folder / "config.yaml").read_text()
    for change, problem in (
        ("num_layers: 900", "more layers than weights"),
        ("num_layers: 3", "are missing"),
        ("num_layers: -1", "is not a valid size"),
        ("num_layers: !!python/object/apply:os.getcwd []", "is not supported"),
        ("num_layers: 2\n      alpha: 0.5", "alpha"),
    ):
        (folder / "config.yaml").write_text(text.replace("num_layers: 2", change))
        refused(folder, problem)
    (folder / "config.yaml").unlink()
    refused(folder, "there is no config.yaml")


def test_vocabulary_of_another_model_is_refused(folder):
    lines = (folder / "trg_vocab.txt").read_text()
    (folder / "trg_vocab.txt").write_text(lines + "more\n")
    refused(folder, "but the vocabulary 19 tokens")
    (folder / "trg_vocab.txt").write_text(lines.replace("</s>", "<end>"))
    refused(folder, "no token ends a text")


def test_vocabulary_without_words_is_refused(tmp_path):
    save_opennmt(tmp_path, randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True)))
    changed(tmp_path / "model.pt", lambda content: content.update(vocab=[("src", ["a"])]))
    refused(tmp_path, "no list of words", "word features")


def test_unknown_toolkit_and_several_checkpoints_are_refused(tmp_path):
    torch.save({"weights": {}, "step": 1}, tmp_path / "one.pt")
    refused(tmp_path, "it holds step, weights", "JoeyNMT, OpenNMT-py and fairseq")
    torch.save({}, tmp_path / "two.pt")
    refused(tmp_path, "there are several checkpoints here: one.pt, two.pt", "one.pt")


def array(content: bytes, header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content


ARRAYS = {
    "objects": (array(b"", "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }"), "has the dtype |O"),
    "huge": (
        array(bytes(8), "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"),
        "size that its header states",
    ),
    "cut": (
        array(bytes(4), "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"),
        "size that its header states",
    ),
    "code": (array(bytes(8), "__import__('os').system('true')"), "damaged"),
    "no array": (b"nothing", "is not an array"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_contradict_their_header_are_refused(name, tmp_path):
    content, problem = ARRAYS[name]
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("Wemb.npy", content)
    refused(tmp_path / "model.npz", problem)


def test_array_of_objects_is_never_unpickled(tmp_path):
    file = io.BytesIO()
    np.save(file, np.array([Calls(os.system, f"touch {MARK}")], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("Wemb.npy", file.getvalue())
    refused(tmp_path / "model.npz", "has the dtype")
    assert not MARK.exists()
