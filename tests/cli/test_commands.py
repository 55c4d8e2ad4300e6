"""The commands: output files, printed text, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from run_fixtures import Command, colour_pairs

import transduce
from transduce.cli import GROUPS, app

QUICK = (
    "training.steps=12",
    "training.batch_tokens=512",
    "training.validate_every=6",
    "training.checkpoint_every=6",
    "model.encoder.width=16",
    "model.decoder.width=16",
    "evaluation.resamples=10",
    "data.dev_size=8",
)
COMMANDS = {name: function for group in GROUPS.values() for name, function in group.items()}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def shell(*arguments: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None):
    line = [sys.executable, "-m", "transduce", *map(str, arguments)]
    return subprocess.run(line, input=stdin, capture_output=True, timeout=600, env={**os.environ, **(env or {})})


class TestTrain:
    def test_train_from_pairs_alone(self, command: Command, pairs: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        called = command("train", pairs, "--run", run, *QUICK)
        assert called.code == 0, called.err
        assert {"recipe.yaml", "tokenizer.source.json", "tokenizer.target.json"} <= {p.name for p in run.iterdir()}
        assert {"log.jsonl", "metrics.json", "curves.png"} <= {p.name for p in run.iterdir()}
        for checkpoint in ("step-00000006", "step-00000012", "final"):
            assert (run / "checkpoints" / checkpoint / "weights.safetensors").stat().st_size
            assert (run / "checkpoints" / checkpoint / "manifest.json").is_file()
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
        saved = yaml.safe_load((run / "recipe.yaml").read_text())
        assert saved["training"]["steps"] == 12
        assert saved["data"]["train"][0]["path"] == str(pairs)
        assert saved["model"]["decoder"]["context"]["kind"] == "luong"  # every default is written down
        assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        metrics = json.loads((run / "metrics.json").read_text())
        assert metrics["dev"]["count"] == 8
        assert metrics["data"]["kept"] == 400
        for message in ("the recipe:", "kind: recurrent", "400 of 400 pairs kept", f"transduce generate {run}"):
            assert message in called.out

    def test_a_plan_explains_and_writes_nothing(self, command: Command, pairs: Path, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        called = command("train", pairs, "--run", tmp_path / "run", "--plan", "--minutes", 3, *QUICK)
        assert called.code == 0, called.err
        assert sorted(tmp_path.rglob("*")) == before
        for text in (
            *("400 pairs", "3 minutes", "tokens.source", "an update takes about"),
            *("training.steps: 12", "the recipe:"),
        ):
            assert text in called.out
        recipe = yaml.safe_load(called.out.partition("the recipe:")[2])
        assert recipe["training"]["minutes"] == 3
        for key in ("batch_tokens", "monitor", "min_epochs"):
            assert f"training.{key}: {recipe['training'][key]}\n" in called.out
        assert "leave out --plan" in command("train", tmp_path / "a.yaml", "--plan").err

    @pytest.mark.parametrize("given", [["--ensemble", "1"], ["--effort", "quick"], ["--effort", "best"]])
    def test_a_plan_has_the_ensemble_of_the_command(self, command: Command, tmp_path: Path, given: list[str]) -> None:
        """One network where one is asked for; else the plan says how many are chosen."""
        words = tmp_path / "words.tsv"
        words.write_text("".join(f"{number:04}\t{number:04}\n" for number in range(200)))
        plan = ["train", words, "--task", "transliterate", "--plan", "--minutes", "30", "training.device=cpu"]
        assert "ensemble: 5" in command(*plan).out
        alone = command(*plan, *given).out
        assert "an update takes about" in alone
        assert "ensemble: " not in alone
        assert "for each model" not in alone

    def test_train_from_a_recipe_with_overrides(self, command: Command, pairs: Path, tmp_path: Path) -> None:
        test = tmp_path / "test.tsv"
        test.write_text("red green\tGREEN RED\n" * 3)
        recipe = tmp_path / "small.yaml"
        part = {"kind": "transformer", "layers": 1, "heads": 2, "ff_width": 16}
        recipe.write_text(yaml.safe_dump({"model": {"encoder": part, "decoder": part}, "tokens": {"shared": True}}))
        changes = (f"data.train={pairs}", f"data.test={test}", "model.tie=all", "model.encoder.width=16")
        called = command("train", recipe, "--run", tmp_path / "run", "--quiet", *changes, *QUICK)
        assert (called.code, called.out, called.err) == (0, "", "")
        saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
        assert saved["model"]["tie"] == "all"
        assert json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["count"] == 3

    def test_train_and_evaluate_parallel_files(self, command: Command, tmp_path: Path) -> None:
        for side, name in enumerate(("a.src", "a.tgt")):
            (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in colour_pairs(60)))
        both = f"{tmp_path / 'a.src'},{tmp_path / 'a.tgt'}"
        called = command("train", tmp_path / "a.src", tmp_path / "a.tgt", "--run", tmp_path / "run", *QUICK)
        assert called.code == 0, called.err
        wrong = command("train", tmp_path / "a.src", "nothing.tgt", "--run", tmp_path / "other")
        assert wrong.code == 2
        assert f"parallel files: {tmp_path / 'a.src'},nothing.tgt" in wrong.err
        evaluated = command("evaluate", tmp_path / "run", both)
        assert evaluated.code == 0, evaluated.err

    def test_train_on_named_columns_of_standard_input(self, command: Command, tmp_path: Path) -> None:
        lines = "".join(f"{number}\t{target}\t{source}\n" for number, (source, target) in enumerate(colour_pairs(60)))
        line = ("train", "-", "--columns", "in,out", "--run", tmp_path / "run", *QUICK)
        assert "the file is empty" in command(*line).err
        called = command(*line, stdin=f"id\tout\tin\n{lines}".encode())
        assert called.code == 0, called.err
        (corpus,) = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["data"]["train"]
        assert (corpus["path"], corpus["columns"]) == (str(tmp_path / "run.tsv"), ["in", "out"])
        assert json.loads((tmp_path / "run" / "metrics.json").read_text())["data"]["kept"] == 60

    def test_a_finished_run_resumes_with_more_steps(self, command: Command, pairs: Path, tmp_path: Path) -> None:
        line = ("train", pairs, "--run", tmp_path / "run", *QUICK)
        assert command(*line).code == 0
        called = command(*line, "training.steps=18", "--resume")
        assert called.code == 0, called.err
        assert (tmp_path / "run" / "checkpoints" / "step-00000018").is_dir()

    def test_names_that_look_like_markup_are_printed_verbatim(self, command: Command, tmp_path: Path) -> None:
        data = tmp_path / "[bold]pairs.tsv"
        data.write_text("".join(f"[red]{s}[/x]\t{t}\n" for s, t in colour_pairs(40)) + "no target\t\n")
        called = command("train", data, "--run", tmp_path / "[dim]", *QUICK)
        assert called.code == 0, called.err
        for message in (str(data), str(tmp_path / "[dim]"), "[red]"):
            assert message in called.out

    def test_suggested_commands_are_safe_to_paste(self, command: Command, tmp_path: Path) -> None:
        data = tmp_path / "pairs.tsv"
        data.write_text("".join(f"$(touch {tmp_path}/pwned) {s}\t{t}\n" for s, t in colour_pairs(40)))
        called = command("train", data, "--run", tmp_path / "run", *QUICK)
        echo = next(line for line in called.out.splitlines() if line.strip().startswith("echo "))
        generated = subprocess.run(["sh", "-c", echo.partition("|")[0]], capture_output=True, text=True)
        assert generated.stdout.startswith("$(touch")
        assert not (tmp_path / "pwned").exists()


class TestGenerate:
    def test_generate_from_standard_input(self, command: Command, attention_run: Path) -> None:
        called = command("generate", attention_run, stdin=b"red green\nblue white black\n")
        assert (called.code, called.out) == (0, "GREEN RED\nBLACK WHITE BLUE\n")

    def test_generate_from_file_to_file(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        (tmp_path / "in").write_text("red green\n")
        called = command("generate", attention_run, tmp_path / "in", "--output", tmp_path / "out", "--beam", "2")
        assert (called.code, called.out) == (0, "")
        assert (tmp_path / "out").read_text() == "GREEN RED\n"

    def test_nbest_lists_have_the_format_of_moses(
        self, command: Command, model: transduce.Model, attention_run: Path
    ) -> None:
        called = command("generate", attention_run, "--nbest", "3", stdin=b"red green\n\nblue\n")
        rows = [line.split(" ||| ") for line in called.out.splitlines()]
        assert [row[0] for row in rows] == ["0", "0", "0", "1", "2", "2", "2"]
        first, empty, last = model.generate(["red green", "", "blue"], nbest=3)
        assert [row[1] for row in rows] == [one.text for out in (first, empty, last) for one in out.nbest or (out,)]
        for row, one in zip(rows, first.nbest, strict=False):
            assert row[2] == f"F0= {row[3]}"
            assert float(row[3]) == pytest.approx(one.score, abs=1e-4)

    def test_json_output_has_tokens_scores_alignment_and_nbest(self, command: Command, attention_run: Path) -> None:
        called = command("generate", attention_run, "--json", "--nbest", "3", "--align", stdin=b"red green\n\n")
        first, empty = map(json.loads, called.out.splitlines())
        assert first["text"] == "GREEN RED"
        assert first["tokens"] == ["GREEN", "RED", "</s>"]
        assert first["score"] == pytest.approx(sum(first["token_scores"]))
        assert len(first["token_scores"]) == 3
        assert first["alignment"] == [[0, 1], [1, 0]]
        assert first["nbest"][0]["text"] == "GREEN RED"
        assert len(first["nbest"]) == 3
        assert len({one["text"] for one in first["nbest"]}) == 3
        assert (empty["text"], empty["tokens"], empty["alignment"]) == ("", [], [])
        assert "empty lines: 1" in called.err

    def test_align_writes_pharaoh_format(self, command: Command, attention_run: Path) -> None:
        called = command("generate", attention_run, "--align", stdin=b"red green blue\n\nwhite red\n")
        assert called.out == "0-2 1-1 2-0\n\n0-1 1-0\n"

    def test_align_without_attention_is_counted(self, command: Command, bottleneck_run: Path) -> None:
        called = command("generate", bottleneck_run, "--align", stdin=b"red green\n\n")
        assert called.out == "\n\n"
        assert "lines without alignment, because the model has no attention: 1" in called.err

    def test_samples_depend_on_the_seed(self, command: Command, bottleneck_run: Path) -> None:
        lines = b"red green\n" * 20

        def draw(seed: int) -> str:
            more = ("--set", f"seed={seed}", "--set", "temperature=3")
            return command("generate", bottleneck_run, "--sample", *more, stdin=lines).out

        one = draw(7)
        assert one == draw(7) != draw(8)
        assert len(set(one.splitlines())) > 5  # equal lines are drawn apart

    def test_outputs_begin_with_the_prefix(self, command: Command, attention_run: Path) -> None:
        called = command("generate", attention_run, "--prefix", "BLACK BLACK", stdin=b"red green\nblue red\n\n")
        first, second, empty = called.out.split("\n")[:3]
        assert first.startswith("BLACK BLACK")
        assert second.startswith("BLACK BLACK")
        assert empty == ""
        plain = command("generate", attention_run, stdin=b"red green\n").out
        assert command("generate", attention_run, "--prefix", "", stdin=b"red green\n").out == plain

    def test_the_input_file_is_not_overwritten(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        (tmp_path / "in").write_text("red green\n")
        assert command("generate", attention_run, tmp_path / "in", "--output", tmp_path / "in").code == 2
        assert (tmp_path / "in").read_text() == "red green\n"

    def test_a_closed_pipe_ends_the_command_quietly(self, attention_run: Path) -> None:
        line = (
            f"yes 'red green' | head -8000 | {sys.executable} -m transduce generate {attention_run} --beam 1 | head -1"
        )
        done = subprocess.run(["bash", "-c", f"{line}; exit ${{PIPESTATUS[2]}}"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (141, "GREEN RED\n", "")


HOSTILE = [
    "",
    "   ",
    "\t",
    "red\tgreen",
    "red\u2028green",
    "\u0085",
    "x\u0085y",
    "👩‍👩‍👧 red",
    "\ufeff",
    "red\r",
    "e\u0301",
]
LINES = st.lists(
    st.one_of(
        st.sampled_from([*HOSTILE, "red green", "blue", "white " * 70]),
        st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=20),
    ),
    min_size=1,
    max_size=12,
)


class TestOneLineInOneLineOut:
    @pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
    @profile(deadline=None, max_examples=12)
    @given(lines=LINES, ending=st.sampled_from(["\n", "\r\n"]), closed=st.booleans())
    def test_any_file_gives_one_output_per_line(
        self, command: Command, request, run: str, lines: list[str], ending: str, closed: bool
    ) -> None:
        text = ending.join(lines) + (ending if closed or not lines[-1] else "")
        folder = request.getfixturevalue(run)
        called = command("generate", folder, "--beam", "1", "--set", "max_length=8", stdin=text.encode())
        assert called.code == 0, called.err
        written = called.out.split("\n")
        assert written.pop() == ""
        assert len(written) == len(lines)
        blank = [not line.removeprefix("\ufeff" if number == 0 else "").strip() for number, line in enumerate(lines)]
        assert all(output == "" for output, empty in zip(written, blank, strict=True) if empty)

    @pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
    @pytest.mark.parametrize("beam", ["1", "4"])
    def test_outputs_do_not_depend_on_the_batch_size(self, command: Command, request, run: str, beam: str) -> None:
        folder = request.getfixturevalue(run)
        lines = [*HOSTILE, *(source for source, _ in colour_pairs(40, seed=9)), "white " * 70]
        stdin = "".join(f"{line}\n" for line in lines).encode()

        def outputs(batch_tokens: int) -> list[str]:
            more = ("--beam", beam, "--json", "--set", f"batch_tokens={batch_tokens}", "--set", "max_length=16")
            return command("generate", folder, *more, stdin=stdin).out.splitlines()

        alone, together = outputs(1), outputs(100_000)
        assert [json.loads(line)["text"] for line in alone] == [json.loads(line)["text"] for line in together]
        assert [json.loads(line)["score"] for line in alone] == pytest.approx(
            [json.loads(line)["score"] for line in together], abs=1e-4
        )

    def test_line_breaks_inside_an_output_become_spaces(self) -> None:
        from transduce.storage import single_line

        assert single_line("a\nb\r\nc") == "a b  c"

    def test_outputs_are_in_the_order_of_the_inputs(
        self, command: Command, attention_run: Path, model: transduce.Model
    ) -> None:
        lines = [source for source, _ in colour_pairs(40, seed=5)]
        stdin = "".join(f"{line}\n" for line in lines).encode()
        one_by_one = [model.generate([line])[0].text for line in lines]
        assert command("generate", attention_run, stdin=stdin).out.splitlines() == one_by_one
        assert len(set(one_by_one)) > 20

    @pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
    def test_long_sources_are_cut_and_counted(self, command: Command, request, run: str) -> None:
        """At `max_source_length`, or where learned positions end."""
        stdin = b"red green\n" + b"white " * 500 + b"\n"
        settings = ("--set", "max_source_length=100", "--set", "long_sources=truncate")
        called = command("generate", request.getfixturevalue(run), "--json", *settings, stdin=stdin)
        short, long = map(json.loads, called.out.splitlines())
        assert (short["source_cut"], long["source_cut"]) == (False, True)
        assert "sources cut to `max_source_length`: 1" in called.err


class TestEvaluate:
    def test_evaluate_uses_the_development_set_by_default(self, command: Command, attention_run: Path) -> None:
        called = command("evaluate", attention_run)
        assert called.code == 0, called.err
        for message in ("dev", "exact", "wer", "source tokens"):
            assert message in called.out
        # A signature says how a metric was computed; the name alone says nothing.
        assert not {"exact", "wer"} & set(called.out.split("\n"))

    def test_evaluate_writes_all_numbers_as_json(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        (tmp_path / "test.tsv").write_text("red green\tGREEN RED\nblue red\tnonsense\n")
        called = command("evaluate", attention_run, tmp_path / "test.tsv", "--json", tmp_path / "scores.json")
        assert called.code == 0, called.err
        content = json.loads((tmp_path / "scores.json").read_text())
        assert content["scores"]["exact"]["value"] == 50
        assert content["scores"]["exact"]["low"] <= 50 <= content["scores"]["exact"]["high"]
        assert content["set"] == str(tmp_path / "test.tsv")
        assert content["by_length"]["exact"]

    def test_evaluate_against_a_second_run(
        self, command: Command, attention_run: Path, bottleneck_run: Path, pairs: Path, tmp_path: Path
    ) -> None:
        line = ("evaluate", attention_run, "--json", tmp_path / "a.json", "--against")
        called = command(*line, bottleneck_run)
        assert called.code == 0, called.err
        verdict = json.loads((tmp_path / "a.json").read_text())["against"]["verdicts"]["exact"]
        assert str(attention_run) in verdict
        assert command(*line, attention_run).code == 2  # a run against itself

    def test_evaluate_rejects_an_output_in_a_missing_folder(
        self, command: Command, attention_run: Path, tmp_path: Path
    ) -> None:
        called = command("evaluate", attention_run, "--json", tmp_path / "no" / "a.json")
        assert called.code == 2
        assert str(tmp_path / "no") in called.err


class TestScore:
    def test_score_writes_one_line_per_pair(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        (tmp_path / "p.tsv").write_text("red green\tGREEN RED\nred green\tRED\n")
        called = command("score", attention_run, tmp_path / "p.tsv")
        right, wrong = ([float(part) for part in line.split("\t")] for line in called.out.splitlines())
        assert right[0] > wrong[0]
        assert right[1] < wrong[1]
        assert "2 pairs, perplexity" in called.err

    def test_scores_equal_those_of_generate(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        generated = json.loads(command("generate", attention_run, "--json", stdin=b"red green\n").out)
        (tmp_path / "p.tsv").write_text(f"red green\t{generated['text']}\n")
        command("score", attention_run, tmp_path / "p.tsv", "--json", "--output", tmp_path / "scores")
        scored = json.loads((tmp_path / "scores").read_text())
        assert scored["tokens"] == generated["tokens"]
        assert scored["token_scores"] == pytest.approx(generated["token_scores"], abs=1e-4)


class TestExplain:
    def test_explain_writes_png_and_html(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        html, png = tmp_path / "a.html", tmp_path / "a.png"
        called = command("explain", attention_run, "red [b]green", "--html", html, "--png", png)
        assert called.code == 0, called.err
        assert "red [b]green" in called.out
        assert "RED" in called.out
        assert png.read_bytes().startswith(b"\x89PNG")
        page = html.read_text()
        assert "<script" in page
        assert "default-src 'none'" in page

    def test_explain_without_attention(self, command: Command, bottleneck_run: Path, tmp_path: Path) -> None:
        html, png = tmp_path / "a.html", tmp_path / "a.png"
        called = command("explain", bottleneck_run, "red green", "--html", html)
        assert called.code == 0, called.err
        assert "does not attend" in called.out
        html.unlink()
        called = command("explain", bottleneck_run, "red green", "--html", html, "--png", png)
        assert called.code == 2
        assert html.is_file()  # what can be drawn is drawn
        assert not png.exists()

    def test_explain_selects_layers_heads_and_levels(self, command: Command, transformer_run: Path) -> None:
        line = ("explain", transformer_run, "red green")
        assert command(*line, "--layer", "0", "--head", "1", "--level", "token").code == 0
        for wrong in (("--layer", "1"), ("--head", "two"), ("--level", "letter")):
            called = command(*line, *wrong)
            assert (called.code, called.err.count("\n")) == (2, 2)
            assert wrong[1] in called.err


@cache
def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands


class TestHelp:
    def test_models_lists_every_registry(self, command: Command) -> None:
        from transduce.recipe.registry import REGISTRIES

        called = command("models")
        listed = [line.split()[0] for line in called.out.splitlines() if line.strip()]
        for registry in REGISTRIES.values():
            assert set(registry) <= set(listed)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_shows_an_example(self, command: Command, name: str) -> None:
        called = command(name, "--help")
        assert called.code == 0
        assert "Example" in called.out
        assert f"transduce {name}" in called.out.partition("Example")[2]
        # Nothing that is written is taken for markup and lost, such as <s>.
        shown = re.sub(r"[\s│•]+", "", called.out)
        parameters = commands()[name].params
        texts = [COMMANDS[name].__doc__ or "", *(getattr(one, "help", None) or "" for one in parameters)]
        words = {word for text in texts for word in re.sub("[`*]|^ *- ", " ", text, flags=re.MULTILINE).split()}
        assert [word for word in words if word not in shown] == []

    def test_an_unknown_data_set_lists_them_all(self, command: Command) -> None:
        from transduce.synthetic import SYNTHETIC

        message = command("data", "nosuch").err
        assert [name for name in SYNTHETIC if name not in message] == []

    def test_data_are_written_in_splits(self, command: Command, tmp_path: Path) -> None:
        line = ("data", "reverse", "--count", "30", "--dev", "5", "--test", "6", "--length", "3-4")
        assert command(*line, "--output", tmp_path / "letters").code == 0
        lines = [line for path in (tmp_path / "letters").iterdir() for line in path.read_text().splitlines()]
        assert len(lines) == 41
        assert {len(line.split("\t")[0].split()) for line in lines} == {3, 4}
        assert "give --output FOLDER" in command(*line).err
        assert "--held-out" in command(*line, "--held-out", "--output", tmp_path / "other").err
        assert "'few' is not a range" in command("data", "sort", "--length", "few").err
        assert "the length of shapes cannot be chosen" in command("data", "shapes", "--length", "3-4").err

    def test_help_imports_neither_torch_nor_numpy(self) -> None:
        code = "import sys; sys.argv = ['transduce', '--help']\nfrom transduce.cli import main\n"
        code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
        done = python(code)
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout


class TestProcesses:
    @pytest.mark.slow
    def test_exit_codes_streams_and_encoding(self, command: Command, attention_run: Path, tmp_path: Path) -> None:
        ascii_locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}  # input and output are UTF-8 all the same
        good = shell("generate", attention_run, "--pairs", stdin="red green\nrød\n".encode(), env=ascii_locale)
        assert (good.returncode, good.stderr) == (0, b"")
        pairs = [line.split("\t") for line in good.stdout.decode().splitlines()]
        assert pairs[0] == ["red green", "GREEN RED"]
        assert pairs[1][0] == "rød"
        bad = command("generate", tmp_path)
        assert (bad.code, bad.out) == (2, "")
        assert bad.err.startswith("error: ")
        assert "Traceback" not in bad.err
