"""Training logs, checkpoints and runs side by side against the files of a run and its models."""

import itertools
import json
import math
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

import transduce
from transduce import Model
from transduce.errors import InputError
from transduce.run import LOCK_FILE, Run
from transduce.studio.training_history import (
    attention_entropy,
    checkpoint_state,
    development_examples,
    gradient_norms,
    layer_of,
    quality_by_length,
    through_models,
    token_diff,
    training_progress,
)


@pytest.fixture(scope="module")
def models(history_run: Path) -> dict[int, Model]:
    return {step: transduce.load(history_run, step=step) for step in Run(history_run).checkpoints.steps()}


def test_a_run_keeps_as_many_checkpoints_as_its_recipe_says(history_run: Path) -> None:
    assert Run(history_run).checkpoints.steps() == [20, 40, 60, 80, 100, 120]


def test_one_input_goes_through_all_checkpoints_in_order(history_run: Path, models: dict[int, Model]) -> None:
    found = through_models(models.items(), "red blue green")
    assert [one["name"] for one in found] == sorted(models)
    for one, model in zip(found, models.values(), strict=True):
        assert one["output"] == model.generate(["red blue green"])[0].text
        assert one["weights"] == pytest.approx(model.explain("red blue green").map().weights)
    for step, model in models.items():
        weights = Run(history_run).checkpoints.load(step).weights
        assert all(torch.equal(weights[name], value) for name, value in model.network.state_dict().items())
    for before, after in itertools.pairwise(found):
        assert [token for one in after["changes"] for token in one["before"]] == before["tokens"]
        assert [token for one in after["changes"] for token in one["after"]] == after["tokens"]
    assert any(one["kind"] != "equal" for after in found[1:] for one in after["changes"])


def test_loading_a_missing_checkpoint_is_an_error(history_run: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint of step 7"):
        transduce.load(history_run, step=7)


def test_a_diff_names_only_the_changed_tokens() -> None:
    assert token_diff(["a", "b", "c"], ["a", "x", "c", "d"]) == [
        {"kind": "equal", "before": ["a"], "after": ["a"]},
        {"kind": "replace", "before": ["b"], "after": ["x"]},
        {"kind": "equal", "before": ["c"], "after": ["c"]},
        {"kind": "insert", "before": [], "after": ["d"]},
    ]


def test_entropy_of_attention_is_a_share_of_its_maximum() -> None:
    assert attention_entropy(np.full((2, 5), 0.2)) == pytest.approx([1, 1])
    assert attention_entropy(np.eye(4)) == pytest.approx(np.zeros(4), abs=1e-9)
    assert attention_entropy(np.array([0.5, 0.5, 0, 0])) == pytest.approx(0.5)


def test_progress_is_what_the_log_says(history_run: Path, tmp_path: Path) -> None:
    found = training_progress(history_run)
    log = [json.loads(line) for line in (history_run / "log.jsonl").read_text().splitlines()]
    updates = [one for one in log if one["kind"] == "update"]
    assert [(one["step"], one["loss"]) for one in found["updates"]] == [(one["step"], one["loss"]) for one in updates]
    assert [one["step"] for one in found["validations"]] == [20, 40, 60, 80, 100, 120]
    assert (found["running"], found["steps"], found["checkpoints"]) == (False, 120, [20, 40, 60, 80, 100, 120])
    running = tmp_path / "running"
    shutil.copytree(history_run, running)
    holder = {"pid": os.getppid(), "host": socket.gethostname()}
    (running / LOCK_FILE).write_text(json.dumps(holder))
    with (running / "log.jsonl").open("a") as stream:
        stream.write(json.dumps({**updates[-1], "step": 130}) + '\n{"kind": "update", "st')  # a line half written
    later = training_progress(running)
    (running / LOCK_FILE).write_text(json.dumps({**holder, "pid": 2**22 + 1}))  # of a process that was killed
    assert not training_progress(running)["running"]
    assert later["running"]
    assert later["updates"][-1]["step"] == 130


def test_attention_grows_sharp_and_outputs_get_right(history_run: Path, models: dict[int, Model]) -> None:
    final = transduce.load(history_run)
    examples = development_examples(final, 3)
    states = {step: checkpoint_state(models[step], examples) for step in (20, 120)}
    assert states[120]["entropy"] < states[20]["entropy"]
    assert [one["reference"] for one in states[120]["outputs"]] == [one.target for one in examples]
    assert [one["output"] for one in states[120]["outputs"]] == [
        one.text for one in models[120].generate([example.source for example in examples])
    ]


def test_gradient_norms_by_layer_are_those_of_a_backward_pass(models: dict[int, Model]) -> None:
    model = models[40]
    examples = development_examples(model, 2)
    norms = gradient_norms(model, examples)
    assert {"encoder.rnn.layers.0", "decoder.rnn.layers.0", "decoder.output"} <= set(norms)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    losses = 0.0
    model.network.zero_grad()
    tokens = sum(len(model.target.encode(one.target).ids) + 1 for one in examples)
    for one in examples:  # one by one: no padding
        encoded = model.source_encoding.encode([one.source])
        batch = model.source_encoding.batch(encoded, [model.target.encode(one.target).ids])
        scores = model.network(batch).logits.log_softmax(-1).gather(-1, batch.labels.values[..., None])
        losses = losses - scores.sum() / tokens
    losses.backward()
    squares = [float(one.grad.square().sum()) for one in model.network.parameters() if one.grad is not None]
    model.network.zero_grad()
    assert total == pytest.approx(math.sqrt(sum(squares)), rel=1e-3)
    assert layer_of("decoder.layers.3.feed_forward.weight") == "decoder.layers.3"


def test_quality_by_length_is_that_of_the_metrics(history_run: Path) -> None:
    found = quality_by_length(history_run)
    assert set(found) == {"exact", "wer"}
    assert sum(one["count"] for one in found["exact"]) == Run(history_run).metrics()["dev"]["count"]
    assert all(one["interval"]["low"] <= one["interval"]["value"] <= one["interval"]["high"] for one in found["exact"])
