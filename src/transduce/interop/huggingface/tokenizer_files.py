"""Our tokenizer in; the two files of it that the transformers library reads out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transduce.data.tokenizers import vocabulary as vocabularies
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.row_order import Order
from transduce.interop.huggingface.sentencepiece import SILENT
from transduce.storage import write_file

START = "<start>"  # what outputs begin with, where that was another token before
NAMES = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, order: Order, *, closes: bool, longest: int, masked: bool = False
) -> None:
    """`closes`: </s> stands behind every text. `masked`: our <unk> stands for what is hidden."""
    given = tokenizer.kind == GIVEN
    backend = _given(tokenizer.vocabulary, order) if given else _own(tokenizer.vocabulary, str(folder))
    end = order.special(EOS)
    if closes and end is not None and (not given or backend.post_processor is None):
        from tokenizers import processors

        name = backend.id_to_token(end)
        backend.post_processor = processors.TemplateProcessing(single=f"$A {name}", special_tokens=[(name, end)])
    names = {"mask_token" if masked and name == "unk_token" else name: ours for name, ours in NAMES.items()}
    numbers = {name: order.special(ours) for name, ours in names.items()}
    named = {name: backend.id_to_token(number) for name, number in numbers.items() if number is not None}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **{name: piece for name, piece in named.items() if piece is not None},
    }
    write_file(folder / "tokenizer.json", backend.to_str(pretty=True).encode())
    write_file(folder / "tokenizer_config.json", (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _given(vocabulary: Vocabulary, order: Order) -> Any:
    """As it came, but that a piece which only the other language's texts can spell is written as it is."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    backend = Backend.from_str(vocabulary.library)
    if order.new_start:
        backend.add_special_tokens([START])
    if SILENT in vocabulary.library or json.dumps(SILENT)[1:-1] in vocabulary.library:
        backend.decoder = decoders.Sequence([decoders.Replace(SILENT, ""), backend.decoder])
    return backend


def _own(vocabulary: Vocabulary, where: str) -> Any:
    """Ours has special tokens that no text can spell; there they have their plain names, and text can."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    content = json.loads(vocabularies.backend(vocabulary).to_str())
    pieces = content["model"]["vocab"]
    if taken := set(SPECIALS) & set(vocabulary.pieces[len(SPECIALS) :]):
        raise InputError(
            f"{min(taken)} is a word of this vocabulary, and a special token of that library",
            where=where,
            remedy="--to bundle and --to onnx keep our tokenizers",
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
