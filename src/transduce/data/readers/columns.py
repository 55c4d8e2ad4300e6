"""Column names: which columns of a file are the source and the target, and whether a first line is a header."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Sources and target, by the names that published data sets use. Earlier rows win.
KNOWN_COLUMNS = (
    ("source", "target"),
    ("src", "tgt"),
    ("src", "trg"),
    ("src", "ref"),
    ("input", "output"),
    ("inputs", "targets"),
    ("input_text", "target_text"),
    ("msgid", "msgstr"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("question", "answer"),
    ("question", "sql"),
    ("dialogue", "summary"),
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "summary"),
    ("text", "summary"),
    ("word", "phones"),
    ("word", "phonemes"),
    ("word", "pronunciation"),
    ("word", "ipa"),
    ("graphemes", "phonemes"),
    ("file_name", "caption"),
    ("file_name", "text"),
    ("path", "sentence"),
    ("tokens", "tags"),
    ("words", "tags"),
    ("text", "target"),
    ("text", "label"),
    ("sentence", "label"),
    ("review", "label"),
    ("review", "sentiment"),
    ("text", "sentiment"),
    ("text", "category"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis", "label"),
    ("sentence1", "sentence2", "label"),
    ("context", "question", "answer"),
    ("lemma", "features", "form"),
    ("lemma", "tags", "form"),
)
TEXT_COLUMNS = ("text", "content", "sentence", "document", "target")
OTHER_COLUMNS = {"", "id", "idx", "index", "no", "number", "score", "split", "domain", "year", "url", "weight"}
_NAMES = {name for row in KNOWN_COLUMNS for name in row} | OTHER_COLUMNS | set(TEXT_COLUMNS)
# ISO 639-1, and the three-letter codes that corpora use.
_LANGUAGES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
    es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka
    kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng
    nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su
    sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    ara ces deu eng est fin fra heb hin hun ind ita jpn kor lav lit nld pol por ron rus spa swe tha tur ukr vie zho
    """.split()  # noqa: SIM905 (two hundred quoted names are harder to read)
)


def is_language(name: str) -> bool:
    """Whether a name is a language code, such as `de`, `deu`, `pt-BR` or `deu_Latn`."""
    found = re.fullmatch(r"([a-z]{2,3})([-_][a-z]{2,4})?", name.lower())
    return found is not None and found[1] in _LANGUAGES


def is_header(cells: Sequence[str]) -> bool:
    """Whether a first line names its columns: every cell is a known name or a language code, and none occurs twice."""
    names = [cell.strip().lower() for cell in cells]
    named = all(name in _NAMES or is_language(name) for name in names)
    return named and len(names) > 1 and len(set(names)) == len(names) and any(names[1:])


def find_columns(names: Sequence[str], sources: int) -> tuple[str, ...] | None:
    """The columns that hold the sources and the target; None where the names do not tell."""
    spelt = {name.strip().rpartition(".")[2].lower(): name for name in reversed(names)}
    for row in KNOWN_COLUMNS:
        if len(row) == sources + 1 and all(name in spelt for name in row):
            return tuple(spelt[name] for name in row)
    languages = tuple(name for name in names if is_language(name.rpartition(".")[2]))
    others = tuple(name for name in names if name.strip().lower() not in OTHER_COLUMNS)
    return next((found for found in (languages, others) if len(found) == sources + 1), None)


def find_text_column(names: Sequence[str]) -> str | None:
    """The column that holds the text of a file without sources; None where the names do not tell."""
    spelt = {name.strip().lower(): name for name in reversed(names)}
    known = next((spelt[name] for name in TEXT_COLUMNS if name in spelt), None)
    others = [name for name in names if name.strip().lower() not in OTHER_COLUMNS]
    return known or (others[0] if len(others) == 1 else None)
