"""Tokenizers of folders without tokenizer.json: SentencePiece, WordPiece, byte-level BPE, bytes.

Such files hold pieces. The class of the tokenizer says which ids they have, and which tokens surround a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.tokenizers.vocabulary import byte_letters
from transduce.errors import InputError
from transduce.interop.huggingface.folder import inside, read_json, read_text
from transduce.interop.huggingface.sentencepiece import UNIGRAM, SentencePiece, read_model
from transduce.interop.huggingface.sentencepiece import to_tokenizer as sentencepiece_tokenizer

CONFIG = "tokenizer_config.json"
SENTENCEPIECE = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "sentencepiece.model")
WORDPIECE, MERGES, VOCABULARY = "vocab.txt", "merges.txt", "vocab.json"
FSMT_FILES = ("vocab-src.json", "vocab-tgt.json")
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # the first pieces of fairseq's vocabularies
PEGASUS_OFFSET = 103
BYTE_EXTRA_IDS, T5_EXTRA_IDS = 125, 100
UNUSED = re.compile(r".*NOTUSED$|<unk_\d+>")  # pieces that no text contains
NUMBER_WITH_COMMA = re.compile(r".*\d,$")
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP "
    "nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
CODES = {"MBart": MBART, "MBart50": MBART50, "PLBart": "__java__ __python__ __en_XX__"}


@dataclass(frozen=True)
class ForeignTokenizer:
    """A tokenizer of the tokenizers library, with the ids that the model gives to its pieces."""

    backend: Any
    pieces: Mapping[int, str]  # by model id
    ids: Mapping[int, int]  # model id -> id of the library
    template: list[int]  # model ids that surround a text
    unknown: int | None  # model id of text without a piece
    special: Mapping[str, int]  # special tokens, language codes included


def read_tokenizer_files(folder: Path, model_type: str) -> list[ForeignTokenizer]:
    """The tokenizer that the files of the folder describe, or one of each side; empty: there are no such files."""
    settings = read_json(folder, CONFIG)
    kind = str(settings.get("tokenizer_class") or CLASSES.get(model_type, "")).removesuffix("Fast")
    kind = kind.removesuffix("Tokenizer") or CLASSES.get(model_type, "")
    present = {name for name in (*SENTENCEPIECE, WORDPIECE, MERGES, VOCABULARY) if inside(folder, name).is_file()}
    if kind == "ByT5":
        return [_bytes(settings)]
    if model := next((name for name in SENTENCEPIECE if name in present), None):
        return [_sentencepiece(folder, model, kind, settings)]
    if WORDPIECE in present:
        return [_wordpiece(folder, settings)]
    if kind == "FSMT" and inside(folder, FSMT_FILES[0]).is_file():
        return _fsmt(folder)
    if {MERGES, VOCABULARY} <= present:
        return [_byte_level(folder, kind, settings)]
    return []


# Of folders whose tokenizer_config.json names no class.
CLASSES = {
    "t5": "T5", "mt5": "T5", "umt5": "T5", "longt5": "T5", "pegasus": "Pegasus", "mbart": "MBart", "plbart": "PLBart",
    "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "albert": "Albert", "deberta-v2": "DebertaV2",
    "gpt2": "GPT2", "gpt_neox": "GPTNeoX", "opt": "OPT", "roberta": "Roberta", "bart": "Bart", "mvp": "Mvp",
    "led": "LED", "blenderbot": "Blenderbot", "fsmt": "FSMT",
}  # fmt: skip


def _bytes(settings: Mapping[str, Any]) -> ForeignTokenizer:
    """ByT5: three special tokens, 256 bytes, and sentinels."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    extra = settings.get("extra_ids")
    extra = extra if isinstance(extra, int) and 0 < extra <= 1000 else BYTE_EXTRA_IDS
    sentinels = [f"<extra_id_{number}>" for number in range(extra)]
    pieces = ["<pad>", "</s>", "<unk>", *byte_letters(), *sentinels]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(numbers, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>", *sentinels])
    return _same_ids(backend, ["</s>"], "<unk>")


def _same_ids(backend: Any, template: list[str], unknown: str) -> ForeignTokenizer:
    """A tokenizer whose ids are those of the model."""
    numbers: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = {one.content: number for number, one in backend.get_added_tokens_decoder().items() if one.special}
    pieces = {number: piece for piece, number in numbers.items()}
    ends = [numbers[piece] for piece in template if piece in numbers]
    return ForeignTokenizer(backend, pieces, {n: n for n in pieces}, ends, numbers.get(unknown), special)


def _sentencepiece(folder: Path, name: str, kind: str, settings: Mapping[str, Any]) -> ForeignTokenizer:
    model = read_model(folder, name)
    if kind not in LAYOUTS:
        raise InputError(
            f"{name} belongs to a tokenizer of the class {kind or '?'}, whose ids are not known",
            where=str(folder),
            remedy=f"known: {', '.join(LAYOUTS)}; or use a folder with tokenizer.json",
        )
    order, template, unknown = LAYOUTS[kind](model, settings)
    vocabulary = {piece: number for number, piece in enumerate(order)}
    own = {text for text, _, _ in model.pieces}
    codes = [piece for piece in order if piece not in own and piece not in FAIRSEQ and not UNUSED.match(piece)]
    backend, ids = sentencepiece_tokenizer(_prepared(model, kind), vocabulary, codes)
    if kind == "Albert":
        _normalise_albert(backend, settings)
    if missing := {*template, unknown} - vocabulary.keys():
        raise InputError(f"it has no {min(missing)}", where=str(folder / name), remedy="fetch it again")
    special = {piece: vocabulary[piece] for piece in codes}
    pieces = dict(enumerate(order))
    return ForeignTokenizer(backend, pieces, ids, [vocabulary[one] for one in template], vocabulary[unknown], special)


def _prepared(model: SentencePiece, kind: str) -> SentencePiece:
    """ALBERT avoids pieces of a number and a comma."""
    if kind != "Albert" or model.kind != UNIGRAM:
        return model
    pieces = [
        (text, score - 100 if NUMBER_WITH_COMMA.match(text) else score, type_) for text, score, type_ in model.pieces
    ]
    return replace(model, pieces=pieces)


def _normalise_albert(backend: Any, settings: Mapping[str, Any]) -> None:
    from tokenizers import normalizers

    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if settings.get("keep_accents") else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [] if settings.get("do_lower_case") is False else [normalizers.Lowercase()]
    backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])


