"""Parsers of files that may come from anywhere, for fuzzing: how each is called, and valid inputs to begin with.

A parser gets a file. It may return, or raise an error in words (`REFUSALS`); any other exception is a failure. The
seeded fuzzer (`tests/fuzz/test_parsers.py`) damages the valid inputs at random; the coverage-guided one
(`tests/fuzz/coverage_guided.py`) searches for inputs that reach new lines.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.data.annotations import AlignmentError, check_alignment
from transduce.data.readers.corpus import read_corpus
from transduce.data.readers.folders import read_idx
from transduce.data.readers.word_vectors import read_word_vectors
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import to_json, train
from transduce.errors import InputError
from transduce.explain.interventions import parse_interventions
from transduce.flow import Example
from transduce.inference.documents import read_document
from transduce.inference.shortlist import Shortlist
from transduce.inference.terminology import ConstrainedLine, Glossary
from transduce.interop import bundle
from transduce.interop.ctranslate2.model_file import read_variables
from transduce.interop.huggingface.folder import _header, read_tensor
from transduce.interop.huggingface.sentencepiece import read_model, to_tokenizer
from transduce.interop.legacy.unpack import _write_content
from transduce.parsing import parse_json, read_yaml
from transduce.recipe import Corpus, load, parse
from transduce.recipe.recipe import override

REFUSALS = (InputError, AlignmentError)


@dataclass(frozen=True)
class ParserTarget:
    """A parser, and valid inputs of it."""

    subject: str
    suffix: str  # of the file
    parse: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _corpus(**options: Any) -> Callable[[Path], object]:
    """Reads all pairs, and checks their form."""

    def read(path: Path) -> None:
        for one in read_corpus(Corpus(path=str(path), **options)):
            assert isinstance(one, Example)
            assert isinstance(one.target, str)
            one.source.encode()  # no lone surrogates, which could not be written again
            one.target.encode()

    return read


def _document(path: Path) -> None:
    """Splits a document; the sentences of a part are all of its text."""
    found = read_document(path)
    for segment, sentences in zip((one for one in found.segments if one.translate), found.sentences, strict=True):
        assert segment.markup or "".join(sentences).split() == segment.text.split()


def _decoded(function: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: function(path.read_bytes().decode("utf-8", "replace"))


def _recipe(path: Path) -> None:
    parse(load(path).model_dump(mode="json"))


def _overrides(path: Path) -> None:
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    parse(override({}, lines))


def _alignment(path: Path) -> None:
    check_alignment(path.read_bytes().decode("utf-8", "replace"), "a b c", "x y z")


def _weights(path: Path) -> None:
    for stored in _header(path).values():
        assert read_tensor(stored).shape == stored.shape


def _sentencepiece(path: Path) -> None:
    model = read_model(path.parent, path.name)
    to_tokenizer(model, {piece: number for number, (piece, _, _) in enumerate(model.pieces)}, ())


def _legacy(path: Path) -> None:
    """The work of the process that reads a pickled checkpoint: it answers with JSON, and writes whole weights."""
    weights = path.with_name("model.safetensors")
    weights.unlink(missing_ok=True)
    _write_content(path, path.parent)
    answer = json.loads(path.with_name("content.json").read_bytes())
    if "refused" in answer:
        raise InputError(answer["refused"])
    for stored in _header(weights).values():
        assert stored.shape is not None


def _bundle(path: Path) -> None:
    folder = path.with_name("unpacked")
    try:
        bundle.unpack(path, folder)
    finally:
        for file in sorted(folder.rglob("*"), reverse=True) if folder.exists() else ():
            file.rmdir() if file.is_dir() else file.unlink()
        if folder.exists():
            folder.rmdir()


def _safetensors() -> list[bytes]:
    from safetensors.torch import save

    return [save({"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(3, dtype=torch.float16)})]


def _shortlists() -> list[bytes]:
    from safetensors.torch import save

    tensors = {"likeliest": torch.zeros(8, 2, dtype=torch.int32), "always": torch.arange(6, dtype=torch.int32)}
    return [save(tensors, {"format": "transduce shortlist 1", "size": "8", "source": "a", "target": "b"})]


def _varint_field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def _sentencepieces() -> list[bytes]:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁a", -1.0, 1), ("b", -2.5, 1)]
    made = b""
    for piece, score, kind in pieces:
        inner = _varint_field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        made += _varint_field(1, inner)
    return [made + _varint_field(2, b"\x18\x01"), made + _varint_field(3, _varint_field(2, b"\0\0\0\0"))]


def _model_bins() -> list[bytes]:
    """Version 6 of the format of CTranslate2: a string has its length and a NUL, a tensor its shape, type and bytes."""

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    body = struct.pack("<I", 6) + string("TransformerSpec") + struct.pack("<II", 7, 2)
    for name in ("encoder/layer_0/weight", "decoder/embeddings/weight"):
        body += string(name) + struct.pack("<BIIBI", 2, 2, 3, 0, 24) + np.ones(6, "<f4").tobytes()
    return [body + struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")]


def _zip(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _checkpoints() -> list[bytes]:
    """Checkpoints of PyTorch, old and new, an archive of numpy, and a Marian binary."""
    content = {"model": OrderedDict(weight=torch.ones(2, 3)), "args": {"arch": "transformer", "layers": [1, 2]}}
    found = []
    for new in (True, False):
        stream = io.BytesIO()
        torch.save(content, stream, _use_new_zipfile_serialization=new)
        found.append(stream.getvalue())
    stream = io.BytesIO()
    np.savez(stream, **{"encoder_Wemb": np.ones((2, 3), np.float32), "special:model.yml": np.frombuffer(b"a: 1", "i1")})
    name, numbers = b"decoder_Wemb\0\0\0\0", np.ones(6, "<f4").tobytes()
    marian = struct.pack("<QQ", 1, 1) + struct.pack("<4Q", len(name), 0x404, 2, 24) + name + struct.pack("<2i", 2, 3)
    found += [stream.getvalue(), marian + struct.pack("<Q", 0) + numbers]
    return [*found, _zip({"archive/data.pkl": pickle.dumps(content["args"]), "archive/version": b"3\n"})]


def _tokenizers() -> list[bytes]:
    texts = ["a b c", "b c d", "the house"]
    return [to_json(train(texts, kind, 40)).encode() for kind in ("words", "chars", "bpe")]


def _idx() -> list[bytes]:
    return [b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + bytes(8), b"\0\0\x0d\x01" + struct.pack(">I", 1) + bytes(4)]


RECIPE = """\
data: {train: pairs.tsv, columns: [1, 2]}
tokens: {source: {kind: bpe, size: 100}}
model:
  encoder: &part {kind: transformer, layers: 2, width: 64, heads: 4}
  decoder: *part
