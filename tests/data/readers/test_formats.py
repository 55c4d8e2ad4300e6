"""File formats: what pandas, spreadsheets, the datasets library and translation tools write is read as it was meant."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from transduce.autoconfig import recipe_for
from transduce.data.readers.corpus import DropCounter, fingerprint, read_corpus
from transduce.data.readers.delimited import find_columns, is_header
from transduce.data.readers.records import _array_rows
from transduce.errors import InputError
from transduce.recipe import Corpus, parse

PAIRS = [("ein Haus, groß", 'a "big" house'), ("zwei\nZeilen", "two; lines"), ("  drei", "three  ")]


def _read(path: Path | str, **options: Any) -> list[tuple[str, str | None]]:
    return [(example.source, example.target) for example in read_corpus(Corpus(path=str(path), **options))]


def _write_csv(path: Path, rows: list[Any], **options: Any) -> Path:
    encoding = options.pop("encoding", "utf-8")
    with path.open("w", encoding=encoding, newline="") as stream:
        csv.writer(stream, **options).writerows(rows)
    return path


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize(("delimiter", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8")])
@pytest.mark.parametrize("header", [["source", "target"], ["", "de", "en"], ["id", "target", "source"], None])
def test_csv_is_read_with_its_quotes_and_its_header(
    tmp_path: Path, quoting: Any, delimiter: str, encoding: str, header: list[str] | None
) -> None:
    rows: list[Any] = [list(pair) for pair in PAIRS]
    if header and len(header) == 3:
        rows = [[number, *(pair if header[1] == "de" else pair[::-1])] for number, pair in enumerate(PAIRS)]
    content = [header, *rows] if header else rows
    path = _write_csv(tmp_path / "a.csv", content, quoting=quoting, delimiter=delimiter, encoding=encoding)
    assert _read(path) == PAIRS


@given(
    st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1)] * 2), min_size=1)
)
def test_csv_gives_back_what_the_csv_module_wrote(tmp_path_factory: pytest.TempPathFactory, pairs: Any) -> None:
    path = _write_csv(tmp_path_factory.mktemp("csv") / "a.csv", [("src", "tgt"), *pairs], lineterminator="\n")
    assert _read(path, header=True) == pairs


def test_rows_of_a_csv_are_numbered_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'source,target\n"a\nb",c\nonly\n\xff,d\n"e",f\n')
    counts = DropCounter()
    found = list(read_corpus(Corpus(path=str(path)), "drop", counts))
    assert [(one.source, one.line) for one in found] == [("a\nb", 2), ("e", 6)]
    assert counts.places == {"missing column": (str(path), 4), "invalid UTF-8": (str(path), 5)}
    with pytest.raises(InputError, match="expected two columns separated by commas, found one") as caught:
        _read(path)
    assert caught.value.where == f"{path}:4"


def test_a_quote_that_never_ends_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('source,target\na,b\n"c,d\n' + "e,f\n" * 300_000)
    with pytest.raises(InputError, match="may never end") as caught:
        _read(path)
    assert caught.value.where == f"{path}:3"


def test_a_header_is_found_and_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("en\tde\na house\tein Haus\n")
    assert _read(path) == [("a house", "ein Haus")]
    assert _read(path, columns="de,en") == [("ein Haus", "a house")]
    assert _read(path, header=False) == [("en", "de"), ("a house", "ein Haus")]
    assert _read(path, header=False, columns=["2", "1"])[1] == ("ein Haus", "a house")
    path.write_text("Wort\tword\nHaus\thouse\n")
    assert len(_read(path)) == 2
    assert _read(path, header=True) == [("Haus", "house")]
    with pytest.raises(InputError, match="does not name the column 'de'"):
        _read(path, columns=["de", "en"])
    with pytest.raises(InputError, match=r"no column 'wort'(.|\n)*did you mean 'word'"):
        _read(path, header=True, columns=["wort", "word"])


def test_a_header_names_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("picture,title\none.png,a dog\n")
    assert _read(path, modalities=("image",)) == [(str(tmp_path / "one.png"), "a dog")]
    path.write_text("one.png,a dog\n")
    assert _read(path, modalities=("image",)) == [(str(tmp_path / "one.png"), "a dog")]


@pytest.mark.parametrize(
    ("first", "header"),
    [
        *(("source target", True), ("id text label", True), ("deu_Latn eng_Latn", True), ("SRC TGT", True)),
        *(("a b", False), ("x y", False), ("Haus house", False), ("text text", False), ("question who", False)),
    ],
)
def test_a_header_has_only_known_names(first: str, header: bool) -> None:
    assert is_header(first.split()) == header


@pytest.mark.parametrize(
    ("names", "sources", "columns"),
    [
        (["id", "tgt", "src"], 1, ("src", "tgt")),
        (["translation.de", "translation.en", "id"], 1, ("translation.de", "translation.en")),
        (["question", "context", "answer"], 2, ("context", "question", "answer")),
        (["text", "label", "idx"], 1, ("text", "label")),
        (["frage", "antwort", "id"], 1, ("frage", "antwort")),
        (["a", "b", "c"], 1, None),
    ],
)
def test_columns_are_found_by_their_names(names: list[str], sources: int, columns: tuple[str, ...] | None) -> None:
    assert find_columns(names, sources) == columns


RECORDS = [{"id": number, "translation": {"de": de, "en": en}} for number, (de, en) in enumerate(PAIRS)]


def _write_arrow(path: Path, rows: list[Any]) -> None:
    table = arrow.Table.from_pylist(rows)
    with arrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("kind", ["jsonl", "json", "json.gz", "pretty.json", "parquet", "arrow", "saved", "saved_dict"])
def test_nested_fields_are_found_in_every_format(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in RECORDS))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(RECORDS).encode()))
    elif kind.endswith("json"):
        path.write_text(json.dumps(RECORDS, indent=2 if kind == "pretty.json" else None, ensure_ascii=False))
    elif kind == "parquet":
        parquet.write_table(arrow.Table.from_pylist(RECORDS), path)
    elif kind == "arrow":
        _write_arrow(path, RECORDS)
    else:  # the files of `Dataset.save_to_disk`
        folder = path / "train" if kind == "saved_dict" else path
        folder.mkdir(parents=True)
        (path / "dataset_dict.json").write_text('{"splits": ["train"]}') if kind == "saved_dict" else None
        _write_arrow(folder / "data-00000-of-00001.arrow", RECORDS)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert _read(path) == PAIRS
    assert _read(path, columns=["translation.en", "translation.de"]) == [pair[::-1] for pair in PAIRS]
    before = fingerprint(Corpus(path=str(path)))
    assert before == fingerprint(Corpus(path=str(path))) != fingerprint(Corpus(path=str(path), columns=["a", "b"]))


def test_fields_that_do_not_tell_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x", "b": "y", "c": "z"}\n')
    with pytest.raises(InputError, match=r"which fields .* a, b, c\n  name them: --columns a,b"):
        _read(path)
    assert _read(path, columns=["c", "a"]) == [("z", "x")]
    with pytest.raises(InputError, match=r"--columns or `data\.columns`; known: a, b, c"):
        _read(path, columns=["c", "nothing"])


def test_numbers_are_labels_and_lists_are_words(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good", "label": 1}\n')
    assert _read(path) == [("good", "1")]
    path.write_text('{"tokens": ["a", "dog"], "tags": ["DET", "NOUN"]}\n')
    assert _read(path, columns=["tokens", "tags"]) == [("a dog", "DET NOUN")]


@given(
    st.lists(
        st.fixed_dictionaries({"src": st.text(min_size=1), "tgt": st.text(), "n": st.lists(st.floats(allow_nan=False))})
    )
)
def test_a_json_array_is_read_piece_by_piece(rows: Any) -> None:
    class Slow(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return super().read(min(size or 3, 3))

    text = json.dumps(rows)
    assert [row for _, row in _array_rows("", Slow(text[1:]), "a.json")] == rows


@pytest.mark.parametrize("content", ["[", '[{"source": "a"', "[1]", '[{"source": "a", "target": "b"}'])
def test_a_damaged_json_array_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError):
        _read(path)


TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en-US"/><body>
<tu><tuv xml:lang="en-US"><seg>Press <bpt i="1">&lt;b&gt;</bpt>OK<ept i="1"/></seg></tuv>
    <tuv xml:lang="de-DE"><seg>OK
    drücken</seg></tuv></tu>
<tu><tuv xml:lang="de-DE"><seg>Nein</seg></tuv><tuv xml:lang="en-US"><seg>No</seg></tuv></tu>
</body></tmx>
"""
WMT = """<dataset id="test"><doc id="1"><src lang="en"><p><seg id="1">One.</seg><seg id="2">Two &amp; 2.</seg></p></src>
<ref lang="de" translator="A"><p><seg id="1">Eins.</seg><seg id="2">Zwei &amp; 2.</seg></p></ref>
<ref lang="de" translator="B"><p><seg id="1">1.</seg><seg id="2">2.</seg></p></ref></doc></dataset>
"""
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

