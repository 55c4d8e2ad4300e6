"""Damaged and odd Hugging Face folders: an InputError, or a model that generates."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fuzzing import ODD_VALUES, Outcome, fuzz, mutate_bytes, mutate_tree
from huggingface_fixtures import make, make_encoder, make_vit, write_modules
from vision_decoder_fixtures import make_vision_decoder
from whisper_fixtures import make_whisper

import transduce

SEARCH = {
    "num_beams": 2, "forced_bos_token_id": 3, "suppress_tokens": [4], "bad_words_ids": [[5]], "max_length": 12,
    "begin_suppress_tokens": [6], "no_repeat_ngram_size": 3, "repetition_penalty": 1.1, "length_penalty": 0.9,
    "min_length": 2, "early_stopping": True, "forced_eos_token_id": 2,
}  # fmt: skip
LABELS = {"id2label": {0: "A", 1: "B", 2: "C"}}
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "max_new_tokens": 6}


def _sentences(folder: Path) -> None:
    make_encoder("bert", folder)
    write_modules(folder, {"pooling_mode": "mean", "word_embedding_dimension": 16}, max_seq_length=20)


def _languages(family: str, folder: Path) -> None:
    make(family, folder)
    codes = {"forced_bos_token_id": 23, "lang_to_id": {"eng": 22}}
    (folder / "generation_config.json").write_text(json.dumps(codes))


MAKERS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(make, name) for name in ("marian", "bart", "mbart", "pegasus", "t5", "gpt2")},
    "m2m": partial(_languages, "m2m"),
    **{
        f"{kind} {shape}": partial(make_encoder, kind, shape=shape, **changes)
        for kind in ("bert", "roberta", "distilbert")
        for shape, changes in (
            ("Model", {}),
            ("ForMaskedLM", {}),
            ("ForSequenceClassification", LABELS),
            ("ForTokenClassification", LABELS),
        )
    },
    "sentences": _sentences,
    "vit": make_vit,
    "deit": partial(make_vit, kind="deit"),
    "whisper": make_whisper,
    **{f"vit {kind}": partial(make_vision_decoder, decoder_type=kind) for kind in ("trocr", "gpt2", "bert")},
}
TEXTS = ("w1 w2 w3", "w9")


def _write_search(folder: Path, options: dict[str, Any]) -> None:
    """Search options, in which mutations then find every option that is read."""
    path = folder / "generation_config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **{name: value for name, value in options.items() if name not in content}}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("folder") for name in MAKERS}
    for number, (name, maker) in enumerate(MAKERS.items()):
        maker(found[name])
        if json.loads((found[name] / "config.json").read_text())["architectures"][0].endswith("Generation"):
            _write_search(found[name], SAMPLING if number % 4 == 3 else SEARCH)
    return found


def _mutated(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.1:
        return mutate_bytes(draw, content)
    tree = json.loads(content)
    if isinstance(tree, dict) and draw.random() < 0.3:  # one of the keys at the top, however large the rest is
        return json.dumps({**tree, draw.choice(list(tree)): draw.choice(ODD_VALUES)}).encode()
    return json.dumps(mutate_tree(draw, tree)).encode()


def _use(folder: Path) -> None:
    model = transduce.load(folder, device="cpu")
    if model.recipe.data.sources:
        return
    if model.recipe.model.decoder is not None:
        model.generate(TEXTS, max_length=5)
    elif (model.recipe.model.head or {}).get("kind") == "embedder":
        model.embed(TEXTS)
    else:
        model.generate(TEXTS)


def test_folders_without_damage_are_read(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        _use(folder)


def test_damaged_configs(folders: dict[str, Path]) -> None:
    def attempt(draw: random.Random) -> Outcome:
        folder = folders[draw.choice(list(folders))]
        files = sorted(folder.rglob("*.json"))
        path = draw.choice([*files, *[folder / "config.json"] * len(files)])
        original = path.read_bytes()
        try:
            path.write_bytes(_mutated(draw, original))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _use(folder)
        finally:
            path.write_bytes(original)
        return "accepted"

    fuzz("configs", "config, generation, preprocessor and tokenizer files of Hugging Face folders", attempt, cases=120)
