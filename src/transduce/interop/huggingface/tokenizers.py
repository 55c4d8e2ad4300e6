"""Tokenizers of Hugging Face folders: import, and export of tokenizers trained here.

Four special ids are fixed here: <pad>, <s>, </s> and <unk> are 0 to 3. The rows of an imported vocabulary are put in
that order once, on import. The token that outputs start with becomes <s>. Where it is another special token too (Marian
starts with <pad>, BART with </s>), <s> is a copy of that row, and is never output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.tokenizers import vocabulary as vocabularies
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary, open_backend, run_library
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.folder import inside, read_json, read_text
from transduce.interop.huggingface.languages import Languages, read_codes
from transduce.interop.huggingface.sentencepiece import LANGUAGE_CODE, NORMAL, UNREACHABLE, USER, read_model
from transduce.interop.huggingface.sentencepiece import to_tokenizer as sentencepiece_tokenizer
from transduce.interop.huggingface.tokenizer_files import ForeignTokenizer, read_characters, read_tokenizer_files
from transduce.interop.huggingface.weights import CTC_OUTPUT, MISSING, ExportRows, ImportRows
from transduce.storage import write_file

TOKENIZER, VOCABULARY, MODELS = "tokenizer.json", "vocab.json", ("source.spm", "target.spm")
CONFIG = "tokenizer_config.json"
MULTILINGUAL_MODEL = "sentencepiece.bpe.model"
MASKS = ("[MASK]", "<mask>")
START = "<start>"  # name of an exported start token that was a copy of another token before training
TOKEN_KEYS = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}


@dataclass(frozen=True)
class SpecialIds:
    """Foreign ids of the special tokens; None: there is no such token."""

    pad: int | None
    start: int | None  # of an output
    end: int | None
    unknown: int | None = None


@dataclass(frozen=True)
class TextFormat:
    """How a model reads texts, beyond what its tokenizer says."""

    source_eos: bool = True  # its tokenizer must end a text with </s>
    masked_lm: bool = False  # <unk> stands for the mask token
    lowercase: bool = False
    word_labels: bool = False  # the model labels the words of a text
    start_is_output: bool = False  # <s> is a copy of the start token, which stays a piece
    languages: Languages | None = None  # each side begins with the code of its language
    codes_required: bool = False  # whatever the template of the tokenizer says
    codes_after_source: bool = False  # the code may follow the </s> of a source, and start a target
    target_only: bool = False  # sources are no text
    start_replaces_first: bool = False  # the start token takes the place of the first token of the template
    prompt: Sequence[int] | None = None  # foreign ids that begin every output
    hidden_tokens: re.Pattern[str] | None = None  # special tokens that the tokenizer does not mark as special


def read_tokenizers(
    folder: Path, specials: SpecialIds, size: int, text_format: TextFormat, source_size: int | None = None
) -> tuple[tuple[Tokenizer, Tokenizer], ImportRows]:
    """Source and target tokenizer, and the order of the vocabulary rows.

    `source_size`: of the vocabulary of sources, where each side has its own; their special tokens have the same ids.
    """
    foreign = _open(folder, specials, text_format.hidden_tokens)
    first = foreign[0]
    end = specials.end if specials.end is not None else (first.template[-1] if first.template else None)
    if end is None:
        raise InputError("no token ends a text", where=str(folder), remedy="config.json has no eos_token_id: fetch it")
    prefixes, suffix = (list[int](), list[int]()), list[int]()
    if text_format.codes_after_source and first.template[:-1] == [end]:
        own = None if specials.start in (end, specials.pad) else specials.start
        languages = text_format.languages or Languages()
        code, start = languages.suffix(first.special, first.template[-1], own, str(folder))
        specials, suffix = replace(specials, start=start), [end, code]
    else:
        prefixes = _prefixes(folder, first, end, text_format)
    if text_format.start_replaces_first or (text_format.target_only and prefixes[1][:1] == [specials.start]):
        prefixes = [], prefixes[1][1:]
    start = specials.start if specials.start is not None else (prefixes[0][0] if prefixes[0] else end)
    # A byte-level vocabulary has no unknown token, and names any of the others.
    unknown = None if first.unknown in (start, end, specials.pad) else first.unknown
    if text_format.masked_lm:  # every token of the text is an output too, the first and the unknown one included
        start, unknown = MISSING, _mask_id(folder, first)
    special = [MISSING if one is None else one for one in (specials.pad, start, end, unknown)]
    taken = {number for number in special if number != start or not text_format.start_is_output}
    sides = []
    for tokenizer, count in ((first, source_size or size), (foreign[-1], size)):
        _check_rows(folder, (*special, *prefixes[0], *prefixes[1], *suffix, *tokenizer.pieces), count)
        sides.append(ImportRows((*special, *(number for number in range(count) if number not in taken)), count))
    rows = sides[1] if source_size is None else replace(sides[1], source=sides[0])
    texts = [_library_json(one.backend, text_format) for one in foreign]
    source = _native(foreign[0], texts[0], sides[0], prefixes[0], suffix)
    target = _native(foreign[-1], texts[-1], rows, prefixes[1], [])
    return (source, target), rows


def _check_rows(folder: Path, numbers: Sequence[int], size: int) -> None:
    for number in numbers:
        if not MISSING <= number < size:
            raise InputError(
                f"token {number} has no row: the vocabulary size is {size}", where=str(folder), remedy="fetch it again"
            )


def read_ctc_tokenizer(folder: Path, blank: int, size: int) -> tuple[Tokenizer, ImportRows]:
    """The tokenizer of a CTC model, whose blank becomes <pad>; paths have neither <s> nor </s>, which are pieces."""
    foreign = read_characters(folder)
    pieces = {number: piece for number, piece in foreign.pieces.items() if number < size}
    unknown = MISSING if foreign.unknown not in pieces or foreign.unknown == blank else int(foreign.unknown or 0)
    special = (blank, MISSING, MISSING, unknown)
    rows = ImportRows((*special, *(number for number in range(size) if number not in special)), size, CTC_OUTPUT)
    return _native(replace(foreign, pieces=pieces), str(foreign.backend.to_str()), rows, [], []), rows


def _prefixes(
    folder: Path, tokenizer: ForeignTokenizer, end: int, text_format: TextFormat
) -> tuple[list[int], list[int]]:
    """Ids before every source and every target."""
    template, languages = tokenizer.template, text_format.languages
    if text_format.prompt is not None:
        return [], list(text_format.prompt)
    if text_format.target_only:
        return [], template[:-1] if template[-1:] == [end] else []
    if languages is not None and text_format.codes_required:
        return languages.prefixes(tokenizer.special, template, str(folder))
    if text_format.source_eos and (not template or template[-1] != end):
        raise InputError(
            "the tokenizer does not end a text with </s>, as the model requires",
            where=str(folder / TOKENIZER),
            remedy="save it with a post-processor that appends </s>",
        )
    if languages is not None:
        return languages.prefixes(tokenizer.special, template, str(folder))
    prefix = template[:-1] if text_format.source_eos else []
    return prefix, prefix


def _mask_id(folder: Path, tokenizer: ForeignTokenizer) -> int:
    named = _token_text(read_json(folder, CONFIG).get("mask_token"))
    for number, piece in tokenizer.pieces.items():
        if piece == named or (named is None and piece in MASKS):
            return number
    raise InputError("there is no mask token", where=str(folder), remedy="fetch tokenizer_config.json again")


def _token_text(named: Any) -> Any:
    """A token in tokenizer_config.json is a text, or an object with options."""
    return named.get("content") if isinstance(named, dict) else named


def _native(
    tokenizer: ForeignTokenizer, text: str, rows: ImportRows, prefix: list[int], suffix: list[int]
) -> Tokenizer:
    lead, tail = (tuple(map(rows.native_id, part)) for part in (prefix, suffix))
    pieces = [tokenizer.pieces.get(number, f"<unused {number}>") for number in rows.rows[len(SPECIALS) :]]
    ids = tuple(tokenizer.ids.get(number, MISSING) for number in rows.rows)
    return Tokenizer(
        Vocabulary(GIVEN, (*SPECIALS, *pieces), backend_json=text, backend_ids=ids, prefix=lead, suffix=tail)
    )


def _library_json(backend: Any, text_format: TextFormat) -> str:
    """The tokenizer of the library, changed where the model reads texts otherwise."""
    from tokenizers import Regex, normalizers

    text: str = backend.to_str()
    steps: list[Any] = [normalizers.Lowercase()] if text_format.lowercase else []
    if text_format.word_labels:  # every word begins with the piece of one space
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        text = text.replace('"add_prefix_space":false', '"add_prefix_space":true')
    if not steps:
        return text
    changed = open_backend(text)
    own = [] if changed.normalizer is None else [changed.normalizer]
    changed.normalizer = normalizers.Sequence([*steps, *own])
    return str(changed.to_str())


def _open(folder: Path, specials: SpecialIds, hidden_tokens: re.Pattern[str] | None) -> list[ForeignTokenizer]:
    """One tokenizer for both sides, or one for each."""
    if read_json(folder, TOKENIZER):
        return [_open_fast(folder, hidden_tokens)]
    vocabulary = read_json(folder, VOCABULARY)
    files = [name for name in (*MODELS, MULTILINGUAL_MODEL) if inside(folder, name).is_file()]
    if not files or not vocabulary:
        if found := read_tokenizer_files(folder, _model_type(folder)):
            return found
        raise InputError(
            f"there is no {TOKENIZER}, and no other file of a tokenizer",
            where=str(folder),
            remedy=f"fetch one of {TOKENIZER}, spiece.model, sentencepiece.bpe.model, vocab.txt, or vocab.json and "
            "merges.txt",
        )
    if not all(isinstance(number, int) and number >= 0 for number in vocabulary.values()):
        raise InputError("expected pieces with their ids", where=str(folder / VOCABULARY), remedy="fetch it again")
    names = [MULTILINGUAL_MODEL] if files == [MULTILINGUAL_MODEL] else MODELS
    return [_open_sentencepiece(folder, name, vocabulary, specials) for name in names]


def _model_type(folder: Path) -> str:
    """Of the decoder, where config.json has a section for it."""
    content = read_json(folder, "config.json")
    decoder = content.get("decoder")
    return str((decoder if isinstance(decoder, dict) else content).get("model_type"))


def _open_sentencepiece(folder: Path, name: str, vocabulary: dict[str, int], specials: SpecialIds) -> ForeignTokenizer:
    model = read_model(folder, name)
    spelt = {piece for piece, _, kind in model.pieces if kind in (NORMAL, USER)}
    codes = {
        piece: number for piece, number in vocabulary.items() if LANGUAGE_CODE.fullmatch(piece) and piece not in spelt
    }
    codes |= read_codes(folder, len(vocabulary)) if name == MULTILINGUAL_MODEL else {}
    every = {**vocabulary, **codes}
    backend, ids = sentencepiece_tokenizer(model, every, codes)
    pieces = {number: piece for piece, number in every.items()}
    template = [] if specials.end is None else [specials.end]
    return ForeignTokenizer(backend, pieces, ids, template, vocabulary.get("<unk>"), codes)


def _open_fast(folder: Path, hidden_tokens: re.Pattern[str] | None) -> ForeignTokenizer:
    try:
        backend = open_backend(read_text(folder, TOKENIZER).decode())
    except ValueError as error:
        raise InputError(f"not a tokenizer: {error}", where=str(folder / TOKENIZER), remedy="fetch it again") from None
    if hidden_tokens is not None:
        added = [one.content for one in backend.get_added_tokens_decoder().values()]
        backend.add_special_tokens([name for name in added if hidden_tokens.fullmatch(name)])
    backend.no_padding()
    backend.no_truncation()
    pieces = {number: piece for piece, number in backend.get_vocab(with_added_tokens=True).items()}
    special = {one.content: number for number, one in backend.get_added_tokens_decoder().items() if one.special}
    same = {number: number for number in pieces}
    template = run_library(backend.encode, "").ids
    return ForeignTokenizer(backend, pieces, same, template, _unknown_id(folder, backend), special)


def _unknown_id(folder: Path, backend: Any) -> int | None:
    model = json.loads(backend.to_str())["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    named = _token_text(read_json(folder, CONFIG).get("unk_token") or model.get("unk_token"))
    number: int | None = backend.token_to_id(named) if isinstance(named, str) else None
    return number


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, rows: ExportRows, *, source_eos: bool, max_length: int, masked_lm: bool = False
) -> None:
    """Writes tokenizer.json and tokenizer_config.json. `masked_lm`: <unk> stands for the mask token."""
    imported = tokenizer.kind == GIVEN
    vocabulary = tokenizer.vocabulary
    backend = _imported_backend(vocabulary, rows) if imported else _trained_backend(vocabulary, folder)
    end = rows.special_id(EOS)
    if source_eos and end is not None and (not imported or backend.post_processor is None):
        from tokenizers import processors

        name = backend.id_to_token(end)
        backend.post_processor = processors.TemplateProcessing(single=f"$A {name}", special_tokens=[(name, end)])
    keys = {"mask_token" if masked_lm and key == "unk_token" else key: native for key, native in TOKEN_KEYS.items()}
    ids = {key: rows.special_id(native) for key, native in keys.items()}
    named = {key: backend.id_to_token(number) for key, number in ids.items() if number is not None}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{key: piece for key, piece in named.items() if piece is not None},
    }
    write_file(folder / TOKENIZER, backend.to_str(pretty=True).encode())
    write_file(folder / CONFIG, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _imported_backend(vocabulary: Vocabulary, rows: ExportRows) -> Any:
    """As it was imported, except that pieces which only the other language can spell decode without their mark."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    backend = _with_specials(Backend.from_str(vocabulary.backend_json), rows)
    if rows.new_start and backend.id_to_token(rows.foreign_id(BOS)) is None:
        backend.add_special_tokens([START])
    spelt = backend.to_str()
    if backend.decoder is not None and (UNREACHABLE in spelt or json.dumps(UNREACHABLE)[1:-1] in spelt):
        backend.decoder = decoders.Sequence([decoders.Replace(UNREACHABLE, ""), backend.decoder])
    return backend


