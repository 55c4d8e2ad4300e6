"""Tokenizers of the tokenizers library: those that grow a text without bound or panic are errors in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, MAX_GROWTH, Vocabulary, open_backend
from transduce.errors import InputError
from transduce.flow import SPECIALS


def library(**parts: Any) -> str:
    backend = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend.to_str()


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GROWING = {
    "a normaliser that doubles": {"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)},
    "a regular expression that doubles": {
        "normalizer": normalizers.Sequence([normalizers.Replace(Regex("a"), "aa")] * 40)
    },
    "an assertion that doubles": {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("(?=a)"), "a")] * 40)},
    "an empty match": {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("x*"), "a")] * 40)},
    "an empty pattern": {"normalizer": normalizers.Sequence([normalizers.Replace("", "b")] * 40)},
    "a long prefix": {"normalizer": normalizers.Prepend("a" * 100_000)},
    "bytes of bytes": {"pre_tokenizer": pre_tokenizers.Sequence([BYTES] * 40)},
    "bytes of bytes in a normaliser": {"normalizer": normalizers.Sequence([normalizers.ByteLevel()] * 40)},
    "a decoder that doubles": {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)},
    "a suffix of no letters": {"decoder": decoders.Sequence([decoders.BPEDecoder(suffix="")] * 40)},
    "a delimiter of no letters": {"decoder": decoders.Sequence([decoders.CTC("<pad>", "", True)] * 40)},
    "a template of copies": {
        "post_processor": processors.TemplateProcessing(single=" ".join(["$A"] * (MAX_GROWTH + 1)), special_tokens=[])
    },
}


@pytest.mark.parametrize("name", list(GROWING))
def test_growth_is_refused_before_a_text_is_read(name: str) -> None:
    with pytest.raises(ValueError, match="times as long"):
        open_backend(library(**GROWING[name]))


UMLAUTS = {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"}
ORDINARY = {
    "T5": {
        "normalizer": normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), "▁")]),
        "pre_tokenizer": pre_tokenizers.Metaspace(),
        "decoder": decoders.Metaspace(),
    },
    "Llama": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    },
    "GPT-2": {"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()},
    "BERT": {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()},
    "umlauts": {
        "normalizer": normalizers.Sequence(
            [
                normalizers.Replace(one, two)
                for one, two in zip("äöüßÄÖÜ", ["ae", "oe", "ue", "ss", "Ae", "Oe", "Ue"], strict=True)
            ]
        )
    },
    "many replacements": {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("[«»]"), '"')] * 60)},
}


@pytest.mark.parametrize("name", list(ORDINARY))
def test_ordinary_tokenizers_are_read(name: str) -> None:
    assert open_backend(library(**ORDINARY[name])).encode("a b").ids


def test_damaged_tokenizers_are_refused() -> None:
    content, strip = json.loads(library()), {"type": "Strip", "strip_left": True, "strip_right": True}
    for change in (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}},  # a table of 4 GB
        {"normalizer": {"type": "Sequence", "normalizers": [strip] * 101}},
        {"model": {"type": "WordLevel", "vocab": {"a" * 5000: 0, "<unk>": 1}, "unk_token": "<unk>"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 10**9, "<unk>": 1}, "unk_token": "<unk>"}},
        {"model": None},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            open_backend(json.dumps({**content, **change}))


def test_a_panic_of_the_library_is_an_input_error() -> None:
    """The expression tries every way to split the letters: the library gives up, and panics."""
    slow = library(
        pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+$"), "isolated"),
        decoder=decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(a+)+$"), "b")]),
    )
    tokenizer = Tokenizer(Vocabulary(GIVEN, (*SPECIALS, "a"), backend_json=slow, backend_ids=(-1, -1, -1, 1, 0)))
    assert tokenizer.encode_batch(["a"]) == [[4]]
    for call in (
        lambda: tokenizer.encode("a" * 40 + "b"),
        lambda: tokenizer.encode_batch(["a" * 40 + "b"]),
        lambda: tokenizer.decode([4] * 40 + [3]),
    ):
        with pytest.raises(InputError, match="takes too long"):
            call()