Order = tuple[list[str], list[str], str]  # pieces by id, the tokens around a text, the unknown token


def _own_order(model: SentencePiece) -> list[str]:
    return [text for text, _, _ in model.pieces]


def _t5_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    extra = settings.get("extra_ids")
    extra = extra if isinstance(extra, int) and 0 <= extra <= 10_000 else T5_EXTRA_IDS
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(extra))]
    own = _own_order(model)
    return [*own, *(one for one in sentinels if one not in own)], ["</s>"], "<unk>"


def _fairseq_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    return [*FAIRSEQ, *_own_order(model)[3:], "<mask>"], ["<s>", "</s>"], "<unk>"


def _multilingual_order(kind: str) -> Callable[[SentencePiece, Mapping[str, Any]], Order]:
    """Codes of languages after the pieces; the code of the source surrounds a text together with </s>."""
    codes = CODES[kind].split()

    def order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
        pieces = [*FAIRSEQ, *_own_order(model)[3:], *codes, "<mask>"]
        named = str(settings.get("src_lang") or codes[-1 if kind == "PLBart" else 3])
        code = next((one for one in (named, f"__{named}__") if one in codes), codes[3 % len(codes)])
        return pieces, [code, "</s>"] if kind == "MBart50" else ["</s>", code], "<unk>"

    return order


def _camembert_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    first = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"]
    return [*first, *_own_order(model)[1:], "<mask>"], ["<s>", "</s>"], "<unk>"


def _pegasus_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, PEGASUS_OFFSET))]
    return [*first, *_own_order(model)[2:]], ["</s>"], "<unk>"


def _albert_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    return _own_order(model), ["[CLS]", "[SEP]"], "<unk>"


def _deberta_order(model: SentencePiece, settings: Mapping[str, Any]) -> Order:
    own = _own_order(model)
    return [*own, *(["[MASK]"] if "[MASK]" not in own else [])], ["[CLS]", "[SEP]"], "[UNK]"


LAYOUTS: dict[str, Callable[[SentencePiece, Mapping[str, Any]], Order]] = {
    "T5": _t5_order,
    "XLMRoberta": _fairseq_order,
    "Camembert": _camembert_order,
    "Pegasus": _pegasus_order,
    "Albert": _albert_order,
    "DebertaV2": _deberta_order,
    **{kind: _multilingual_order(kind) for kind in CODES},
}


def _wordpiece(folder: Path, settings: Mapping[str, Any]) -> ForeignTokenizer:
    """BERT's vocab.txt: one piece per line."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = _lines(folder, WORDPIECE)
    numbers = {piece: number for number, piece in enumerate(pieces)}
    if "[UNK]" not in numbers:
        raise InputError("it has no [UNK]", where=str(folder / WORDPIECE), remedy="this is no WordPiece vocabulary")
    backend = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    accents = settings.get("strip_accents")
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars") is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=settings.get("do_lower_case") is not False,
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    ends = ("[CLS]", "[SEP]") if "[CLS]" in numbers else ("<s>", "</s>")
    special = [one for one in (*ends, "[PAD]", "[UNK]", "[MASK]", "<pad>", "<mask>") if one in numbers]
    backend.add_special_tokens(special)
    return _same_ids(backend, list(ends), "[UNK]")


def _byte_level(folder: Path, kind: str, settings: Mapping[str, Any]) -> ForeignTokenizer:
    """vocab.json and merges.txt of GPT-2 and its relatives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = read_json(folder, VOCABULARY)
    if not vocabulary or not all(isinstance(number, int) and number >= 0 for number in vocabulary.values()):
        raise InputError("expected pieces with their ids", where=str(folder / VOCABULARY), remedy="fetch it again")
    lines = [line for line in _lines(folder, MERGES) if line and not line.startswith("#version")]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"not a list of merges: {error}", where=str(folder / MERGES), remedy="fetch it again"
        ) from None
    space = settings.get("add_prefix_space")
    space = space if isinstance(space, bool) else kind == "Blenderbot"
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = decoders.ByteLevel()
    named = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|padding|>")
    backend.add_special_tokens([one for one in named if one in vocabulary])
    template = {"Roberta": ["<s>", "</s>"], "Blenderbot": ["</s>"]}.get("Roberta" if kind in FRAMED else kind, [])
    return _same_ids(backend, template, "<unk>")


