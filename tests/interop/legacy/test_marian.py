"""Marian .npz files: logits equal to the transformers library."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_fixtures import write_sentencepiece
from legacy_fixtures import (
    DECODER_IDS,
    HEADS,
    HIDDEN,
    LAYERS,
    WIDTH,
    WORDS,
    compare,
    marian_binary,
    numbers,
    quantised,
    randomised,
    read,
    save_marian,
)

import transduce
from transduce.errors import InputError
from transduce.flow import EOS, UNK


def sinusoids(length: int) -> torch.Tensor:
    """As Marian lays them out: all sines, then all cosines, the slowest of 1 / 10000."""
    half = WIDTH // 2
    angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(half) * np.log(10000) / (half - 1))
    return torch.cat((angles.sin(), angles.cos()), -1)


def arrays_of(library) -> dict[str, np.ndarray]:
    arrays = {"Wemb": library.model.shared.weight[:-1], "decoder_ff_logit_out_b": library.final_logits_bias[:, :-1]}
    before = hasattr(library.model.encoder, "layer_norm")
    end = "_pre" if before else ""
    for side in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(library.model, side).layers, 1):
            start = f"{side}_l{number}"
            blocks = {"self": (layer.self_attn, layer.self_attn_layer_norm)}
            if side == "decoder":
                blocks["context"] = (layer.encoder_attn, layer.encoder_attn_layer_norm)
            for name, (block, norm) in blocks.items():
                for letter, part in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
                    arrays[f"{start}_{name}_W{letter}"] = getattr(block, part).weight.T
                    arrays[f"{start}_{name}_b{letter}"] = getattr(block, part).bias[None]
                arrays[f"{start}_{name}_Wo_ln_scale{end}"] = norm.weight[None]
                arrays[f"{start}_{name}_Wo_ln_bias{end}"] = norm.bias[None]
            for number_, part in (("1", layer.fc1), ("2", layer.fc2)):
                arrays[f"{start}_ffn_W{number_}"], arrays[f"{start}_ffn_b{number_}"] = part.weight.T, part.bias[None]
            arrays[f"{start}_ffn_ffn_ln_scale{end}"] = layer.final_layer_norm.weight[None]
            arrays[f"{start}_ffn_ffn_ln_bias{end}"] = layer.final_layer_norm.bias[None]
        if before:
            norm = getattr(library.model, side).layer_norm
            arrays[f"{side}_top_ln_scale"], arrays[f"{side}_top_ln_bias"] = norm.weight[None], norm.bias[None]
    return {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in arrays.items()}


def reference_model(before: bool, activation: str):
    transformers = pytest.importorskip("transformers")
    words = ["</s>", "<unk>", *WORDS, "no", "1"]
    name = "Pegasus" if before else "Marian"
    made = getattr(transformers, f"{name}Config")(
        vocab_size=len(words) + 1, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, scale_embedding=True,
        activation_function=activation, pad_token_id=len(words), eos_token_id=0, decoder_start_token_id=len(words),
        max_position_embeddings=64,
    )  # fmt: skip
    library = getattr(transformers, {"Pegasus": "PegasusForConditionalGeneration"}.get(name, "MarianMTModel"))(made)
    randomised(library)
    library.final_logits_bias = torch.randn_like(library.final_logits_bias)
    library.final_logits_bias[0, -1] = -1e9
    with torch.no_grad():
        library.model.shared.weight[-1] = 0  # what an output starts with
        for side in (library.model.encoder, library.model.decoder):
            side.embed_positions.weight[:] = sinusoids(64)
    for module in library.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    return library, words


def options_yaml(before: bool, activation: str) -> str:
    places = ("n", "da", "n") if before else ("", "dan", "")
    lines = {
        "type": "transformer", "dim-emb": WIDTH, "enc-depth": LAYERS, "dec-depth": LAYERS,
        "transformer-heads": HEADS, "transformer-dim-ffn": HIDDEN, "transformer-ffn-activation": activation,
        "transformer-preprocess": f'"{places[0]}"', "transformer-postprocess": places[1],
        "transformer-postprocess-top": f'"{places[2]}"', "transformer-postprocess-emb": "d",
        "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": "false",
        "transformer-dropout": 0.1, "version": "v1.10.28 abc 2021" if before else "v1.9.0",
    }  # fmt: skip
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


@pytest.mark.filterwarnings("ignore:.*outputs are those of the trained model")
@pytest.mark.parametrize(
    ("before", "activation", "theirs"),
    [(False, "swish", "swish"), (True, "relu", "relu"), (False, "gelu", "quick_gelu")],  # the gelu until 1.12.0
)
def test_logits_equal_transformers(before, activation, theirs, tmp_path):
    library, words = reference_model(before, theirs)
    save_marian(tmp_path, arrays_of(library), options_yaml(before, activation), words)
    model = transduce.load(tmp_path, device="cpu")
    source, foreign = read(model)
    foreign = foreign.where(source.mask, len(words))
    decoder_ids = numbers(model.target, DECODER_IDS)
    decoder_ids[:, 0] = len(words)
    with torch.no_grad():
        answer = library(input_ids=foreign, attention_mask=source.mask.long(), decoder_input_ids=decoder_ids).logits
    compare(model, source, answer)
    # The same with a table for each side and a matrix of its own at the end, and a vocabulary for each side.
    arrays = arrays_of(library)
    table = arrays.pop("Wemb")
    arrays |= {"encoder_Wemb": table, "decoder_Wemb": table, "decoder_ff_logit_out_W": np.ascontiguousarray(table.T)}
    save_marian(tmp_path / "two", arrays, options_yaml(before, activation), words)
    (tmp_path / "two" / "vocab.yml").rename(tmp_path / "two" / "vocab.de.yml")
    shutil.copy(tmp_path / "two" / "vocab.de.yml", tmp_path / "two" / "vocab.en.yml")
    (tmp_path / "two" / "model.npz.decoder.yml").write_text("vocabs: [/old/place/vocab.de.yml, vocab.en.yml]\n")
    two = transduce.load(tmp_path / "two" / "model.npz", device="cpu")
    assert two.recipe.model.tie == "none"
    compare(two, source, answer)


def test_int8_binary_equals_its_numbers(tmp_path):
    """A binary of int8 matrices, as Firefox has them, is the model of the numbers that they stand for."""
    library, words = reference_model(False, "swish")
    arrays, settings = arrays_of(library), options_yaml(False, "swish")
    save_marian(tmp_path, arrays, settings, words)
    (tmp_path / "model.npz").unlink()
    content = marian_binary(arrays, settings)
    (tmp_path / "model.ende.intgemm.alphas.bin").write_bytes(content)
    for name, array in arrays.items():
        if "_W" in name or name == "Wemb":
            numbers, multiplier = quantised(array)
            arrays[name] = numbers.astype(np.float32) * np.float32(1 / multiplier)
    save_marian(tmp_path / "fp32", arrays, settings, words)
    weights, expected = (transduce.interop.read(folder).weights for folder in (tmp_path, tmp_path / "fp32"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert transduce.load(tmp_path / "model.ende.intgemm.alphas.bin", device="cpu").generate(["w1 w2"], max_length=4)
    for damaged, problem in (
        (content[:-300], "beyond the file"),
        (content.replace(struct.pack("<Q", 0x404), struct.pack("<Q", 0x1801), 1), "packed for one processor"),
        (content[:900], "damaged"),
    ):
        (tmp_path / "model.ende.intgemm.alphas.bin").write_bytes(damaged)
        refused(tmp_path, problem)


def test_norm_before_a_layer_depends_on_the_version(tmp_path):
    """Before v1.10.28 keys and values of self-attention had no norm; v1.12 decodes other than it trains."""
    library, words = reference_model(True, "relu")
    settings = options_yaml(True, "relu")
    save_marian(tmp_path, arrays_of(library), settings, words)
    with pytest.warns(UserWarning, match="omits the norm of keys and values"):
        transduce.load(tmp_path, device="cpu")
    for version in ("v1.10.27 abc 2021", "v1.9.0", ""):
        save_marian(tmp_path, arrays_of(library), settings.replace("v1.10.28 abc 2021", version), words)
        with pytest.raises(InputError, match="transformer-preprocess: n, trained with Marian"):
            transduce.load(tmp_path, device="cpu")


def test_vocabulary_words_are_text_and_pieces_are_split(tmp_path):
    """YAML knows numbers and truth, a vocabulary only words; pieces of SentencePiece are cut here."""
    arrays = arrays_of(reference_model(False, "relu")[0])
    words = ["</s>", "<unk>", "no", "1", "~", "1.5", "null", '"', ":", "#x", "-", "@@", "é", "<s>", "w", "</s>x"]
    words += [f"more{number}" for number in range(len(arrays["Wemb"]) - len(words))]
    save_marian(tmp_path, arrays, options_yaml(False, "relu"), words)
    tokenizer = transduce.load(tmp_path, device="cpu").source
    text = 'no 1 ~ 1.5 null " : #x - @@ é <s>'
    ids = tokenizer.encode(text).ids
    assert [tokenizer.vocabulary.backend_ids[number] for number in ids] == list(range(2, 14))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("</s> <unk> other").ids == [UNK] * 3  # which is text like any other
    assert tokenizer.decode([UNK, EOS]) == "<unk>"
    (tmp_path / "vocab.yml").unlink()
    pieces = {"▁a": -1.0, "b": -1.5, "▁b": -2.0, **{f"c{number}": -9.0 for number in range(len(arrays["Wemb"]) - 6)}}
    write_sentencepiece(tmp_path / "vocab.spm", pieces)
    model = transduce.load(tmp_path, device="cpu")
    ids = model.source.encode("ab b").ids
    assert [model.source.vocabulary.backend_ids[number] for number in ids] == [3, 4, 5]
    assert model.target.decode([*ids, EOS]) == "ab b"


def refused(path: Path, problem: str, remedy: str = "") -> None:
    with pytest.raises(InputError) as caught:
        transduce.load(path)
    assert problem in caught.value.problem, caught.value
    assert remedy in caught.value.remedy, caught.value


def test_missing_or_unsupported_files_are_refused(tmp_path):
    save_marian(tmp_path, {"Wemb": np.zeros((3, 8), np.float32)}, "type: s2s", ["</s>", "<unk>", "a"])
    refused(tmp_path, "type: 's2s'")
    (tmp_path / "vocab.yml").write_text("</s>: 0\na: 7\n")
    refused(tmp_path, "do not run from 0")
    (tmp_path / "vocab.yml").unlink()
    refused(tmp_path, "the vocabulary is missing")
    np.savez(tmp_path / "model.npz", Wemb=np.zeros(3))
    refused(tmp_path, "no special:model.yml")
