"""Terminology: required and banned phrases in the outputs of random models, glossaries, JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from export_fixtures import TEXTS, make_run, pair
from run_fixtures import Command

import transduce
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.inference.terminology import Constraints, Glossary

REQUIRED = [Constraints(("w3 w3", ("w12", "w0 w1"))), None, Constraints(("w9",), ("w7",)), Constraints(), Constraints()]


@pytest.fixture(scope="module", params=["words", "bpe", "chars"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> transduce.Model:
    folder = tmp_path_factory.mktemp("run") / "run"
    make_run(folder, pair(), kind=request.param)
    return transduce.load(folder)


@pytest.mark.parametrize("settings", [{}, {"beam": 1}, {"strategy": "sample", "beam": 2}], ids=str)
def test_outputs_contain_what_is_required_and_nothing_banned(model, settings):
    plain = model.generate(TEXTS, **settings)
    unwanted = next((word for word in plain[4].text.split() if word not in ("w5", "w6")), "w11")
    constraints = [*REQUIRED[:4], Constraints(("w5 w6",), (unwanted,))]
    found = model.generate(TEXTS, constraints=constraints, nbest=2, **settings)
    assert all("w3 w3" in one.text and ("w12" in one.text or "w0 w1" in one.text) for one in found[0].nbest)
    assert all("w9" in one.text and "w7" not in one.text.split() for one in found[2].nbest)
    assert all(unwanted not in one.text.split() for one in found[4].nbest)


def test_lines_without_constraints_are_generated_as_ever(model):
    plain, found = model.generate(TEXTS), model.generate(TEXTS, constraints=REQUIRED)
    assert [found[row].text for row in (1, 3, 4)] == [plain[row].text for row in (1, 3, 4)]
    assert [one.text for one in model.generate(TEXTS, constraints=[None] * 5)] == [one.text for one in plain]


def test_phrases_that_cannot_be_written_are_refused(model):
    with pytest.raises(InputError, match="is not a phrase"):
        model.generate(["w1"], constraints=[Constraints((" ",))])
    with pytest.raises(InputError, match="contains a banned phrase"):
        model.generate(["w1"], constraints=[Constraints(("w1 w2",), ("w2",))])
    with pytest.raises(InputError, match="constraints for 2"):
        model.generate(["w1"], constraints=[None, None])
    if model.target.kind == "words":
        with pytest.raises(InputError, match="cannot write 'zebra'"):
            model.generate(["w1"], constraints=[Constraints(("zebra",))])


def test_long_phrases_extend_an_output_beyond_its_maximum(model):
    phrase = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"
    assert phrase in model.generate(["w1"], constraints=[Constraints((phrase,))], max_length=3)[0].text


def test_segmentations_decode_to_the_text():
    tokenizer = Tokenizer.train([" ".join(TEXTS)] * 3, "bpe", 300)
    found = tokenizer.segmentations("w12 w0")
    assert found[0] == tokenizer.encode_batch(["w12 w0"])[0]
    assert len({tuple(ids) for ids in found}) == len(found) > 3
    assert {tokenizer.decode(ids) for ids in found} == {"w12 w0"}
    assert len(tokenizer.segmentations("w12 w0 " * 20, 50)) == 50


def test_glossary_terms_are_whole_words_and_the_longest(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("# a comment\nred\trot\nred wine\tRotwein\trote Wein\n赤\trot\n\n")
    glossary = Glossary.load(path)
    assert glossary.constraints("red wine, redder, red").required == (("Rotwein", "rote Wein"), ("rot",))
    assert glossary.constraints("credit").required == ()
    assert glossary.constraints("赤ワイン").required == (("rot",),)
    path.write_text("red\n")
    with pytest.raises(InputError, match=r"terms.tsv:1: 'red' is not a term"):
        Glossary.load(path)


def test_generate_reads_glossaries_and_json_lines(attention_run: Path, tmp_path: Path, command: Command):
    (tmp_path / "terms.tsv").write_text("red\tBLUE\n")
    (tmp_path / "words.txt").write_text("RED\n")
    options = ("--glossary", tmp_path / "terms.tsv", "--avoid", tmp_path / "words.txt")
    called = command("generate", attention_run, "-", *options, stdin=b"red\ngreen\n")
    assert called.code == 0, called.err
    first, second = called.out.splitlines()
    assert "BLUE" in first
    assert "RED" not in first + second
    lines = [{"text": "red", "constraints": [["BLUE", "GREEN"]], "avoid": ["RED"]}, {"text": "red", "prefix": "BLUE"}]
    given = "".join(json.dumps(line) + "\n" for line in lines).encode()
    called = command("generate", attention_run, "-", "--json-input", stdin=given)
    assert called.code == 0, called.err
    first, second = called.out.splitlines()
    assert "BLUE" in first or "GREEN" in first
    assert second.startswith("BLUE")


@pytest.mark.parametrize(
    "line", ['{"txt": "red"}', '{"text": "red", "avoids": []}', "red", '{"text": "red", "constraints": "blau"}']
)
def test_bad_json_lines_are_refused_with_their_place(line: str, attention_run: Path, command: Command):
    called = command("generate", attention_run, "-", "--json-input", stdin=line.encode())
    assert (called.code, "standard input:1" in called.err) == (2, True), called.err
