"""Whisper folders of CTranslate2, compared with the library; its converter writes them from random models."""

from __future__ import annotations

import json

import pytest
import torch
from whisper_fixtures import END, PIECES, PROMPT, START, make_whisper, write_recordings

import transduce
from transduce import interop
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.interop import Languages

library = pytest.importorskip("ctranslate2")
NEW = 20  # tokens of an output: the library takes half of max_length
FILES = ["tokenizer.json", "preprocessor_config.json"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    make_whisper(folder / "given")
    converter = library.converters.TransformersConverter(str(folder / "given"), copy_files=FILES)
    for kind in ("float32", "int8"):
        converter.convert(str(folder / kind), quantization=kind)
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def model(given):
    interop.convert(given / "float32", given / "run", Languages("de"))
    return transduce.load(given / "run", device="cpu")


def features(model, recordings):
    """B F S, as the library reads them; they are compared with those of transformers in test_whisper.py."""
    source = model.source_encoding.batch(model.source_encoding.encode(recordings)).source
    return source.values.transpose(1, 2).contiguous()


def transcribe(folder, values, **options):
    whisper = library.models.Whisper(str(folder), compute_type="float32", intra_threads=1)
    prompts = [[PIECES[START], *PROMPT]] * len(values)
    return whisper.generate(library.StorageView.from_array(values.numpy()), prompts, max_length=2 * NEW, **options)


@pytest.mark.parametrize("beam", [1, 5])
def test_scores_equal_the_library(given, model, recordings, beam):
    """The log-probability of what follows the prompt, divided by its length without </s>.

    Suppressed tokens take no part in the softmax of the library.
    """
    values = features(model, recordings)
    native = {number: place for place, number in enumerate(model.target.vocabulary.backend_ids)}
    suppressed = [native[number] for number in json.loads((given / "float32/config.json").read_text())["suppress_ids"]]
    for row, one in zip(values, transcribe(given / "float32", values, beam_size=beam, return_scores=True), strict=True):
        output = one.sequences[0]
        ids = [native[PIECES.index(name)] for name in (*PROMPT, *output, *[PIECES[END]][: NEW - len(output)])]
        batch = Batch(Padded(row.T[None], torch.ones(1, row.size(1), dtype=torch.bool)))
        with torch.no_grad():
            logits = model.network.advance(torch.tensor([[1, *ids[:-1]]]), model.network.start(batch)).logits[0]
        logits[:, suppressed] = -torch.inf
        logits[len(PROMPT), list(model.recipe.generation.suppress_first)] = -torch.inf
        found = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[len(PROMPT) :]
        assert float(found.sum()) / len(output) == pytest.approx(one.scores[0], abs=1e-5)


def test_greedy_outputs_and_default_search_equal_the_library(given, model, recordings):
    expected = transcribe(given / "float32", features(model, recordings), beam_size=1)
    found = model.generate(recordings, strategy="greedy", max_length=len(PROMPT) + NEW)
    assert [[*PROMPT, *one.sequences[0]] for one in expected] == [
        [piece for piece in one.tokens if piece != "</s>"] for one in found
    ]
    assert len({one.text for one in found}) > 1
    search = model.recipe.generation
    assert (search.strategy_kind, search.beam, search.stop) == ("huggingface_beam", 5, "full")


def test_beams_equal_the_library(given, model, recordings):
    """Without suppressed tokens, which their softmax leaves out."""
    nothing = {"suppress_tokens": [START], "suppress_blank": False}
    expected = transcribe(given / "float32", features(model, recordings), **nothing)
    found = model.generate(recordings, max_length=len(PROMPT) + NEW, suppress=[], suppress_first=[])
    assert [[*PROMPT, *one.sequences[0]] for one in expected] == [
        [piece for piece in one.tokens if piece != "</s>"] for one in found
    ]


def test_languages_are_found_between_the_start_token_and_the_tasks(given, recordings):
    """This converter lists none. The library itself detects languages in vocabularies of the published size alone."""
    config = json.loads((given / "float32/config.json").read_text())
    assert config["lang_ids"] == []
    model = transduce.load(given / "float32", device="cpu")
    names = ["<|en|>", "<|de|>"]
    assert [model.target.vocabulary.pieces[one] for one in model.recipe.generation.detected_first] == names
    assert {one.tokens[0] for one in model.generate(recordings)} <= set(names)
    with pytest.raises(InputError, match="language"):
        interop.read(given / "float32", Languages("fr"))


def test_older_folder_equals_the_newer_one(given, model, tmp_path):
    """vocabulary.txt instead of JSON, and no lists in config.json."""
    for name in ("model.bin", *FILES):
        (tmp_path / name).write_bytes((given / "float32" / name).read_bytes())
    pieces = json.loads((given / "float32/vocabulary.json").read_text())
    (tmp_path / "vocabulary.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    found = interop.read(tmp_path, Languages("de"))
    assert found.recipe.generation.suppress == ()
    assert found.recipe.model == model.recipe.model
    assert found.tokenizers[1].fingerprint == model.target.fingerprint
    assert all(torch.equal(tensor, found.weights[name]) for name, tensor in model.network.state_dict().items())


def test_weights_in_int8_become_fp32(given, model):
    interop.convert(given / "int8", given / "run-int8", Languages("de"))
    other = transduce.load(given / "run-int8", device="cpu").network.state_dict()
    for key, tensor in model.network.state_dict().items():
        assert (other[key] - tensor).abs().max() <= 2e-2 * tensor.abs().max().clamp(min=1e-3), key


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("model.bin", lambda data: data[:3000], "ends before"),
        ("model.bin", lambda data: data.replace(b"encoder/conv1/weight\0", b"encoder/conv1/weighd\0"), "is missing"),
        ("model.bin", lambda data: data.replace(b"encoder/conv2/weight\0", b"encoder/conv2/weighd\0"), "conv2"),
        ("vocabulary.json", lambda data: data.replace(b'"w3",', b""), "the vocabulary has"),
        ("vocabulary.json", lambda data: data.replace(b"startoftranscript", b"start"), "startoftranscript"),
        ("config.json", lambda data: data.replace(b"25", b"2500"), "suppress_ids"),
    ],
)
def test_damaged_folder_is_refused(given, tmp_path, file, change, problem):
    for path in (given / "float32").iterdir():
        (tmp_path / path.name).write_bytes(change(path.read_bytes()) if path.name == file else path.read_bytes())
    with pytest.raises(InputError, match=problem):
        interop.read(tmp_path)
