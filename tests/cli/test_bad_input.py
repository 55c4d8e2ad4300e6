"""Errors of the user: exit code 2, no traceback, the place is named, and a second attempt is not blocked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from run_fixtures import Called, Command, colour_pairs

from transduce.run import Run

QUICK = (
    "training.steps=4",
    "training.batch_tokens=512",
    "training.validate_every=2",
    "training.checkpoint_every=2",
    "model.encoder.width=16",
    "model.decoder.width=16",
    "evaluation.resamples=5",
    "data.dev_size=4",
)
GOOD = "".join(f"{source}\t{target}\n" for source, target in colour_pairs(40)).encode()


def refused(called: Called, *message: str) -> None:
    """Ended with 2, in words, and the words say this."""
    assert called.code == 2, (called.out, called.err)
    assert called.err.startswith("error: ")
    assert "Traceback" not in called.err
    for part in message:
        assert part in called.err


@pytest.fixture
def train(command: Command, tmp_path: Path) -> Callable[..., Called]:
    """Trains on what is given; a refusal must leave no folder that is in the way of the next try."""

    def run(source: str | Path, *settings: str) -> Called:
        called = command("train", source, "--run", tmp_path / "run", "--quiet", *QUICK, *settings)
        assert called.code == 0 or not (tmp_path / "run").exists()
        return called

    return run


class TestData:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (GOOD + b"caf\xe9\tx\n", (":41", "UTF-8", "data.invalid=drop")),
            (GOOD + b"a\0b\tx\n", (":41", "NUL", "data.invalid=drop")),
            (GOOD + b"only one column\n" + GOOD, (":41", "column", "data.invalid=drop")),
            (b"", ("empty",)),
            (b"\n\n\n", ("empty",)),
            (b"red\tRED\n", ("1 pair", "data.dev")),
        ],
    )
    def test_bad_lines_and_empty_files_are_rejected(
        self, train, tmp_path: Path, content: bytes, message: tuple[str, ...]
    ) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(content)
        refused(train(path), *message)

    def test_the_error_names_file_and_line(self, train, tmp_path: Path) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(GOOD + b"\xff\t\n")
        refused(train(path), f"{path}:41")

    def test_a_missing_file_is_rejected(self, train, tmp_path: Path) -> None:
        refused(train(tmp_path / "nothing.tsv"), str(tmp_path / "nothing.tsv"), "no such file")

    def test_a_directory_is_rejected(self, train, tmp_path: Path) -> None:
        refused(train(tmp_path), str(tmp_path), "directory", "give a file in it")

    def test_parallel_files_of_different_length_are_rejected(self, train, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("x\n" * 30)
        (tmp_path / "b").write_text("x\n" * 31)
        refused(train(f"{tmp_path / 'a'},{tmp_path / 'b'}"), "30", "31", "first suspicious line")

    @pytest.mark.parametrize("name", ["dev", "test"])
    def test_a_missing_dev_or_test_set_is_reported_before_training(
        self, train, pairs: Path, tmp_path: Path, name: str
    ) -> None:
        refused(train(pairs, f"data.{name}={tmp_path / 'no.tsv'}"), "no.tsv", "no such file")

    def test_a_corpus_without_remaining_pairs_is_rejected(self, train, pairs: Path) -> None:
        refused(train(pairs, "data.max_length=1"), str(pairs), "dropped: too long")

    def test_a_dev_set_larger_than_the_corpus_is_rejected(self, train, pairs: Path) -> None:
        refused(train(pairs, "data.dev_size=400"), "400", "data.dev_size")

    def test_invalid_lines_are_dropped_and_counted_on_request(self, command: Command, tmp_path: Path) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(GOOD + b"caf\xe9\tx\na\0b\tx\none column\nred\t\n" + b"x " * 100_000 + b"\tx\n")
        called = command("train", path, "--run", tmp_path / "run", *QUICK, "data.invalid=drop")
        assert called.code == 0, called.err
        for message in ("40 of 45", "1 dropped: too long", "1 dropped: empty", "1 dropped: NUL character"):
            assert message in called.out
        dropped = json.loads((tmp_path / "run" / "metrics.json").read_text())["data"]["dropped"]
        assert sum(dropped.values()) == 5

    def test_one_very_long_line_does_not_change_the_chosen_recipe(self, command: Command, tmp_path: Path) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(GOOD + b"x " * 100_000 + b"\ty\n")
        called = command("train", path, "--run", tmp_path / "run", *QUICK)
        assert called.code == 0, called.err
        assert "1 dropped: too long" in called.out
        path.write_bytes(GOOD)
        assert command("train", path, "--run", tmp_path / "plain", "--quiet", *QUICK).code == 0
        recipes = [yaml.safe_load((tmp_path / name / "recipe.yaml").read_text()) for name in ("run", "plain")]
        assert recipes[0]["model"] == recipes[1]["model"]

    def test_byte_order_mark_and_carriage_returns_are_removed(self, command: Command, tmp_path: Path) -> None:
        path = tmp_path / "pairs.tsv"
        path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
        assert command("train", path, "--run", tmp_path / "run", *QUICK).code == 0
        pieces = json.loads((tmp_path / "run" / "tokenizer.target.json").read_text())["pieces"]
        assert not any("\r" in piece or "\ufeff" in piece for piece in pieces)


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("training.step=3", ("training.step", "did you mean 'steps'")),
            ("trainig.steps=3", ("trainig", "did you mean 'training'")),
            ("model.encoder.widht=3", ("widht", "did you mean 'width'")),
            ("model.decoder.context={kind: luong, skore: dot}", ("skore", "did you mean 'score'")),
            ("model.encoder.kind=recurent", ("recurent", "did you mean 'recurrent'")),
            ("model.decoder.context=bahdanu", ("bahdanu", "did you mean 'bahdanau'")),
            ("model.decoder.context={kind: luong, score: dott}", ("dott", "did you mean 'dot'")),
            ("model.decoder.context=[1]", ("model.decoder.context", "kind:")),
            ("model.decoder.context=null", ("model.decoder.context", "kind:")),
            ("model.decoder.context={kind: [luong]}", ("model.decoder.context", "kind:")),
            ("model.decoder=7", ("model.decoder",)),
            ("model.encoder.layers=0", ("layers", "greater than 0")),
            ("model.encoder.dropout=1.5", ("dropout", "1.5")),
            ("training.steps=-1", ("training.steps", "greater than 0")),
            ("training.steps=many", ("training.steps", "many")),
            ("training.optimiser.learning_rate=.nan", ("learning_rate",)),
            ("training.optimiser.learning_rate=.inf", ("learning_rate",)),
            ("training.device=gpu", ("gpu", "cuda")),
            ("training.monitor=blue", ("training.monitor", "blue")),
            ("training.monitor=bleu", ("training.monitor", "evaluation.metrics")),
            ("evaluation.metrics=[blue]", ("evaluation.metrics", "did you mean 'bleu'")),
            ("model.tie=all", ("tie: all", "tokens.shared")),
            ("model.head={kind: tagger}", ("head",)),
            ("tokens.source.dropout=0.1", ("tokens.source", "bpe")),
            ("steps", ("steps", "key.path=value")),
            ("=3", ("key.path=value",)),
            ("data.train.weight=3", ("data.train", "`path`")),
            ("data=3", ("data",)),
            ("{1: 2}=3", ("{1: 2}",)),
        ],
    )
    def test_wrong_settings_are_rejected(self, train, pairs: Path, setting: str, message: tuple[str, ...]) -> None:
        refused(train(pairs, setting), *message)

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ({"encoder": {"kind": "transformer", "width": 20, "heads": 3}}, ("20", "3")),
            ({"encoder": {"kind": "transformer", "position": {"kind": "learned", "max_positions": 9}}}, ("512", "9")),
            ({"encoder": None, "head": {"kind": "tagger"}}, ("a head needs an encoder",)),
            ({"decoder": None}, ("model.decoder",)),
            ({"encoder": {"width": 16}}, ("model.encoder", "kind: recurrent |")),
            ({"encoder": {"kind": "nothing:Here"}}, ("nothing:Here", "--trust-user-code")),
        ],
    )
    def test_impossible_models_are_rejected(self, command, tmp_path: Path, pairs: Path, model: dict, message) -> None:
        path = tmp_path / "recipe.yaml"
        whole = {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "recurrent"}, **model}
        path.write_text(yaml.safe_dump({"model": whole, "data": {"train": str(pairs)}}))
        refused(command("train", path, "--run", tmp_path / "run"), *message)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("content", [b"- a\n- b\n", b"a: [", b"\xff\xfe", b"just words", b"!!python/object:x {}"])
    def test_malformed_recipes_are_rejected(self, command: Command, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content)
        refused(command("train", path, "--run", tmp_path / "run"), str(path))
        assert not (tmp_path / "run").exists()

    def test_missing_recipes_are_rejected(self, command: Command, tmp_path: Path) -> None:
        refused(command("train", tmp_path / "no.yaml"), "no.yaml")
        (tmp_path / "folder.yaml").mkdir()
        refused(command("train", tmp_path / "folder.yaml"), "folder.yaml")

    def test_the_error_of_an_empty_recipe_names_the_missing_keys(self, command: Command, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_text("")
        refused(command("train", tmp_path / "r.yaml", "--run", tmp_path / "run"), "model.decoder")
        part = "model.encoder={kind: recurrent}", "model.decoder={kind: recurrent}"
        refused(command("train", tmp_path / "r.yaml", "--run", tmp_path / "run", *part), "data.train")


@pytest.fixture
def run(attention_run: Path, tmp_path: Path) -> Path:
    """A trained run that may be damaged."""
    return Path(shutil.copytree(attention_run, tmp_path / "copy"))


class TestRuns:
    def test_a_folder_without_a_recipe_is_not_a_run(self, command: Command, tmp_path: Path) -> None:
        for name in ("generate", "evaluate"):
            refused(command(name, tmp_path), str(tmp_path), "not a run directory", "transduce train")
            refused(command(name, tmp_path / "nothing"), "not a run directory")

    def test_a_run_is_not_overwritten(self, command: Command, run: Path, pairs: Path) -> None:
        before = (run / "recipe.yaml").read_bytes()
        refused(command("train", pairs, "--run", run, *QUICK), str(run), "--resume")
        (run / "recipe.yaml").unlink()  # its checkpoints are still there
        refused(command("train", pairs, "--run", run, *QUICK), str(run), "--resume")
        (run / "recipe.yaml").write_bytes(before)
        assert command("generate", run, stdin=b"red green\n").out == "GREEN RED\n"

    def test_resuming_with_another_recipe_is_rejected(self, command: Command, run: Path) -> None:
        called = command("train", run / "recipe.yaml", "--run", run, "--resume", "model.encoder.width=16")
        refused(called, "model.encoder.width", "32", "16")

    def test_tokenizers_of_an_aborted_preparation_are_not_reused(
        self, command: Command, pairs: Path, tmp_path: Path
    ) -> None:
        """Killed between its tokenizers and its recipe: the tokenizers are not those of the next run."""
        assert command("train", pairs, "--run", tmp_path / "a", "--quiet", *QUICK).code == 0
        (tmp_path / "b").mkdir()
        for side in ("source", "target"):
            shutil.copy(tmp_path / "a" / f"tokenizer.{side}.json", tmp_path / "b")
        called = command("train", pairs, "--run", tmp_path / "b", "--quiet", *QUICK, "tokens.source.kind=chars")
        assert called.code == 0, called.err
        assert json.loads((tmp_path / "b" / "tokenizer.source.json").read_text())["kind"] == "chars"

    def test_a_vocabulary_of_another_size_is_rejected(self, command: Command, run: Path, transformer_run: Path) -> None:
        shutil.copy(transformer_run / "tokenizer.target.json", run)
        refused(command("generate", run, stdin=b"red\n"), "tokenizer.target.json", "SHA-256 expected")
        Run(run).checkpoints.rebind()
        refused(command("generate", run, stdin=b"red\n"), "tokenizers", str(run))

    def test_damaged_and_missing_tokenizers_are_rejected(self, command: Command, run: Path) -> None:
        (run / "tokenizer.target.json").write_text("{}")
        refused(command("generate", run), "tokenizer.target.json")
        (run / "tokenizer.target.json").unlink()
        refused(command("generate", run), str(run), "tokenizers are missing")

    def test_damaged_weights_fall_back_to_an_older_checkpoint_with_a_warning(self, command: Command, run: Path) -> None:
        weights = run / "checkpoints" / "final" / "weights.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        called = command("generate", run, stdin=b"red green\n")
        assert (called.code, called.out) == (0, "GREEN RED\n")
        assert called.err.startswith("warning: ")
        assert "damaged" in called.err

    def test_a_run_with_only_damaged_weights_is_rejected(self, command: Command, run: Path) -> None:
        for weights in run.glob("checkpoints/*/weights.safetensors"):
            weights.write_bytes(weights.read_bytes()[:100])
        called = command("generate", run)
        assert called.code == 2
        assert "checkpoints are damaged" in called.err
        assert "Traceback" not in called.err

    def test_a_run_without_checkpoints_is_rejected(self, command: Command, run: Path) -> None:
        shutil.rmtree(run / "checkpoints")
        refused(command("generate", run), str(run), "no checkpoint", "--resume")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda model: model["decoder"].update(width=16), "recipe"),
            (lambda model: model["decoder"].pop("width"), "256"),
            (lambda model: model["decoder"].update(context="initial"), "recipe"),
            (lambda model: model["decoder"].update(context="mine:Own"), "--trust-user-code"),
            (lambda model: model.update(decoder=None), "decoder"),
        ],
    )
    def test_a_recipe_that_does_not_fit_the_weights_is_rejected(
        self, command: Command, run: Path, change, message: str
    ) -> None:
        content = yaml.safe_load((run / "recipe.yaml").read_text())
        change(content["model"])
        (run / "recipe.yaml").write_text(yaml.safe_dump(content))
        Run(run).checkpoints.rebind()
        refused(command("generate", run, stdin=b"red\n"), message)

    def test_missing_data_of_a_run_is_reported(self, command: Command, run: Path) -> None:
        content = yaml.safe_load((run / "recipe.yaml").read_text())
        content["data"]["train"][0]["path"] = "/nothing/here.tsv"
        (run / "recipe.yaml").write_text(yaml.safe_dump(content))
        Run(run).checkpoints.rebind()
        refused(command("evaluate", run), "/nothing/here.tsv")


class TestRequests:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--beam", "0"), ("beam", "greater than 0")),
            (("--set", "beem=3"), ("beem", "did you mean 'beam'")),
            (("--set", "beam"), ("beam", "key.path=value")),
            (("--set", "strategy=gready"), ("strategy", "greedy")),
            (("--set", "strategy=greedy", "--set", "beam=wide"), ("beam", "wide")),
            (("--set", "self=1"), ("self",)),
            (("--set", "prefixes=1"), ("prefixes",)),
            (("--set", "max_source_length=0"), ("max_source_length",)),
            (("--device", "gpu"), ("gpu", "cuda")),
            (("--device", "cuda:99"), ("cuda:99",)),
        ],
    )
    def test_wrong_generation_settings_are_rejected(
        self, command: Command, attention_run: Path, arguments, message
    ) -> None:
        refused(command("generate", attention_run, *arguments, stdin=b"red\n"), *message)

    def test_input_that_is_not_utf8_is_rejected(self, command: Command, attention_run: Path) -> None:
        refused(command("generate", attention_run, stdin=b"red\nr\xffd\n"), "standard input:2", "UTF-8")

    def test_missing_input_files_are_rejected(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        refused(command("generate", attention_run, tmp_path / "no.txt"), "no.txt")
        refused(command("score", attention_run, tmp_path / "no.tsv"), "no.tsv")
        refused(command("evaluate", attention_run, tmp_path / "no.tsv"), "no.tsv")
        refused(command("evaluate", attention_run, "--against", tmp_path), "not a run directory")

    def test_an_output_in_a_missing_folder_is_rejected(
        self, command: Command, attention_run: Path, tmp_path: Path
    ) -> None:
        refused(command("generate", attention_run, "--output", tmp_path / "no" / "out", stdin=b"red\n"), "no/out")
        refused(command("explain", attention_run, "red", "--html", tmp_path / "no" / "x"), "no/x")

    def test_explain_rejects_an_empty_or_invalid_source(self, command: Command, attention_run: Path) -> None:
        refused(command("explain", attention_run, " "), "empty")
        refused(command("explain", attention_run, "r\udcff"), "Unicode")

    def test_a_seed_of_any_size_is_accepted(self, command: Command, attention_run: Path) -> None:
        called = command("generate", attention_run, "--sample", "--set", f"seed={10**30}", stdin=b"red\n")
        assert called.code == 0, called.err
