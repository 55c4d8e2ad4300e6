"""COMET, BERTScore and spBLEU through modules with the call signatures of their libraries."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU

from transduce.errors import InputError
from transduce.evaluation import learned_metrics
from transduce.evaluation.evaluate import SystemOutput, evaluate, find_metric
from transduce.evaluation.output_files import evaluate_files
from transduce.recipe import parse
from transduce.recipe.registry import user_classes

HYPOTHESES = ["das Haus ist rot", "", "ein Hund", "ja ja"]
REFERENCES = [["das Haus ist rot"], ["nein"], ["der Hund", "ein Hund ist da"], ["ja"]]
SOURCES = ["the house is red", "no", "a dog", "yes"]


def greedy_f1(one: str, other: str) -> float:
    """F1 of greedy matches, where the similarity of two words is the share of letters at equal places."""

    def similarity(a: str, b: str) -> float:
        return sum(x == y for x, y in zip(a, b, strict=False)) / max(len(a), len(b))

    precision = np.mean([max(similarity(a, b) for b in other.split()) for a in one.split()])
    recall = np.mean([max(similarity(a, b) for a in one.split()) for b in other.split()])
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


class BertScoreLibrary(ModuleType):
    """The documented parameters of bert_score.score; the calls are recorded."""

    __version__ = "0.3.13"

    def __init__(self) -> None:
        super().__init__("bert_score")
        self.utils = ModuleType("bert_score.utils")
        self.utils.model2layers = {"google/tiny-bert": 3}  # type: ignore[attr-defined]
        self.calls: list[dict] = []

    def score(
        self, cands, refs, model_type=None, num_layers=None, verbose=False, idf=False, device=None, batch_size=64,
        nthreads=4, all_layers=False, lang=None, return_hash=False, rescale_with_baseline=False, baseline_path=None,
        use_fast_tokenizer=False,
    ):  # fmt: skip
        self.calls.append({"model_type": model_type, "num_layers": num_layers, "batch_size": batch_size})
        best = torch.tensor([max(greedy_f1(text, one) for one in line) for text, line in zip(cands, refs, strict=True)])
        return best, best, best


class CometLibrary(ModuleType):
    """load_from_checkpoint and predict of unbabel-comet: the score is the share of words that the reference has."""

    __version__ = "2.2.7"

    def __init__(self) -> None:
        super().__init__("comet")
        self.references, self.samples = True, list[dict]()

    def load_from_checkpoint(self, checkpoint_path, reload_hparams=False, strict=False, local_files_only=False):
        assert local_files_only
        return SimpleNamespace(predict=self.predict, requires_references=lambda: self.references)

    def predict(self, samples, batch_size=16, gpus=1, devices=None, mc_dropout=0, progress_bar=True):
        assert gpus == 0
        self.samples = samples
        scores = [self.quality(one["mt"].split(), one.get("ref", one["src"]).split()) for one in samples]
        return SimpleNamespace(scores=scores, system_score=float(np.mean(scores)))

    def quality(self, words: list[str], gold: list[str]) -> float:
        return sum(word in gold for word in words) / max(len(words), 1) - 0.1


class CharacterProcessor:
    """The two methods of SentencePieceProcessor that sacrebleu calls; pieces are characters."""

    def Load(self, file: str) -> None:  # noqa: N802
        with open(file) as stream:
            if stream.read() != "model":
                raise RuntimeError("could not parse")

    def EncodeAsPieces(self, text: str) -> list[str]:  # noqa: N802
        return list(text.replace(" ", "▁"))


@pytest.fixture
def bert_score(monkeypatch: pytest.MonkeyPatch) -> BertScoreLibrary:
    library = BertScoreLibrary()
    monkeypatch.setitem(sys.modules, "bert_score", library)
    monkeypatch.setitem(sys.modules, "bert_score.utils", library.utils)
    return library


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> CometLibrary:
    library = CometLibrary()
    monkeypatch.setitem(sys.modules, "comet", library)
    learned_metrics._load_comet.cache_clear()
    return library


@pytest.fixture
def folders(tmp_path):
    for name in ("tiny-bert", "unnamed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (tmp_path / "wmt" / "checkpoints").mkdir(parents=True)
    (tmp_path / "wmt" / "hparams.yaml").write_text("class_identifier: regression_metric\n")
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, tmp_path / "wmt" / "checkpoints" / "model.ckpt")
    return tmp_path


def test_bertscore_is_the_best_f1_of_a_line_and_0_without_words(folders, bert_score) -> None:
    metric = find_metric({"kind": "bertscore", "model": str(folders / "tiny-bert"), "batch_size": 2})
    rows = metric.statistics(HYPOTHESES, REFERENCES)
    expected = [
        max(greedy_f1(text, one) for one in line) if text else 0
        for text, line in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    np.testing.assert_allclose(rows, [[score, 1] for score in expected], rtol=1e-6)
    assert metric.value(rows.sum(0)) == pytest.approx(25 * sum(expected))
    assert bert_score.calls == [{"model_type": str(folders / "tiny-bert"), "num_layers": 3, "batch_size": 2}]
    assert metric.signature == "bertscore|model:tiny-bert|refs:best|mean|bert_score:0.3.13|layer:3|idf:no|rescaled:no"
    assert metric.statistics([], []).shape == (0, 2)
    assert metric.statistics([" "], [["a"]]).tolist() == [[0, 1]]


def test_bertscore_refuses_what_it_cannot_read(folders, bert_score) -> None:
    with pytest.raises(InputError, match="recommends no layer for unnamed"):
        find_metric({"kind": "bertscore", "model": str(folders / "unnamed")}).check()
    find_metric({"kind": "bertscore", "model": str(folders / "unnamed"), "layer": 2}).check()
    for content, problem in (({"auto_map": {"AutoModel": "x.py"}}, "code of the model"), ({}, "no model_max_length")):
        (folders / "unnamed" / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=problem):
            find_metric({"kind": "bertscore", "model": str(folders / "unnamed"), "layer": 2}).check()
    with pytest.raises(InputError, match="layer"):
        find_metric({"kind": "bertscore", "layer": "last"})


def test_comet_reads_sources_and_takes_the_best_reference(folders, comet) -> None:
    metric = find_metric({"kind": "comet", "model": str(folders / "wmt")})
    rows = metric.source_statistics(SOURCES, HYPOTHESES, REFERENCES)
    pairs = zip(HYPOTHESES, REFERENCES, strict=True)
    best = [max(comet.quality(text.split(), one.split()) for one in line) for text, line in pairs]
    np.testing.assert_allclose(rows, [[score, 1] for score in best])
    assert comet.samples[2:4] == [{"src": "a dog", "mt": "ein Hund", "ref": one} for one in REFERENCES[2]]
    assert metric.signature == "comet|model:wmt|refs:best|mean|comet:2.2.7"
    comet.references = False
    metric.source_statistics(SOURCES, HYPOTHESES, REFERENCES)
    assert comet.samples == [{"src": s, "mt": h} for s, h in zip(SOURCES, HYPOTHESES, strict=True)]
    found = evaluate(
        SystemOutput(HYPOTHESES, sources=SOURCES), REFERENCES, None, [{"kind": "comet", "model": metric.model}]
    )
    assert "comet" in found.scores
    with pytest.raises(InputError, match="reads the sources"):
        evaluate(SystemOutput(HYPOTHESES), REFERENCES, None, [{"kind": "comet", "model": metric.model}])


def test_a_comet_checkpoint_with_code_is_refused(folders, comet) -> None:
    checkpoint = folders / "wmt" / "checkpoints" / "model.ckpt"
    torch.save({"state_dict": {}, "callback": SimpleNamespace(a=1)}, checkpoint)
    with pytest.raises(InputError, match="no plain tensors"):
        find_metric({"kind": "comet", "model": str(folders / "wmt")}).source_statistics(["a"], ["b"], [["c"]])
    checkpoint.unlink()
    with pytest.raises(InputError, match=r"no checkpoints/model\.ckpt"):
        find_metric({"kind": "comet", "model": str(folders / "wmt")}).check()


def test_spbleu_is_bleu_of_the_pieces(tmp_path, monkeypatch) -> None:
    library = ModuleType("sentencepiece")
    library.SentencePieceProcessor = CharacterProcessor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", library)
    (tmp_path / "spm").write_text("model")
    metric = find_metric({"kind": "spbleu", "tokenizer": "flores101", "model": str(tmp_path / "spm")})
    found = metric.value(metric.statistics(HYPOTHESES, [line[:1] for line in REFERENCES]).sum(0))
    split = [" ".join(text.replace(" ", "▁")) for text in HYPOTHESES]
    gold = [" ".join(line[0].replace(" ", "▁")) for line in REFERENCES]
    assert found == pytest.approx(BLEU(tokenize="none", force=True).corpus_score(split, [gold]).score)
    assert "|tok:flores101|" in metric.signature
    assert metric.signature.endswith("|spm:9372c470")
    (tmp_path / "spm").write_text("damaged")
    with pytest.raises(InputError, match="could not parse"):
        find_metric({"kind": "spbleu", "model": str(tmp_path / "spm")}).statistics(["a"], [["a"]])
    with pytest.raises(InputError, match="no SentencePiece model") as caught:
        find_metric({"kind": "spbleu", "model": str(tmp_path / "none")}).check()
    assert "model: FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"), [("spbleu", "sentencepiece"), ("bertscore", "bert_score"), ("comet", "comet")]
)
def test_a_missing_library_names_the_extra(name: str, module: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"transduce\[{name}\]"):
        find_metric(name).check()


@pytest.mark.parametrize("name", ["bertscore", "comet"])
def test_a_missing_folder_is_an_error(name: str, bert_score, comet) -> None:
    for spec in (name, {"kind": name, "model": "no/such"}):
        with pytest.raises(InputError, match="model: FOLDER"):
            find_metric(spec).check()


def test_files_are_evaluated_with_options_and_sources(folders, comet, command) -> None:
    for name, lines in {"out": HYPOTHESES, "ref": [line[0] for line in REFERENCES], "src": SOURCES}.items():
        (folders / name).write_text("".join(f"{line}\n" for line in lines))
    options = ("--hypotheses", folders / "out", "--references", folders / "ref")
    metrics = f"chrf, {{kind: comet, model: {folders / 'wmt'}}}"
    called = command(
        "evaluate", *options, "--sources", folders / "src", "--metrics", metrics, "--json", folders / "found"
    )
    assert called.code == 0, called.err
    scores = json.loads((folders / "found").read_text())["systems"][str(folders / "out")]["scores"]
    assert scores["comet"]["signature"].startswith("comet|model:wmt|")
    without = command("evaluate", *options, "--metrics", metrics)
    assert without.code == 2
    assert "--sources FILE" in without.err
    with pytest.raises(InputError, match="chrf is named twice"):
        evaluate_files([folders / "out"], [folders / "ref"], ["chrf", "chrf"])


def test_options_of_a_recipe() -> None:
    recipe = parse({"evaluation": {"metrics": ["bleu", {"kind": "comet", "model": "C:/wmt"}, {"kind": "mine:Metric"}]}})
    assert user_classes(recipe) == ["mine:Metric"]
    with pytest.raises(InputError, match="modle"):
        find_metric({"kind": "comet", "modle": "x"})