def _with_specials(backend: Any, rows: ExportRows) -> Any:
    """With a name for each special id: a vocabulary of words, as legacy toolkits have it, leaves them out."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(backend.to_str())
    vocabulary = content["model"].get("vocab")
    missing = [native for native in (EOS, PAD, BOS) if _unnamed(backend, rows.special_id(native))]
    if content["model"]["type"] != "WordLevel" or not missing:
        return backend
    unknown, plain = content["model"]["unk_token"], SPECIALS[UNK]
    if plain not in vocabulary:
        vocabulary[plain] = vocabulary.pop(unknown)
        content["model"]["unk_token"] = plain
    for native in missing:
        number, name = rows.foreign_id(native), SPECIALS[native]
        if number not in vocabulary.values():
            while name in vocabulary:  # a word of the texts
                name = f"<{name}>"
            vocabulary[name] = number
            options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": number, "content": name, "special": True, **options})
    return Backend.from_str(json.dumps(content))


def _unnamed(backend: Any, number: int | None) -> bool:
    return number is not None and backend.id_to_token(number) is None


def _trained_backend(vocabulary: Vocabulary, folder: Path) -> Any:
    """With plain names for the special tokens, which no text can spell here, but can in the transformers library."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    if vocabulary.normalisation:
        raise InputError(
            f"the normalisation {', '.join(vocabulary.normalisation)} is undone in the output, which the transformers "
            "library cannot do",
            where=str(folder),
            remedy="use --to bundle or --to onnx, which keep the tokenizers of the run",
        )
    if vocabulary.languages:
        raise InputError(
            "sources have tags of languages, which the transformers library would read as text",
            where=str(folder),
            remedy="use --to bundle or --to onnx, which keep the tokenizers of the run",
        )
    content = json.loads(vocabularies.backend(vocabulary).to_str())
    pieces = content["model"]["vocab"]
    if taken := set(SPECIALS) & set(vocabulary.pieces[len(SPECIALS) :]):
        raise InputError(
            f"{min(taken)} is a word of this vocabulary, and a special token of the transformers library",
            where=str(folder),
            remedy="use --to bundle or --to onnx, which keep the tokenizers of the run",
        )
    if isinstance(pieces, dict):
        by_number = sorted(pieces.items(), key=lambda item: item[1])
        content["model"]["vocab"] = {
            SPECIALS[number] if number < len(SPECIALS) else piece: number for piece, number in by_number
        }
    else:
        for number, name in enumerate(SPECIALS):
            pieces[number][0] = name
    if content["model"].get("unk_token") is not None:
        content["model"]["unk_token"] = SPECIALS[UNK]
    backend = Backend.from_str(json.dumps(content))
    backend.add_special_tokens(list(SPECIALS))
    if vocabulary.kind in ("bpe", "unigram"):
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    elif vocabulary.kind == "bytes":
        backend.decoder = decoders.ByteLevel()
    elif vocabulary.kind == "chars":
        backend.decoder = decoders.Fuse()
    return backend
