"""`transduce align`, guided alignment, alignment error rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_fixtures import RECURRENT, Command, colour_pairs, settings

import transduce
from transduce.errors import InputError
from transduce.explain.alignment import (
    AttentionSelection,
    GoldAlignment,
    align,
    align_both,
    error_rate,
    parse_pharaoh,
    pharaoh,
    read_gold,
)
from transduce.training.experiment import train

BLOCKS = {"kind": "transformer", "width": 32, "layers": 2, "heads": 2, "ff_width": 64, "dropout": 0.0}
HELD_OUT = colour_pairs(40, seed=9)


def turned(target: str) -> str:
    """The gold links of a pair: the target is the source from its end."""
    count = len(target.split())
    return " ".join(f"{count - 1 - place}-{place}" for place in range(count))


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def linked(bench: Path) -> Path:
    rows = ["\t".join((source, target, turned(target))) for source, target in colour_pairs(300)]
    return written(bench / "linked.tsv", rows)


@pytest.fixture(scope="module")
def held_out(bench: Path) -> Path:
    return written(bench / "held_out.tsv", [f"{source}\t{target}" for source, target in HELD_OUT])


@pytest.fixture(scope="module")
def gold(bench: Path) -> Path:
    return written(bench / "gold.txt", [turned(target) for _, target in HELD_OUT])


def trained(linked: Path, folder: Path, objective: dict[str, Any], steps: int = 160) -> Path:
    content = settings(linked, {"encoder": BLOCKS, "decoder": BLOCKS}, "words", steps=steps, objective=objective)
    content["data"]["train"] = {"path": str(linked), "alignment": "column3"}
    train(content, folder)
    return folder


@pytest.fixture(scope="module")
def guided_run(linked: Path, bench: Path) -> Path:
    return trained(linked, bench / "guided", {"kind": "guided_alignment", "weight": 1.0, "label_smoothing": 0.0})


@pytest.fixture(scope="module")
def plain_run(linked: Path, bench: Path) -> Path:
    return trained(linked, bench / "unguided", {"label_smoothing": 0.0}, steps=60)


def rate(folder: Path) -> float:
    model = transduce.load(folder, device="cpu")
    wanted = [parse_pharaoh(turned(target)) for _, target in HELD_OUT]
    return error_rate(align(model, HELD_OUT, AttentionSelection("last")), wanted, "gold")


@pytest.mark.slow
def test_guided_alignment_lowers_the_alignment_error_rate(guided_run: Path, plain_run: Path) -> None:
    assert rate(guided_run) < 0.05
    assert rate(plain_run) > 0.05


@pytest.mark.slow
def test_align_writes_links_and_prints_the_error_rate(
    guided_run: Path, held_out: Path, gold: Path, command: Command
) -> None:
    called = command("align", guided_run, held_out, "--gold", gold, "--layer", "last", "--device", "cpu")
    assert called.code == 0, called.err
    lines = called.out.splitlines()
    assert len(lines) == len(HELD_OUT)
    found = error_rate([sorted(parse_pharaoh(line).sure) for line in lines], read_gold(str(gold)), "gold")
    assert f"alignment error rate {100 * found:.1f} % of 40 pairs" in called.err
    assert found == pytest.approx(rate(guided_run))


def test_alignment_of_given_outputs_equals_that_of_generated_ones(model: transduce.Model) -> None:
    """The law: the links of a model's own outputs, given to it as pairs, are those it had when it wrote them."""
    sources = [source for source, _ in HELD_OUT[:8]]
    outputs = model.generate(sources, beam=1)
    assert align(model, [(one.source, one.text) for one in outputs]) == [one.alignment for one in outputs]
    for one, read in zip(outputs, model.explain_pairs([(one.source, one.text) for one in outputs]), strict=True):
        assert read.output == one.text
        assert read.score == pytest.approx(one.score, abs=1e-4)


def test_both_directions_are_symmetrised(
    model: transduce.Model, bench: Path, attention_run: Path, command: Command
) -> None:
    back_pairs = written(bench / "back.tsv", [f"{target}\t{source}" for source, target in colour_pairs(400)])
    parts = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}
    train(settings(back_pairs, parts, "words", steps=20), bench / "back")
    back = transduce.load(bench / "back", device="cpu")
    pairs = HELD_OUT[:6]
    one = [set(links) for links in align(model, pairs)]
    other = [{(s, t) for t, s in links} for links in align(back, [(t, s) for s, t in pairs])]
    assert [set(links) for links in align_both(model, back, pairs, "union")] == [
        a | b for a, b in zip(one, other, strict=True)
    ]
    both = [a & b for a, b in zip(one, other, strict=True)]
    assert [set(links) for links in align_both(model, back, pairs, "intersection")] == both
    file = written(bench / "six.tsv", [f"{source}\t{target}" for source, target in pairs])
    called = command("align", attention_run, file, "--reverse", bench / "back", "--symmetrise", "intersection")
    assert called.out.splitlines() == [pharaoh(links) for links in both]


def test_align_rejects_models_without_attention_and_bad_gold_files(
    attention_run: Path, bottleneck_run: Path, held_out: Path, tmp_path: Path, command: Command
) -> None:
    def message(*arguments: str | Path) -> str:
        called = command("align", *arguments)
        assert called.code == 2
        return called.err

    assert "attention" in message(bottleneck_run, held_out)
    assert "did you mean 'union'" in message(attention_run, held_out, "--symmetrise", "unions")
    short = written(tmp_path / "short.txt", ["0-0"])
    assert "40 pairs but 1 lines of links" in message(attention_run, held_out, "--gold", short)
    assert "cannot read the link" in message(attention_run, held_out, "--gold", written(tmp_path / "bad.txt", ["0:0"]))


def test_tokens_of_a_model_of_characters_are_linked(transformer_run: Path, tmp_path: Path, command: Command) -> None:
    file = written(tmp_path / "one.tsv", ["red\tRED"])
    assert command("align", transformer_run, file).out == "0-0\n"
    links = parse_pharaoh(command("align", transformer_run, file, "--level", "token").out.strip())
    assert {target for _, target in links.sure} <= {0, 1, 2}
    assert align(transduce.load(transformer_run), [("red", "RED")], AttentionSelection(level="token")) == [
        sorted(links.sure)
    ]
    assert "known: token, word" in command("align", transformer_run, file, "--level", "letters").err


def test_an_empty_side_has_no_links(model: transduce.Model) -> None:
    assert align(model, [("", "RED"), ("red blue", "")]) == [[], []]
    with pytest.raises(InputError, match="1 pairs but 2 lines"):
        error_rate([[]], [GoldAlignment(frozenset(), frozenset())] * 2, "gold")