def _fsmt(folder: Path) -> list[ForeignTokenizer]:
    """BPE within Moses tokens, with one vocabulary for both sides or one for each, and the same merges."""
    vocabularies = [read_json(folder, name, needed=True) for name in FSMT_FILES]
    for name, vocabulary in zip(FSMT_FILES, vocabularies, strict=True):
        if not all(isinstance(number, int) and number >= 0 for number in vocabulary.values()):
            raise InputError("expected pieces with their ids", where=str(folder / name), remedy="fetch it again")
        if "<unk>" not in vocabulary:
            raise InputError("there is no <unk>", where=str(folder / name), remedy="fetch it again")
    merges = [
        [*line.split(), "", ""][:2] for line in _lines(folder, MERGES) if line and not line.startswith("#version")
    ]
    same = vocabularies[0] == vocabularies[1]
    return [_moses_bpe(vocabulary, merges) for vocabulary in vocabularies[: 1 if same else 2]]


def _moses_bpe(vocabulary: Mapping[str, int], merges: list[list[str]]) -> ForeignTokenizer:
    """BPE within tokens that are separated by spaces; a word ends with </w>.

    Merges do not ask whether their result is in the vocabulary: such pieces are unknown.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    numbers, last = dict(vocabulary), max(vocabulary.values())
    for piece in dict.fromkeys(piece for left, right in merges for piece in (left, right, left + right)):
        if piece not in numbers:
            numbers[piece] = last = last + 1
    backend = Tokenizer(models.BPE(numbers, [(a, b) for a, b in merges], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("</w>")
    backend.add_special_tokens([one for one in FAIRSEQ if one in vocabulary])
    made = _same_ids(backend, ["</s>"], "<unk>")
    known = set(vocabulary.values())
    pieces = {number: piece for number, piece in made.pieces.items() if number in known}
    return replace(made, pieces=pieces, ids={number: number for number in known})


def read_characters(folder: Path) -> ForeignTokenizer:
    """Wav2Vec2CTCTokenizer: vocab.json with a piece per character, one of which stands for a space."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    settings = read_json(folder, CONFIG)
    vocabulary = read_json(folder, VOCABULARY, needed=True)
    if not vocabulary or not all(isinstance(number, int) and number >= 0 for number in vocabulary.values()):
        remedy = "vocabularies of several languages are not supported; else fetch it again"
        raise InputError("expected characters with their ids", where=str(folder / VOCABULARY), remedy=remedy)
    kind = str(settings.get("tokenizer_class") or "Wav2Vec2CTCTokenizer")
    if kind != "Wav2Vec2CTCTokenizer" or settings.get("do_lower_case"):
        problem = f"the tokenizer {kind} with do_lower_case: {bool(settings.get('do_lower_case'))} is not supported"
        raise InputError(problem, where=str(folder / CONFIG), remedy="only Wav2Vec2CTCTokenizer without lower case is")
    space, unknown = (_named(settings, key, default) for key, default in (("word_delimiter", "|"), ("unk", "<unk>")))
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.Replace(" ", space)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    ends = decoders.Replace(Regex(r"^ +| +$"), "")  # decoders.Strip fails on a text of spaces
    backend.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse(), ends])
    named = {_named(settings, key, f"<{key}>") for key in ("pad", "bos", "eos", "unk")}
    long = [piece for piece in vocabulary if len(piece) > 1 and piece not in named]
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in long])
    return _same_ids(backend, [], unknown)


def _named(settings: Mapping[str, Any], key: str, default: str) -> str:
    """A token that tokenizer_config.json names as a text, or as an object with options."""
    named = settings.get(f"{key}_token")
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else default


FRAMED = ("Roberta", "Bart", "Mvp", "LED")  # <s> and </s> surround a text


def _lines(folder: Path, name: str) -> list[str]:
    try:
        return read_text(folder, name).decode().rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise InputError("not UTF-8", where=str(folder / name), remedy="fetch it again") from None
