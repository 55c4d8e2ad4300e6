"""Legacy models as Hugging Face folders: logits equal in transformers, or a refusal that names the feature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recorded import FOLDERS, read

import transduce
from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.interop.huggingface.exporter import write_folder

ARCHITECTURES = {
    "fairseq-learned": "MBartForConditionalGeneration",
    "fairseq-transformer": "MarianMTModel",
    "joeynmt-post": "MarianMTModel",
    "joeynmt-pre": "PegasusForConditionalGeneration",
    "marian-post": "MarianMTModel",
    "marian-pre": "PegasusForConditionalGeneration",
    "opennmt-transformer": "PegasusForConditionalGeneration",
}
FEATURES = {
    **dict.fromkeys(
        ("fairseq-lstm", "joeynmt-bridge", "joeynmt-last", "joeynmt-zero", "opennmt-gru", "opennmt-lstm"),
        "kind: recurrent",
    ),
    "marian-ssru": "decoder.token_mixer: {'kind': 'ssru'}",
    "marian-student": "decoder.token_mixer: {'kind': 'ssru'}",
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
        return
    record, model = written(folder, tmp_path / "out")
    library, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(library).__name__ == ARCHITECTURES[folder.name]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = record["sources"][:4]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    known = [number for number, row in enumerate(model.target.vocabulary.backend_ids) if row >= 0 and number != 1]
    starts = [[1, *known[-3:]]] * len(texts)
    source = Padded.from_rows([[*row, EOS] for row in model.source.encode_sources(texts)])
    with torch.no_grad():
        ours = model.network.advance(torch.tensor(starts), model.network.start(Batch(source))).logits.log_softmax(-1)
        theirs = library.eval()(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            decoder_input_ids=foreign(model, library, starts),
            use_cache=False,
        ).logits.log_softmax(-1)
    rows = torch.tensor(model.target.vocabulary.backend_ids)[known]
    assert (ours[..., known] - theirs[..., rows]).abs().max() < 1e-4
    again = transduce.load(tmp_path / "out", device="cpu")
    search = {"strategy": "greedy", "max_length": 12}
    found = [one.text for one in again.generate(texts, **search)]
    assert found == [one.text for one in model.generate(texts, **search)]