training: {steps: 100, optimiser: {kind: adamw, learning_rate: 0.001}}
"""
TMX = """<?xml version="1.0"?><tmx version="1.4"><body><tu><tuv xml:lang="en-US"><seg>a <b>house</b></seg></tuv>\
<tuv xml:lang="de"><seg>ein &amp; Haus</seg></tuv></tu></body></tmx>"""
WMT = """<dataset><doc id="1"><src lang="en"><p><seg id="1">a house</seg></p></src><ref lang="de" translator="A">\
<p><seg id="1">ein Haus</seg></p></ref></doc></dataset>"""
PO = """msgid ""\nmsgstr "Language: de\\n"\n\n#, c-format\nmsgctxt "menu"
msgid "a \\"house\\""\nmsgstr "ein "\n"Haus"\n
#, fuzzy\nmsgid "b"\nmsgid_plural "bs"\nmsgstr[0] "c"\nmsgstr[1] "d"\n"""
SRT = "1\n00:00:01,000 --> 00:00:02,500\nHello <i>there</i>\nagain\n\n2\n00:00:03,000 --> 00:00:04,000\n- Yes.\n"
VTT = "WEBVTT - title\n\nNOTE a note\n\nid\n00:01.000 --> 00:02.000 align:start\n<v Ann>Hello\n"
HTML = "<!DOCTYPE html><html><head><title>A &amp; B</title><script>x < y</script></head><body><p>One <b>two</b>.</p>"

