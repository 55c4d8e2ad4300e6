"""Legacy models as Hugging Face folders: logits equal in transformers, or a refusal that names the feature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_fixtures import WORDS, Reference, randomised, save_joeynmt
from test_recorded import FOLDERS, keep, read

import transduce
from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.interop.huggingface.exporter import write_folder

GREEDY: dict[str, Any] = {"strategy": "greedy", "max_length": 12}
ARCHITECTURES = {
    "fairseq-0.10": "MarianMTModel",
    "fairseq-learned": "MBartForConditionalGeneration",
    "fairseq-transformer": "MarianMTModel",
    "joeynmt-post": "MarianMTModel",
    "joeynmt-pre": "PegasusForConditionalGeneration",
    "marian-post": "MarianMTModel",
    "marian-pre": "PegasusForConditionalGeneration",
    "opennmt-transformer": "PegasusForConditionalGeneration",
    "opennmt-version-2": "PegasusForConditionalGeneration",
}
FEATURES = {
    **dict.fromkeys(
        (
            *("fairseq-lstm", "joeynmt-bridge", "joeynmt-last", "joeynmt-zero"),
            *("opennmt-gru", "opennmt-lstm", "opennmt-version-1"),
        ),
        "kind: recurrent",
    ),
    **dict.fromkeys(("fairseq-fconv", "fairseq-fconv-tied"), "kind: convolutional"),
    **dict.fromkeys(("marian-int8", "marian-ssru", "marian-student"), "decoder.token_mixer: {'kind': 'ssru'}"),
    "opennmt-rotary": "rotary",
}


def written(folder: Path, out: Path) -> tuple[dict[str, Any], transduce.Model]:
    record, model = read(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_folder(model, out, str(folder))
    return record, model


def foreign(model: transduce.Model, out: Any, rows: list[list[int]]) -> torch.Tensor:
    """Native ids as those of the exported config."""
    ids = list(model.target.vocabulary.backend_ids)
    ids[1] = out.config.decoder_start_token_id
    return torch.tensor(ids)[torch.tensor(rows)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_legacy_model_is_exported_or_refused_by_its_feature(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    if folder.name in FEATURES:
        with pytest.raises(InputError, match=FEATURES[folder.name]):
            written(folder, tmp_path / "out")
        keep(folder, export="")
        return
    record, model = written(folder, tmp_path / "out")
    library, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(library).__name__ == ARCHITECTURES[folder.name]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    texts = record["sources"][:4]
    compare(transformers, library, model, tmp_path / "out", texts)
    keep(folder, export=ARCHITECTURES[folder.name])
    if not (tmp_path / "out" / "target").exists():  # with a vocabulary for each side it is not imported again
        again = transduce.load(tmp_path / "out", device="cpu")
        found = [one.text for one in again.generate(texts, **GREEDY)]
        assert found == [one.text for one in model.generate(texts, **GREEDY)]


def compare(transformers: Any, library: Any, model: transduce.Model, out: Path, texts: list[str]) -> None:
    """Logits and greedy outputs of the library and of the imported model."""
    given = transformers.AutoTokenizer.from_pretrained(out)(texts, return_tensors="pt", padding=True)
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    known = [number for number, row in enumerate(model.target.vocabulary.backend_ids) if row >= 0 and number != 1]
    starts = [[1, *known[-3:]]] * len(texts)
    source = Padded.from_rows([[*row, EOS] for row in model.source.encode_sources(texts)])
    with torch.no_grad():
        ours = model.network.advance(torch.tensor(starts), model.network.start(Batch(source))).logits.log_softmax(-1)
        decoder_ids = foreign(model, library, starts)
        theirs = library.eval()(**given, decoder_input_ids=decoder_ids, use_cache=False).logits.log_softmax(-1)
        made = library.generate(**given, num_beams=1, max_new_tokens=GREEDY["max_length"], min_length=0)
    rows = torch.tensor(model.target.vocabulary.backend_ids)[known]
    assert (ours[..., known] - theirs[..., rows]).abs().max() < 1e-4
    folder = out / "target" if (out / "target").is_dir() else out
    written_texts = transformers.AutoTokenizer.from_pretrained(folder).batch_decode(made, skip_special_tokens=True)
    expected = [one.text for one in model.generate(texts, **GREEDY, min_length=0)]
    assert [" ".join(text.split()) for text in written_texts] == expected


@pytest.mark.parametrize("before", [False, True])
def test_each_side_has_its_vocabulary(before, tmp_path):
    """One size for both tables; the tokenizer of outputs has a folder of its own."""
    transformers = pytest.importorskip("transformers")
    save_joeynmt(tmp_path, randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=before)), before=before)
    model = transduce.load(tmp_path, device="cpu")
    assert model.source.size > model.target.size
    write_folder(model, tmp_path / "out", "here")
    library, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    compare(transformers, library, model, tmp_path / "out", ["w1 w2 w3", "w9", "b w3 w12 w0"])
    with pytest.raises(InputError, match="a vocabulary for each side"):
        transduce.load(tmp_path / "out")
