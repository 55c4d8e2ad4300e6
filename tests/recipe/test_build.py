"""Construction from recipes: registries, classes of the user, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_fixtures import RECURRENT, Command, settings

import transduce
from transduce import contracts
from transduce.errors import InputError
from transduce.recipe import build, dump, parse, registry
from transduce.run import Run

OWN = '''
import torch
from torch import nn
from transduce.contracts import Count, Encoder, AttentionScore
from transduce.flow import Batch, Memory

class Bag(Encoder):
    """an encoder without order"""

    def __init__(self, embedding, *, width: Count = 16, shout: bool = False, loud=1):
        super().__init__()
        self.width, self.embedding, self.layer = width, embedding, nn.Linear(width, width)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        values = torch.tanh(self.layer(self.embedding(batch.source.values)))
        mask = batch.source.mask
        return Memory(values, mask, (values * mask[..., None]).sum(1))

class Flat(AttentionScore):
    """all keys fit alike"""

    def __init__(self, query_width, memory_width):
        super().__init__()

    def forward(self, query, keys):
        return (query.sum(-1, keepdim=True) * 0) + keys.sum(-1)[..., None, :] * 0

class NoWidth(Encoder):
    def __init__(self, embedding, *, size: int = 3):
        super().__init__()

    def forward(self, batch, *, with_attention=False): ...

class NeedsMore(Encoder):
    def __init__(self, embedding, *, width: Count = 16, must: int):
        super().__init__()
        self.width = width

    def forward(self, batch, *, with_attention=False): ...

class Stranger: ...
'''


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of the user's own parts, and the user in it."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completed(encoder: object, decoder: object = None) -> transduce.Recipe:
    return build.complete_recipe(parse({"model": {"encoder": encoder, "decoder": decoder or RECURRENT}}))


class TestUserClasses:
    def test_trained_from_a_local_file(self, user_file: Path, pairs: Path, command: Command) -> None:
        reader = {"kind": "luong", "score": "mine:Flat"}
        model = {"encoder": {"kind": "mine:Bag", "shout": True}, "decoder": {**RECURRENT, "context": reader}}
        trained = transduce.train(settings(pairs, model, "words", steps=3), "run")
        assert trained.model.recipe.model.encoder == {"kind": "mine:Bag", "width": 16, "shout": True, "loud": 1}
        weights = trained.model.generate(["red green"])[0].attention
        assert weights is not None
        assert weights == pytest.approx(1 / 3)
        with pytest.raises(InputError, match=r"mine:Bag.*mine:Flat"):
            transduce.load("run")
        loaded = transduce.load("run", trust_user_code=True)
        assert loaded.generate(["red green"])[0].text == trained.model.generate(["red green"])[0].text
        refused = command("generate", "run", stdin=b"red\n")
        assert (refused.code, "--trust-user-code" in refused.err) == (2, True)
        assert command("generate", "run", "--trust-user-code", stdin=b"red\n").code == 0

    def test_loading_runs_no_code(self, user_file: Path, pairs: Path) -> None:
        """Wherever in the recipe the name stands, and however it is written."""
        (user_file / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
        model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}
        transduce.train(settings(pairs, model, "words", steps=1), "run")
        content = (user_file / "run" / "recipe.yaml").read_text()
        for old, new in (("kind: luong", "kind: evil:X"), ("kind: dot", "kind: ./evil.py:X"), ("kind: gru", "a")):
            changed = content.replace(old, new)
            (user_file / "run" / "recipe.yaml").write_text(changed)
            Run(user_file / "run").checkpoints.rebind()  # as a hostile run would be
            if changed != content:
                with pytest.raises(InputError):
                    transduce.load("run")
        lines = content.split("\n")
        start = next(number for number, line in enumerate(lines) if line.strip() == "context:")
        depth = len(lines[start]) - len(lines[start].lstrip())
        after = next(n for n in range(start + 1, len(lines)) if len(lines[n]) - len(lines[n].lstrip()) <= depth)
        lines[start:after] = [f"{lines[start]} evil:X"]
        (user_file / "run" / "recipe.yaml").write_text("\n".join(lines))
        Run(user_file / "run").checkpoints.rebind()
        with pytest.raises(InputError, match="evil:X"):
            transduce.load("run")
        assert not (user_file / "ran").exists()

    def test_a_recipe_file_runs_no_code_without_consent(self, user_file: Path, pairs: Path, command: Command) -> None:
        """Neither `train`, `compare` nor `explain-shapes`; what the user names on the command line is consented to."""
        (user_file / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n" + OWN)
        recipe = parse(settings(pairs, {"encoder": {"kind": "evil:Bag"}, "decoder": RECURRENT}, "words", steps=1))
        (user_file / "recipe.yaml").write_text(dump(recipe))
        for name in ("train", "compare", "explain-shapes"):
            refused = command(name, "recipe.yaml")
            assert (refused.code, "--trust-user-code" in refused.err) == (2, True)
            assert not (user_file / "ran").exists()
        assert command("explain-shapes", "recipe.yaml", "--trust-user-code").code == 0
        assert (user_file / "ran").exists()
        assert command("explain-shapes", "recipe.yaml", "model.encoder.kind=mine:Bag").code == 0

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("other:Bag", "other.py"),
            ("mine:Bagg", "Bagg"),
            ("mine:Stranger", "Stranger"),
            ("mine:Flat", "no Encoder"),
            ("mine:NoWidth", "width"),
            ("mine:NeedsMore", "must"),
            ("mine:", "''"),
        ],
    )
    def test_wrong_user_classes_are_refused(self, user_file: Path, kind: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            completed({"kind": kind})

    def test_options_are_checked_like_any_other(self, user_file: Path) -> None:
        with pytest.raises(InputError, match="did you mean 'shout'"):
            completed({"kind": "mine:Bag", "shoot": True})
        with pytest.raises(InputError, match="width"):
            completed({"kind": "mine.py:Bag", "width": -1})


class TestRegistries:
    @pytest.mark.parametrize("contract", list(registry.REGISTRIES), ids=lambda contract: contract.__name__)
    def test_every_part_has_its_contract_a_description_and_defaults(self, contract: type) -> None:
        for part in registry.REGISTRIES[contract].values():
            assert issubclass(part, contract)
            assert registry.describe(part)
            for name, (_, default) in registry.options(part).items():
                required = contract is contracts.LogitsProcessor  # a forced token has no default
                assert required or default is not ..., f"{part.__name__}.{name} has no default"

    def test_a_name_alone_stands_for_its_kind(self) -> None:
        short = completed(RECURRENT, {**RECURRENT, "context": "luong"})
        assert short == completed(RECURRENT, {**RECURRENT, "context": {"kind": "luong"}})

    @pytest.mark.parametrize("spec", [None, 3, [1], {}, {"kind": None}, {"kind": ["gru"]}, {"kind": {"a": 1}}])
    def test_wrong_specs_of_parts_are_refused(self, spec: object) -> None:
        with pytest.raises(InputError, match="kind: initial"):
            registry.complete(contracts.ContextMechanism, spec, "model.decoder.context")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [[1], {"a": 1}, {1: 2}, "x", None, float("nan"), 10**400])
    def test_wrong_options_are_refused(self, value: object) -> None:
        for name in ("layers", "width", "cell", "dropout", "context"):
            with pytest.raises(InputError):
                completed(RECURRENT, {**RECURRENT, name: value})
        with pytest.raises(InputError):
            completed({1: 2, "kind": "recurrent"})

    def test_completing_twice_is_completing_once(self) -> None:
        once = completed(RECURRENT)
        assert build.complete_recipe(once) == once

    def test_learned_positions_must_suffice_for_max_length(self) -> None:
        part = {"kind": "transformer", "width": 16, "heads": 2, "position": {"kind": "learned", "max_positions": 60}}
        for length, fits in ((59, True), (60, False)):
            recipe = parse({"model": {"encoder": part, "decoder": part}, "data": {"max_length": length}})
            if fits:
                build.complete_recipe(recipe)
            else:
                with pytest.raises(InputError, match=r"model\.encoder\.position"):
                    build.complete_recipe(recipe)


class TestMeasures:
    def test_lower_is_better_for_error_rates_and_the_loss(self) -> None:
        from transduce.evaluation.evaluate import METRICS
        from transduce.training.experiment import lower_is_better

        lower = lower_is_better(parse({"evaluation": {"metrics": list(METRICS)}}))
        assert {"loss", "per", "wer", "cer", "ter"} <= lower
        assert not {"exact", "bleu", "chrf"} & lower
        assert {*METRICS, "loss"} >= lower


@pytest.mark.slow
def test_a_recipe_is_checked_without_torchs_compiler() -> None:
    """Arithmetic on tensors without numbers would import it, which takes longer than all the rest of a start."""
    code = """
import sys
from transduce.attention.positions import POSITIONS
from transduce.recipe.build import complete_recipe
from transduce.recipe.build import meta_device
from transduce.modalities import FRONT_ENDS
from transduce.recipe import parse
for position in POSITIONS:
    part = {"kind": "transformer", "position": position}
    both = {"kind": "multi_source", "width": 16, "parts": {"one": {"kind": "recurrent"}, "two": part}}
    for encoder in (part, both):
        complete_recipe(parse({"model": {"encoder": encoder, "decoder": part}}))
for part in FRONT_ENDS.values():
    with meta_device():
        part(16)
assert "torch._dynamo" not in sys.modules and "torch.fx.experimental.symbolic_shapes" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