#: main.c:1
msgctxt "menu"
msgid "Open"
msgstr "Öffnen"

#, fuzzy
msgid "Close"
msgstr "Schluss"

msgid "one file"
msgid_plural "%d files"
msgstr[0] "eine Datei"
msgstr[1] "%d Dateien"

msgid ""
"Line one\\n"
"line \\"two\\""
msgstr "Zeile eins\\n"
"Zeile \\"zwei\\""
#~ msgid "old"
#~ msgstr "alt"

msgid "untranslated"
msgstr ""
"""
GERMAN = [("Open", "Öffnen"), ("one file", "eine Datei"), ('Line one\nline "two"', 'Zeile eins\nZeile "zwei"')]


def test_files_of_translators(tmp_path: Path) -> None:
    for name, content in {"a.tmx": TMX, "a.xml": WMT, "a.po": PO}.items():
        (tmp_path / name).write_text(content)
    assert _read(tmp_path / "a.tmx") == [("Press <b>OK", "OK drücken"), ("No", "Nein")]
    assert _read(tmp_path / "a.tmx", columns=["de", "en"])[1] == ("Nein", "No")
    assert _read(tmp_path / "a.xml") == [("One.", "Eins."), ("Two & 2.", "Zwei & 2.")]
    assert _read(tmp_path / "a.po") == GERMAN
    (tmp_path / "a.tmx").write_text(TMX[:300])
    with pytest.raises(InputError, match="malformed XML"):
        _read(tmp_path / "a.tmx")
    (tmp_path / "a.po").write_text('msgid "a"\nmsgstr "b\n')
    with pytest.raises(InputError, match="not a line of a PO catalogue") as caught:
        _read(tmp_path / "a.po")
    assert caught.value.where.endswith("a.po:2")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.po", 'msgid "a"\nmsgstr ""\n', "no message is translated"),
        ("a.tmx", "<tmx><body/></tmx>", "no translation unit"),
        ("a.xml", "<dataset/>", "no segment"),
        ("a.tsv", "", "the file is empty"),
    ],
)
def test_a_file_without_a_complete_unit_says_what_is_missing(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=problem):
        _read(tmp_path / name)


def test_a_misspelt_column_is_looked_for_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("title,letter\nalpha,a\n")
    with pytest.raises(InputError, match="no column 'titel'") as error:
        list(read_corpus(Corpus(path=str(path), columns=("titel", "letter"))))
    assert error.value.remedy == "did you mean 'title'?"
    assert _read(path, columns=("title", "2")) == [("alpha", "a")]


def test_a_list_of_texts_is_no_list_of_words(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "item": "row", "sounds": ["r ou", "r au"], "by": "x"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1: several texts: field 'sounds' is a list of 2 texts"):
        list(read_corpus(Corpus(path=str(path), columns=("item", "sounds"))))
    with pytest.raises(InputError, match="There are id, item, sounds, by") as error:
        list(read_corpus(Corpus(path=str(path))))
    assert error.value.remedy == "name them: --columns item,sounds"


def test_one_json_object_over_several_lines_is_no_list_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"source": "a", "target": "b"}]}, indent=2))
    with pytest.raises(InputError, match="array of objects"):
        _read(tmp_path / "a.json")


def test_a_catalogue_is_read_as_babel_reads_it(tmp_path: Path) -> None:
    pofile = pytest.importorskip("babel.messages.pofile")
    (tmp_path / "a.po").write_text(PO)
    with (tmp_path / "a.po").open("rb") as stream:
        messages = [one for one in pofile.read_po(stream) if one.id and one.string and not one.fuzzy]
    first = [(one.id[0], one.string[0]) if isinstance(one.id, tuple) else (one.id, one.string) for one in messages]
    assert _read(tmp_path / "a.po") == first == GERMAN


def test_sgml_test_sets_are_parallel_files(tmp_path: Path) -> None:
    for side, texts in {"src.en": ("One.", "Two &amp;\n2."), "ref.de": ("Eins.", "Zwei &amp; 2.")}.items():
        segments = "".join(f'<seg id="{number}"> {text} </seg>\n' for number, text in enumerate(texts))
        (tmp_path / f"{side}.sgm").write_text(f"<refset><doc><p>{segments}</p></doc></refset>")
    corpus = Corpus(source=str(tmp_path / "src.en.sgm"), target=str(tmp_path / "ref.de.sgm"))
    assert [(one.source, one.target) for one in read_corpus(corpus)] == [("One.", "Eins."), ("Two & 2.", "Zwei & 2.")]


def test_entities_cannot_fill_the_memory(tmp_path: Path) -> None:
    nested = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    (tmp_path / "a.tmx").write_text(
        f'<!DOCTYPE tmx [<!ENTITY e0 "boom">{nested}]><tmx><tu><tuv lang="en"><seg>&e11;</seg></tuv></tu></tmx>'
    )
    with pytest.raises(InputError, match="malformed XML"):
        _read(tmp_path / "a.tmx")


def test_data_sets_of_the_hub_are_read_through_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*names: Any, split: str) -> list[Any]:
        calls.append((*names, split))
        return RECORDS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert _read("hf://wmt/wmt16:de-en:validation") == _read("hf://wmt/wmt16") == PAIRS
    assert set(calls) == {("wmt/wmt16", "de-en", "validation"), ("wmt/wmt16", None, "train")}
    fingerprint(Corpus(path="hf://wmt/wmt16"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"transduce\[datasets\]"):
        _read("hf://wmt/wmt16")


def test_columns_of_the_data_section_hold_for_all_corpora() -> None:
    data = parse(
        {"data": {"columns": "de,en", "train": ["a.csv", {"path": "b.csv", "columns": ["x", "y"]}], "test": "c.csv"}}
    ).data
    assert [corpus.columns for corpus in (*data.train, *data.test)] == [("de", "en"), ("x", "y"), ("de", "en")]


def test_patterns_stand_for_all_matching_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b-2.tsv", "b-1.tsv", "a.en", "b.en", "a.de", "b.de", "[x].tsv"):
        Path(name).write_text("x\ty\n")
    corpora = parse({"data": {"train": ["b-*.tsv", "?.en,?.de", "[x].tsv", "none-*.tsv"]}}).data.train
    names = [corpus.path or f"{corpus.source},{corpus.target}" for corpus in corpora]
    assert names == ["b-1.tsv", "b-2.tsv", "a.en,a.de", "b.en,b.de", "[x].tsv", "none-*.tsv"]
    Path("b.de").unlink()
    with pytest.raises(InputError, match=r"\?\.en matches 2 files, \?\.de matches 1"):
        parse({"data": {"train": "?.en,?.de"}})


def test_chosen_recipes_state_the_columns_that_were_found(tmp_path: Path) -> None:
    path = _write_csv(tmp_path / "a.csv", [("id", "de", "en"), *((n, f"eins {n}", f"one {n}") for n in range(200))])
    assert recipe_for(str(path)).data.train[0].columns == ("de", "en")
    saved = tmp_path / "saved"
    for split in ("train", "validation", "test"):
        (saved / split).mkdir(parents=True)
        _write_arrow(saved / split / "data.arrow", [{"src": f"eins {n}", "tgt": f"one {n}"} for n in range(200)])
        (saved / split / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    data = recipe_for(str(saved)).data
    assert [corpora[0].path for corpora in (data.dev, data.test)] == [str(saved / "validation"), str(saved / "test")]
    assert data.dev[0].columns == ("src", "tgt")
