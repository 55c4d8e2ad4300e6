"""Every rung learns, and where the right alignment is known, attention finds it."""

from __future__ import annotations

import pytest
from learning_fixtures import TRANSFORMER, learn

from transduce.explain.alignment import alignment_error_rate
from transduce.synthetic.algorithmic import gold_alignment

pytestmark = pytest.mark.slow

GRU = {"kind": "recurrent", "width": 48, "dropout": 0.0}
WIDE = {**GRU, "width": 64}
LSTM = {**GRU, "cell": "lstm"}
RNN = {**GRU, "cell": "rnn"}
ROTARY = {**TRANSFORMER, "position": "rotary"}


def context(kind: str, **options: object) -> dict[str, object]:
    return {"context": {"kind": kind, **options}}


# name: encoder, decoder, updates, learning rate, exact match to reach (%; a guess reaches 0.1)
RUNGS = {
    "bottleneck at the start": (WIDE, {**WIDE, **context("initial")}, 150, 0.01, 30),
    "bottleneck at every step": (LSTM, {**LSTM, **context("every_step")}, 120, 0.01, 30),
    "plain cells with attention": (RNN, {**RNN, **context("luong", score="mlp")}, 130, 0.006, 45),
    "Bahdanau": (GRU, {**GRU, **context("bahdanau")}, 100, 0.006, 60),
    "Luong": (GRU, {**GRU, **context("luong", score="mlp")}, 100, 0.01, 60),
    "Luong without input feeding": (LSTM, {**LSTM, **context("luong", input_feeding=False)}, 120, 0.01, 50),
    "Transformer": (TRANSFORMER, TRANSFORMER, 100, 0.006, 50),
    "rotary Transformer": (ROTARY, ROTARY, 130, 0.006, 40),
    "Transformer > GRU": (TRANSFORMER, {**GRU, **context("luong", score="mlp")}, 140, 0.006, 45),
    "GRU > Transformer": (GRU, TRANSFORMER, 100, 0.006, 50),
    # Source, separator and target in one network.
    "one recurrent network": (None, {**WIDE, **context("initial")}, 200, 0.01, 30),
    "decoder alone": (None, ROTARY, 100, 0.006, 60),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_ladder_model_learns(rung, tmp_path):
    encoder, decoder, steps, rate, exact = RUNGS[rung]
    trained, test = learn(encoder, decoder, steps, tmp_path, rate=rate)
    assert trained.scores["test"].scores["exact"].value >= exact
    if rung == "Luong":
        found = trained.model.generate([one.source for one in test[:100]])
        links, gold = set(), set()
        for number, (example, output) in enumerate(zip(test, found, strict=False)):
            links |= {(number, *link) for link in output.alignment}
            gold |= {(number, *link) for link in gold_alignment("reverse", example)}
        assert alignment_error_rate(links, gold) <= 0.4  # of links by chance, 0.7
