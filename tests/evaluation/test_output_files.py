"""Evaluation of output files without a model, against sacrebleu; error spans and the report."""

from __future__ import annotations

import json
import random
import re
from html import unescape

import pytest
from sacrebleu.metrics import BLEU, CHRF

from transduce.errors import InputError
from transduce.evaluation.output_files import difference_report, error_spans, evaluate_files

WORDS = ["das", "Haus", "<b>", "ist", "rot", "&", "grün"]


@pytest.fixture
def files(tmp_path):
    draw = random.Random(3)
    gold = [[draw.choice(WORDS) for _ in range(draw.randint(1, 9))] for _ in range(30)]
    near = [[word if draw.random() > 0.1 else "anders" for word in line] for line in gold]
    far = [[word if draw.random() > 0.6 else "anders" for word in line] for line in gold]
    for name, lines in {"ref.txt": gold, "near.txt": near, "far.txt": far}.items():
        (tmp_path / name).write_text("".join(" ".join(line) + "\n" for line in lines))
    return tmp_path


def test_scores_are_those_of_sacrebleu_and_the_better_file_wins(files, command):
    lines = {name: (files / name).read_text().splitlines() for name in ("ref.txt", "near.txt", "far.txt")}
    options = ("--hypotheses", files / "near.txt", "--hypotheses", files / "far.txt", "--references", files / "ref.txt")
    report, scores = files / "report.html", files / "scores.json"
    called = command(
        "evaluate", *options, "--metrics", "bleu,chrf++", "--report", report, "--json", scores
    )  # fmt: skip
    assert called.code == 0, called.err
    assert f"near.txt is better than {files}/far.txt" in called.out.replace("\n", " ").replace("  ", " ")
    assert "nw:2" in called.out  # the signature of chrF++
    found = json.loads(scores.read_text())["systems"][str(files / "near.txt")]["scores"]
    assert found["bleu"]["value"] == pytest.approx(BLEU().corpus_score(lines["near.txt"], [lines["ref.txt"]]).score)
    plus = CHRF(word_order=2).corpus_score(lines["near.txt"], [lines["ref.txt"]]).score
    assert found["chrf++"]["value"] == pytest.approx(plus)
    page = report.read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_error_spans_turn_an_output_into_its_reference():
    draw = random.Random(1)
    for _ in range(50):
        output, gold = ([draw.choice("abcd") for _ in range(draw.randint(0, 8))] for _ in range(2))
        words = list(output)
        for span in reversed(error_spans(" ".join(output), " ".join(gold))):
            words[span.begin : span.end] = span.expected
        assert words == gold
    assert error_spans("a b", "a  b") == []


def test_the_report_contains_every_output_and_every_reference(files):
    found = evaluate_files([files / "far.txt"], [files / "ref.txt"], ["exact"])
    page = difference_report(found)
    cells = [cell for cell in re.findall(r"<td>(.*?)</tr>", page) if "<td>" not in cell]
    outputs = [re.sub(r" ?<ins class=\w+>.*?</ins>", "", cell) for cell in cells[1::2]]
    plain = sorted(unescape(re.sub(r"<del class=\w+>|</del>", "", cell)).strip() for cell in outputs)
    assert plain == sorted((files / "far.txt").read_text().splitlines())


def test_error_spans_have_kinds_and_follow_the_closest_reference(tmp_path):
    for name, text in {"out": "a x c d\nb b\n", "far": "q q q\nb\n", "near": "a b c e d\nb\n"}.items():
        (tmp_path / name).write_text(text)
    found = evaluate_files([tmp_path / "out"], [tmp_path / "far", tmp_path / "near"], ["wer"])
    first, second = found.to_json()["errors"][str(tmp_path / "out")]
    assert first == {
        "line": 1,
        "reference": "a b c e d",
        "spans": [
            {"kind": "substitution", "begin": 1, "end": 2, "expected": ("b",)},
            {"kind": "deletion", "begin": 3, "end": 3, "expected": ("e",)},
        ],
    }
    assert [span["kind"] for span in second["spans"]] == ["insertion"]
    page = difference_report(found)
    assert "<td>1<td>1<td>1</tr>" in page  # one span of each kind
    assert "a <del class=substitution>x</del> <ins class=substitution>b</ins> c <ins class=deletion>e</ins> d" in page


def test_the_report_begins_with_the_worst_line_and_runs_nothing(tmp_path):
    hostile = '<script src="https://x">alert(1)</script>'
    (tmp_path / "ref").write_text(f"a\na b c\n{hostile}\n")
    (tmp_path / "<img src=x>").write_text(f"a\nx y z\n{hostile} {hostile}\n")
    page = difference_report(evaluate_files([tmp_path / "<img src=x>"], [tmp_path / "ref"], ["chrf"]))
    assert re.findall(r"<td class=name>(\d) reference", page) == ["2", "3", "1"]
    assert {*re.findall(r"<(\w+)", page)} <= {
        "html", "meta", "title", "style", "h1", "table", "tr", "th", "td", "p", "del", "ins"
    }  # fmt: skip
    assert "default-src 'none'" in page


def test_the_tests_of_a_record_have_numbers(files):
    found = evaluate_files([files / "near.txt", files / "far.txt"], [files / "ref.txt"], ["bleu", "wer"]).to_json()
    assert [test["metric"] for test in found["tests"]] == ["bleu", "wer"]
    bleu, wer = (test["result"] for test in found["tests"])
    assert bleu["low"] <= bleu["difference"] <= bleu["high"]
    assert bleu["difference"] > 0 > wer["difference"]
    assert bleu["p_value"] < 0.05


def test_files_that_do_not_match_are_refused(files, command):
    (files / "short.txt").write_text("das\n")
    with pytest.raises(InputError, match=r"short.txt: 1 lines, but .*ref.txt has 30"):
        evaluate_files([files / "short.txt"], [files / "ref.txt"], ["bleu"])
    with pytest.raises(InputError, match="perplexity needs a model"):
        evaluate_files([files / "far.txt"], [files / "ref.txt"], ["perplexity"])
    with pytest.raises(InputError, match="given twice"):
        evaluate_files([files / "far.txt"] * 2, [files / "ref.txt"], ["bleu"])
    for options in ((), ("--hypotheses", files / "far.txt"), ("runs/x", "--references", files / "ref.txt")):
        assert command("evaluate", *options).code == 2