TARGETS = {
    "YAML": ParserTarget("YAML documents", ".yaml", read_yaml, _texts(RECIPE, "- 1\n- !!x 2\n- |\n  text\n")),
    "JSON": ParserTarget(
        "JSON documents",
        ".json",
        lambda path: parse_json(path.read_bytes(), "file"),
        _texts('{"a": [1, 2.5, "x"], "b": null}'),
    ),
    "recipe": ParserTarget("recipes", ".yaml", _recipe, _texts(RECIPE)),
    "overrides": ParserTarget(
        "overrides of recipes",
        ".txt",
        _overrides,
        _texts("training.steps=5\nmodel.encoder={kind: recurrent, width: 8}"),
    ),
    "TSV": ParserTarget("TSV corpora", ".tsv", _corpus(), _texts("a b\tx y\nc\tz\n", "source\ttarget\na\tb\n")),
    "CSV": ParserTarget("CSV corpora", ".csv", _corpus(), _texts('source,target\n"a, ""b""",x\n', "a;b\nc;d\n")),
    "JSONL": ParserTarget(
        "JSONL corpora",
        ".jsonl",
        _corpus(columns=("translation.en", "translation.de")),
        _texts('{"translation": {"en": "a", "de": "b"}}\n{"translation": {"en": "c", "de": "d"}}\n'),
    ),
    "JSON table": ParserTarget(
        "JSON corpora", ".json", _corpus(columns=("a", "b")), _texts('[{"a": "x", "b": "y"}, {"a": "1", "b": "2"}]')
    ),
    "TMX": ParserTarget("translation memories", ".tmx", _corpus(columns=("en", "de")), _texts(TMX)),
    "WMT": ParserTarget("WMT test sets", ".xml", _corpus(columns=("en", "de")), _texts(WMT)),
    "PO": ParserTarget("PO catalogues", ".po", _corpus(columns=("msgid", "msgstr")), _texts(PO)),
    "IDX": ParserTarget("IDX arrays", ".idx", lambda path: read_idx(str(path)), _idx),
    "SRT": ParserTarget("SRT subtitles", ".srt", _document, _texts(SRT)),
    "WebVTT": ParserTarget("WebVTT subtitles", ".vtt", _document, _texts(VTT)),
    "HTML": ParserTarget("HTML pages", ".html", _document, _texts(HTML)),
    "word vectors": ParserTarget(
        "word vectors", ".vec", read_word_vectors, _texts("2 3\nhouse 0.1 -2 3e-4\ntree 1 2 3\n", "a 1 2\nb 3 4\n")
    ),
    "alignment": ParserTarget("word alignments", ".txt", _alignment, _texts("0-0 1-2 2-1")),
    "glossary": ParserTarget(
        "glossaries",
        ".tsv",
        lambda path: Glossary.load(path).constraints("a house, two houses"),
        _texts("# terms\nhouse\tHaus\tHeim\na (b)\tc\n"),
    ),
    "constrained line": ParserTarget(
        "JSON lines with constraints",
        ".json",
        _decoded(lambda text: ConstrainedLine.parse(text, "line")),
        _texts('{"text": "a", "constraints": ["b", ["c", "d"]], "avoid": ["e"], "prefix": "f"}'),
    ),
    "interventions": ParserTarget(
        "interventions",
        ".txt",
        _decoded(lambda text: parse_interventions(text.split("\n"))),
        _texts("mask-head:cross:1.3"),
    ),
    "tokenizer": ParserTarget("tokenizers", ".json", Tokenizer.load, _tokenizers),
    "SentencePiece": ParserTarget("SentencePiece models", ".model", _sentencepiece, _sentencepieces),
    "safetensors": ParserTarget("safetensors files", ".safetensors", _weights, _safetensors),
    "shortlist": ParserTarget("shortlists", ".safetensors", Shortlist.load, _shortlists),
    "CTranslate2": ParserTarget("model.bin of CTranslate2", ".bin", read_variables, _model_bins),
    "checkpoint": ParserTarget("pickled, numpy and Marian checkpoints", ".pt", _legacy, _checkpoints),
    "bundle": ParserTarget(
        "bundles", ".transduce", _bundle, lambda: [_zip({"recipe.yaml": b"", "manifest.json": b"{}"})]
    ),
}
