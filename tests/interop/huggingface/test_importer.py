"""Folders that must not be imported: each is refused before memory is allocated for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from huggingface_fixtures import change_config, make, write_tokenizer
from safetensors.torch import load_file, save_file

import transduce
from transduce import interop
from transduce.errors import InputError
from transduce.interop import convert

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("marian", tmp_path / "given")
    return tmp_path / "given"


def refused(folder: Path, problem: str, remedy: str = "") -> None:
    with pytest.raises(InputError) as caught:
        transduce.load(folder)
    assert problem in caught.value.problem, caught.value
    assert remedy in caught.value.remedy, caught.value


def rewrite(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def rewrite_header(folder: Path, change) -> None:
    content = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    made = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(made)) + made + content[8 + length :])


def shard(folder: Path) -> dict[str, str]:
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    (folder / WEIGHTS).unlink()
    listed = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    return listed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MarianMTModle", "closest is MarianMTModel, which has weights of the same names"),
        ("NewForConditionalGeneration", "closest is "),
        ("MarianForQuestionAnswering", "closest is MarianMTModel, which has weights"),  # no family has this shape
    ],
)
def test_the_error_of_an_unknown_architecture_names_the_family_with_the_closest_weights(folder, name, message):
    change_config(folder, architectures=[name])
    refused(folder, f"{name!r} is not supported", message)
    refused(folder, "is not supported", "transduce convert --list")


def test_unknown_architecture_is_told_the_weights_that_its_closest_family_lacks(folder):
    change_config(folder, architectures=["NewMTModel"])
    weights = load_file(folder / WEIGHTS)
    weights |= {f"model.encoder.layers.{layer}.self_attn.q_norm.weight": torch.ones(4) for layer in range(2)}
    save_file(weights, folder / WEIGHTS)
    refused(
        folder, "is not supported", "closest is MarianMTModel, which has no model.encoder.layers.*.self_attn.q_norm."
    )


def test_encoder_alone_is_told_the_family_that_has_it_within(tmp_path):
    make("t5", tmp_path / "given")
    change_config(tmp_path / "given", architectures=["T5EncoderModel"])
    refused(
        tmp_path / "given", "is not supported", "closest is T5ForConditionalGeneration, which has weights of the same"
    )


def test_unknown_architecture_without_readable_weights_is_told_the_closest_name(folder):
    (folder / WEIGHTS).unlink()
    change_config(folder, architectures=["SomethingNobodyHasSeenBeforeForCausalLM"])
    refused(folder, "is not supported", "ForCausalLM, another model")
    change_config(folder, architectures=["SpeechThing"])
    refused(folder, "'SpeechThing' is not supported", "transduce convert --list")
    change_config(folder, architectures=["ProphetNetForConditionalGeneration"])
    refused(folder, "its logits come from a second stream", "transduce convert --list")
    change_config(folder, architectures=None)
    refused(folder, "is not supported")


def test_no_refusal_of_an_architecture_proposes_another_name_for_the_config(folder):
    for name in ("MarianMTModle", "Qwen3ForCausalLM", "BertForQuestionAnswering"):
        change_config(folder, architectures=[name])
        with pytest.raises(InputError) as caught:
            transduce.load(folder)
        assert "did you mean" not in str(caught.value)
        assert "config.json" not in str(caught.value).partition(":")[2]


def test_remote_code_is_refused(folder):
    change_config(folder, auto_map={"AutoModel": "own.py--Model"})
    refused(folder, "needs its own code")


def test_missing_weight_is_refused(folder):
    rewrite(folder, lambda weights: weights.pop("model.encoder.layers.1.fc1.weight"))
    refused(folder, "encoder.layers.1.feed_forward.fc1.weight are missing")


@pytest.mark.parametrize("name", ["model.decoder.layers.0.adapter.weight", "model.encoder.layers.2.fc1.weight"])
def test_unexpected_weight_is_refused(folder, name):
    """One of a kind that the family lacks, and one of a layer that the settings do not ask for."""
    rewrite(folder, lambda weights: weights.update({name: torch.zeros(24, 16)}))
    refused(folder, f"{name} would be dropped")


def test_wrong_shape_is_refused(folder):
    rewrite(folder, lambda weights: weights.update({"model.encoder.layers.0.fc1.weight": torch.zeros(25, 16)}))
    refused(folder, "(25, 16)", "different models")


def test_quantised_weights_are_refused(folder):
    name = "model.encoder.layers.0.fc1.weight"
    rewrite(folder, lambda weights: weights.update({name: torch.zeros(24, 16, dtype=torch.int8)}))
    refused(folder, "has the dtype I8", "before quantisation")


def test_nan_is_refused(folder):
    rewrite(folder, lambda weights: weights["model.shared.weight"][3].fill_(torch.nan))
    refused(folder, "model.shared.weight has values that are not finite")


def test_tied_weights_that_differ_are_refused(folder):
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.shared.weight"] + 1}))
    refused(folder, "lm_head.weight differs from model.shared.weight")


def test_pickled_weights_are_read_without_running_code(folder):
    """One file or two; a file that names a function is refused."""
    expected = interop.read(folder).weights
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    torch.save({name: weights[name] for name in names}, folder / "pytorch_model.bin")
    found = interop.read(folder).weights
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (folder / "pytorch_model.bin").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: weights[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    index = {name: f"pytorch_model-{place % 2}.bin" for place, name in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert all(torch.equal(interop.read(folder).weights[name], expected[name]) for name in list(expected)[:1])
    torch.save({"model.shared.weight": print}, folder / "pytorch_model-0.bin")
    refused(folder, "__builtin__.print")


def test_weights_of_another_library_are_refused(folder):
    (folder / WEIGHTS).unlink()
    (folder / "tf_model.h5").write_bytes(b"anything")
    refused(folder, "tf_model.h5, which belongs to another library")


def test_folder_without_weights_is_refused(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, "there is no model.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_truncated_file_is_refused(folder, kept):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(InputError):
        transduce.load(folder)


@pytest.mark.parametrize("length", [2**63, 2**40, 2**20])
def test_huge_header_is_refused(folder, length):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + content[8:])
    refused(folder, "the header would be")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**50]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": "abc", "data_offsets": [0, 16]},
        {"dtype": "F32"},
        [],
    ],
)
def test_header_that_contradicts_the_file_is_refused(folder, entry):
    rewrite_header(folder, lambda header: header.update({"model.shared.weight": entry}))
    with pytest.raises(InputError):
        transduce.load(folder)


def test_huge_sizes_in_the_config_are_refused_before_allocation(folder):
    """Settings that would fill the memory are found out by the weights that are there."""
    for changes in ({"d_model": 2**20}, {"encoder_layers": 10**6}, {"vocab_size": 10**6}, {"encoder_ffn_dim": 2**40}):
        original = (folder / "config.json").read_text()
        change_config(folder, **changes)
        with pytest.raises(InputError):
            transduce.load(folder)
        (folder / "config.json").write_text(original)
    transduce.load(folder)


def test_sharded_weights_equal_one_file(folder):
    before = transduce.load(folder, device="cpu").network.state_dict()
    shard(folder)
    after = transduce.load(folder, device="cpu").network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("file", ["../two.safetensors", "/etc/passwd", "sub/two.safetensors", ".."])
def test_index_that_leads_out_of_the_folder_is_refused(folder, file):
    listed = shard(folder)
    (folder.parent / "two.safetensors").write_bytes((folder / "two.safetensors").read_bytes())
    changed = {name: file if old == "two.safetensors" else old for name, old in listed.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
    refused(folder, "is outside this folder")


def test_index_that_contradicts_the_shards_is_refused(folder):
    listed = shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**listed, "more": "one.safetensors"}}))
    refused(folder, "more is in the index, but in no file")
    first = next(iter(listed))
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: f for n, f in listed.items() if n != first}}))
    refused(folder, "but the index does not say so")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_symbolic_link_out_of_the_folder_is_refused(folder, name):
    outside = folder.parent / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refused(folder, "leads out of its folder", "cp -rL")


def test_unsupported_config_values_are_refused(folder):
    for changes, problem in (
        ({"activation_function": "mish"}, "mish"),
        ({"normalize_before": True}, "normalize_before"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"d_model": "wide"}, "d_model"),
        ({"dropout": 7}, "dropout"),
        ({"decoder_start_token_id": 99}, "decoder_start_token_id: 99 is no token"),
        ({"forced_bos_token_id": 10**9}, "forced_bos_token_id: 1000000000 is no token"),
        ({"bad_words_ids": [[99]]}, "bad_words_ids: [99] is not a list of tokens"),
        ({"bad_words_ids": 5}, "bad_words_ids: 5 is not a list of words"),
        ({"suppress_tokens": 0.5}, "suppress_tokens: 0.5 is not a list of tokens"),
        ({"max_length": "x"}, "max_length: 'x' is not an integer"),
        ({"num_beams": [1]}, "num_beams: [1] is not an integer"),
        ({"num_beams": 10**9}, "num_beams: 1000000000 is not an integer from 1 to 1,048,576"),
        ({"length_penalty": float("nan"), "num_beams": 2}, "length_penalty: nan is not a number"),
        ({"early_stopping": [1], "num_beams": 2}, "early_stopping: [1] is not supported"),
    ):
        original = (folder / "config.json").read_text()
        (folder / "generation_config.json").unlink(missing_ok=True)
        change_config(folder, **changes)
        refused(folder, problem)
        (folder / "config.json").write_text(original)


def test_unusable_tokenizers_are_refused(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "there is no tokenizer.json", "spiece.model")
    write_tokenizer(folder, "gpt2")  # it closes no text
    refused(folder, "does not end a text")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(folder, "not a tokenizer")
    (folder / "tokenizer.json").write_text("[" * 10**5)
    refused(folder, "not readable as JSON")


def test_empty_folder_and_existing_run_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        transduce.load(tmp_path / "empty")
    with pytest.raises(InputError, match=r"config\.json"):
        convert(tmp_path / "empty", tmp_path / "run")
    convert(folder, tmp_path / "run")
    with pytest.raises(InputError, match="already"):
        convert(folder, tmp_path / "run")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_read_as_fp32(kind, tmp_path):
    """16-bit weights are converted without loss."""
    make("marian", tmp_path)
    weights = {name: tensor.to(kind) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    network = transduce.load(tmp_path, device="cpu").network
    found = network.state_dict()["encoder.layers.1.feed_forward.fc1.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, weights["model.encoder.layers.1.fc1.weight"].float())
