"""Initialisation from trained runs, and frozen parameters."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import transduce
from transduce import transfer
from transduce.errors import InputError
from transduce.recipe import Recipe, build, parse
from transduce.run import Run
from transduce.synthetic.algorithmic import generate
from transduce.training.distributed import seed_everything
from transduce.training.experiment import train
from transduce.training.report import read_log
from transduce.training.resolve import resolve

GRU = {"kind": "recurrent", "width": 16, "dropout": 0.0}
BLOCKS = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "ff_width": 32, "norm_kind": "batch"}
Weights = dict[str, Tensor]


def recipe(pairs: Path, model: dict[str, Any], *, init: Any = None, shared: bool = False, **training: Any) -> Recipe:
    return resolve(
        {
            "data": {"train": str(pairs), "dev_size": 4},
            "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}, "shared": shared},
            "model": model,
            "init": init or {},
            "training": {
                "steps": 2,
                "batch_tokens": 256,
                "log_every": 1,
                "validate_every": 4,
                "checkpoint_every": 4,
                "patience": None,
                "schedule": {"kind": "constant", "warmup": 0},
                "optimiser": {"learning_rate": 0.01, "weight_decay": 0.1},
                **training,
            },
            "generation": {"strategy": "greedy", "max_length": 12},
            "evaluation": {"metrics": ["exact"], "resamples": 5},
        }
    )


def weights_of(run: Path) -> Weights:
    return transduce.load(run).network.state_dict()


def initialise(wanted: Recipe) -> tuple[Weights, transfer.InitReport]:
    """The weights before the first update, as `train` makes them."""
    pretrained = transfer.open_pretrained(wanted.init)
    tokenizers = transfer.choose_tokenizers(wanted, pretrained)
    seed_everything(wanted.training.seed)
    network = build.build_model(wanted.model, *[one.size for one in tokenizers])  # type: ignore[arg-type]
    report = transfer.load_pretrained(network, wanted.model, tokenizers, pretrained)
    return network.state_dict(), report


def equal(one: Weights, other: Weights, part: str = "") -> bool:
    names = [name for name in one if name.startswith(part)]
    return bool(names) and all(torch.equal(one[name], other[name]) for name in names)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("transfer") / "copies.tsv"
    file.write_text("".join(f"{one.source}\t{one.target}\n" for one in generate("copy", 60, 5)))
    return file


@pytest.fixture(scope="module")
def fewer(copies: Path) -> Path:
    """Pairs with a smaller vocabulary."""
    file = copies.with_name("fewer.tsv")
    file.write_text("".join(f"{a} {b}\t{b} {a}\n" for a in "abcd" for b in "abcd"))
    return file


@pytest.fixture(scope="module")
def both(copies: Path) -> Path:
    """An encoder and a decoder that learned to copy."""
    train(recipe(copies, {"encoder": GRU, "decoder": GRU}, steps=4), copies.with_name("both"))
    return copies.with_name("both")


@pytest.fixture(scope="module")
def alone(copies: Path) -> Path:
    """A decoder that learned to copy without an encoder."""
    train(recipe(copies, {"decoder": BLOCKS}, shared=True), copies.with_name("alone"))
    return copies.with_name("alone")


class TestTaking:
    def test_encoder_is_loaded_with_its_vocabulary(self, both: Path, fewer: Path) -> None:
        wanted = recipe(fewer, {"encoder": GRU, "decoder": BLOCKS}, init={"encoder": str(both)})
        first, report = initialise(wanted)
        given = weights_of(both)
        assert equal({k: v for k, v in given.items() if k.startswith("encoder.")}, first)
        (load,) = report.runs
        assert load.same_vocabulary == ("source",)
        assert set(load.loaded) == {name for name in given if name.startswith("encoder.")}
        assert set(load.skipped) == {name for name in given if name.startswith("decoder.")}
        assert set(report.new) == {name for name in first if name.startswith("decoder.")}
        seed_everything(wanted.training.seed)
        sizes = [first[f"{part}.embedding.weight"].size(0) for part in ("encoder", "decoder")]
        plain = build.build_model(wanted.model, *sizes).state_dict()  # type: ignore[arg-type]
        assert all(torch.equal(first[name], plain[name]) for name in report.new)  # as it would have been

    def test_whole_model_is_loaded(self, both: Path, fewer: Path) -> None:
        first, report = initialise(recipe(fewer, {"encoder": GRU, "decoder": GRU}, init={"model": str(both)}))
        assert equal(weights_of(both), first)
        assert report.new == report.runs[0].skipped == ()
        assert report.runs[0].same_vocabulary == ("source", "target")

    def test_other_tokenizer_leaves_embeddings_newly_initialised(self, both: Path, copies: Path) -> None:
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"model": str(both)})
        source = wanted.tokens.source.model_copy(update={"kind": "chars"})
        wanted = wanted.model_copy(update={"tokens": wanted.tokens.model_copy(update={"source": source})})
        _, report = initialise(wanted)
        assert report.new == ("encoder.embedding.weight",)
        assert report.runs[0].skipped == report.new
        assert report.runs[0].same_vocabulary == ("target",)

    def test_embeddings_of_another_vocabulary_are_not_loaded(self, both: Path, copies: Path, tmp_path: Path) -> None:
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"model": str(both)})
        (run,) = transfer.open_pretrained(wanted.init)
        source, target = run.tokenizers
        pieces = source.vocabulary.pieces
        turned = type(source)(replace(source.vocabulary, pieces=(*pieces[:4], *reversed(pieces[4:]))))
        network = build.build_model(wanted.model, source.size, target.size)
        report = transfer.load_pretrained(network, wanted.model, (turned, target), [run])
        assert report.new == ("encoder.embedding.weight",)

    def test_weights_of_another_shape_are_newly_initialised(self, both: Path, copies: Path) -> None:
        wide = {**GRU, "width": 24}
        first, report = initialise(recipe(copies, {"encoder": GRU, "decoder": wide}, init={"model": str(both)}))
        shapes = {name: tensor.shape for name, tensor in weights_of(both).items()}
        assert {name for name in first if shapes.get(name) != first[name].shape} == set(report.new)
        assert "decoder.embedding.weight" in report.new

    def test_encoder_and_decoder_from_two_runs(self, alone: Path, both: Path, copies: Path) -> None:
        init = {"encoder": str(both), "decoder": str(alone)}
        first, report = initialise(recipe(copies, {"encoder": GRU, "decoder": BLOCKS}, init=init))
        given = weights_of(alone)
        assert [load.section for load in report.runs] == ["encoder", "decoder"]
        assert set(report.runs[1].loaded) == set(given)
        assert all(torch.equal(first[name], given[name]) for name in given)
        assert report.new  # alone it had nothing to read from a memory
        assert all(name.startswith("decoder.") and name not in given for name in report.new)

    def test_tied_weights_are_loaded_once(self, both: Path, copies: Path) -> None:
        model = {"encoder": GRU, "decoder": GRU, "tie": "target"}
        first, report = initialise(recipe(copies, model, init={"model": str(both)}))
        given = weights_of(both)
        assert torch.equal(first["decoder.output.projection.weight"], given["decoder.embedding.weight"])
        assert report.runs[0].skipped == ("decoder.output.projection.weight",)
        assert report.new == ()

    def test_labels_of_a_head_are_collected_from_its_own_data(self, both: Path, copies: Path) -> None:
        labelled = copies.with_name("labelled.tsv")
        labelled.write_text("".join(f"{one.source}\t{len(one.source) % 3}\n" for one in generate("copy", 40, 5)))
        content = recipe(labelled, {"encoder": GRU, "decoder": GRU}, init={"model": str(both)}).model_dump()
        content["model"] = {"encoder": GRU, "head": {"kind": "classifier"}}
        content["tokens"]["target"] = {"kind": "labels"}
        content["evaluation"]["metrics"] = ["accuracy"]
        trained = train(content, copies.with_name("labels"))
        assert trained.model.source.fingerprint == transduce.load(both).source.fingerprint
        assert set(trained.model.target.vocabulary.pieces[4:]) <= {"0", "1", "2"}
        init = read_log(trained.run.log)[0]
        assert init["new"]
        assert all(name.startswith("head.") for name in init["new"])
        other = copies.with_name("other.tsv")
        other.write_text(
            "".join(f"{one.source}\t{'xy'[len(one.source.split()) % 2]}\n" for one in generate("copy", 40, 5))
        )
        content["data"]["train"], content["init"] = str(other), {"model": str(trained.run.folder)}
        wanted = resolve(content)
        target = transfer.choose_tokenizers(wanted, transfer.open_pretrained(wanted.init))[1]
        assert set(target.vocabulary.pieces[4:]) == {"x", "y"}
        assert {name.partition(".")[0] for name in initialise(wanted)[1].new} == {"head"}


class TestTelling:
    def test_console_and_log_report_the_loaded_weights(self, both: Path, copies: Path, tmp_path: Path) -> None:
        outputs = Console(file=io.StringIO(), width=200)
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"encoder": str(both)}, freeze="encoder")
        trained = train(wanted, tmp_path / "run", console=outputs)
        text = outputs.file.getvalue()  # type: ignore[attr-defined]
        report = initialise(wanted)[1]
        for line in report.describe():
            assert line in text
        assert f"{len(report.new)} weights ({report.new[0]}" in report.describe()[-1]
        moving = sum(p.numel() for name, p in trained.model.network.named_parameters() if name.startswith("decoder"))
        assert f"{moving:,} of them trained" in text
        (event,) = [line for line in read_log(trained.run.log) if line.get("event") == "init"]
        assert event["new"] == list(report.new)
        assert event["runs"][0]["loaded"] == list(report.runs[0].loaded)
        assert Run(tmp_path / "run").recipe().init.encoder == str(both)

    def test_init_paths_are_made_absolute(self, both: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(both.parent)
        assert recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"encoder": both.name}).init.encoder == str(both)


class TestFreezing:
    @pytest.mark.parametrize(
        ("kind", "average"), [("adamw", {}), ("sgd", {}), ("adam", {"ema": 0.9}), ("adamw", {"average_checkpoints": 2})]
    )
    def test_frozen_weights_do_not_change(
        self, kind: str, average: dict[str, Any], both: Path, copies: Path, tmp_path: Path
    ) -> None:
        optimiser = {"kind": kind, "learning_rate": 0.01, "weight_decay": 0.1}
        model = {"encoder": GRU, "decoder": BLOCKS}
        settings: dict[str, Any] = {"steps": 8, "optimiser": optimiser, "freeze": ["encoder"], **average}
        wanted = recipe(copies, model, init={"encoder": str(both)}, **settings)
        first, last = initialise(wanted)[0], train(wanted, tmp_path / "run").model.network.state_dict()
        assert equal(first, last, "encoder.")
        moved = [name for name in first if name.startswith("decoder.") and not torch.equal(first[name], last[name])]
        assert "decoder.embedding.weight" in moved
        assert equal(last, weights_of(tmp_path / "run"))

    def test_resumed_training_with_frozen_weights_equals_an_uninterrupted_run(
        self, both: Path, copies: Path, tmp_path: Path
    ) -> None:
        def wanted(steps: int) -> Recipe:
            freeze = ["encoder", "decoder.embedding"]
            model = {"encoder": GRU, "decoder": GRU}
            return recipe(copies, model, init={"encoder": str(moved)}, steps=steps, freeze=freeze, ema=0.5)

        moved = tmp_path / "origin"
        shutil.copytree(both, moved)
        train(wanted(8), tmp_path / "whole")
        train(wanted(4), tmp_path / "parts")
        shutil.rmtree(moved)  # a run that goes on needs it no longer
        train(wanted(8), tmp_path / "parts", resume=True)
        whole, parts = (Run(tmp_path / name).checkpoints.load(8) for name in ("whole", "parts"))
        for kind, tensors in whole.tensors.items():
            assert equal(tensors, parts.tensors[kind]), kind
        assert len([line for line in read_log(tmp_path / "parts" / "log.jsonl") if line.get("event") == "init"]) == 1
        known = {name.rpartition(".")[0] for name in whole.tensors["optimiser"]}
        assert known
        assert not any(name.startswith(("encoder.", "decoder.embedding.")) for name in known)
        thawed = wanted(8).training.model_copy(update={"freeze": ("encoder",)})
        with pytest.raises(InputError, match=r"training\.freeze: "):
            train(wanted(8).model_copy(update={"training": thawed}), tmp_path / "parts", resume=True)

    def test_running_statistics_of_frozen_norms_do_not_change(self, alone: Path, copies: Path, tmp_path: Path) -> None:
        wanted = recipe(copies, {"encoder": BLOCKS, "decoder": BLOCKS}, freeze=["encoder"])
        first, last = initialise(wanted)[0], train(wanted, tmp_path / "run").model.network.state_dict()
        assert any(name.endswith(".mean") for name in first)
        assert equal(first, last, "encoder.")
        moved = [name for name in first if name.endswith(".mean") and not torch.equal(first[name], last[name])]
        assert moved
        assert all(name.startswith("decoder.") for name in moved)

    def test_parameters_are_trainable_again_after_the_block(self) -> None:
        network = build.build_model(settle_model({"encoder": GRU, "decoder": GRU}).model, 9, 9)
        with transfer.freeze(network, ["encoder"]):
            free = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
            assert free == {name for name, _ in network.named_parameters() if name.startswith("decoder.")}
        assert all(parameter.requires_grad for parameter in network.parameters())

    def test_tied_weights_are_frozen_under_either_name(self) -> None:
        tied = settle_model({"encoder": GRU, "decoder": GRU, "tie": "target"})
        network = build.build_model(tied.model, 9, 9)
        with transfer.freeze(network, ["decoder.output.projection.weight"]):
            assert not network.get_parameter("decoder.embedding.weight").requires_grad

    @given(st.data())
    def test_a_pattern_is_a_prefix_or_a_glob(self, data: st.DataObject) -> None:
        """Every beginning up to a dot names exactly the weights below it, with a star in any place as well."""
        parts = data.draw(st.sampled_from([name.split(".") for name in NAMES]))
        beginning = parts[: data.draw(st.integers(1, len(parts)))]
        found = transfer.frozen_names(NETWORK, [".".join(beginning)])
        assert found == [name for name in NAMES if name.split(".")[: len(beginning)] == beginning]
        place = data.draw(st.integers(0, len(parts) - 1))
        starred = ".".join([*parts[:place], "*", *parts[place + 1 :]])
        if place:  # `*.weight` and the like may name every weight there is
            assert ".".join(parts) in transfer.frozen_names(NETWORK, [starred])


def settle_model(model: dict[str, Any]) -> Recipe:
    return build.complete_recipe(parse({"model": model}))


NETWORK = build.build_model(settle_model({"encoder": {**GRU, "layers": 2}, "decoder": GRU}).model, 9, 9)
NAMES = [name for name, _ in NETWORK.named_parameters()]


class TestRefusals:
    @pytest.mark.parametrize(
        ("patterns", "outputs"),
        [
            (["encodr"], "did you mean encoder"),
            (["encoder", "decoder.embeding"], r"did you mean .*decoder\.embedding"),
            (["enc"], "did you mean encoder"),
            (["zzz"], r"known: .*decoder\.embedding"),
            ("encoder.nothing.*", "did you mean"),
            ([""], "known: "),
            (["*"], "everything is frozen"),
            (["encoder", "decoder"], "everything is frozen"),
        ],
    )
    def test_wrong_patterns_are_rejected(self, patterns: Any, outputs: str, copies: Path) -> None:
        with pytest.raises(InputError, match=outputs) as caught:
            recipe(copies, {"encoder": GRU, "decoder": GRU}, freeze=patterns)
        assert caught.value.where == "training.freeze"

    @pytest.mark.parametrize(
        ("model", "section", "outputs"),
        [
            (
                {"encoder": {**GRU, "width": 24}, "decoder": GRU},
                "encoder",
                r"has shape \(\d+, 16\) in the run and \(\d+, 24\) in this model",
            ),
            ({"encoder": GRU, "head": {"kind": "classifier"}}, "decoder", "this model has no decoder"),
        ],
    )
    def test_a_run_without_fitting_weights_is_rejected(
        self, model: dict[str, Any], section: str, outputs: str, both: Path, copies: Path, tmp_path: Path
    ) -> None:
        content = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={section: str(both)}).model_dump()
        content["model"] = model
        content["tokens"]["target"] = {"kind": "labels" if "head" in model else "words"}
        with pytest.raises(InputError, match=f"init.{section}: no weight of this run fits") as caught:
            train(content, tmp_path / "run")
        assert caught.value.where == str(both)
        assert re.search(outputs, caught.value.remedy)
        assert not (tmp_path / "run").exists()

    def test_a_decoder_only_run_has_no_encoder_to_load(self, alone: Path, copies: Path, tmp_path: Path) -> None:
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"encoder": str(alone)})
        with pytest.raises(InputError, match=r"it has .*decoder\..* this model needs .*encoder\."):
            train(wanted, tmp_path / "run")

    def test_missing_runs_and_checkpoints_are_rejected(self, both: Path, copies: Path, tmp_path: Path) -> None:
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"encoder": str(tmp_path / "none")})
        with pytest.raises(InputError, match="not a run directory"):
            train(wanted, tmp_path / "run")
        Run(tmp_path / "empty").save_recipe(wanted)
        wanted = recipe(copies, {"encoder": GRU, "decoder": GRU}, init={"encoder": str(tmp_path / "empty")})
        with pytest.raises(InputError, match="no checkpoint yet"):
            train(wanted, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_unknown_init_keys_are_rejected(self) -> None:
        with pytest.raises(InputError, match=r"init\.encodr"):
            parse({"init": {"encodr": "runs/a"}})
