"""Speech and image families of Hugging Face as test cases, compared with the library one source at a time."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import SEARCHES, Changes
from huggingface_fixtures import shake
from torch import Tensor

import transduce
from transduce.decoding.ctc_prefix import BLANK

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class MediaCase:
    """One family. The first of its settings is the one that is searched."""

    name: str  # as the documentation writes it
    architecture: str
    config: str  # the config class of the library
    sizes: Changes
    write: Callable[[Any, Path], Callable[[str], Inputs]]  # tokenizer and preprocessor; -> the inputs of a source
    settings: tuple[Changes, ...] = ({},)
    noise: float = 0.3
    prepare: Callable[[Any], None] = field(default=lambda model: None)  # the last change of the weights
    searches: tuple[str, ...] = tuple(SEARCHES)
    exported: bool = False


@dataclass(frozen=True)
class BuiltMedia:
    """A folder, the model of the library that it holds, the imported model, and sources with their inputs."""

    folder: Path
    library: Any
    model: transduce.Model
    sources: list[str]
    inputs: Callable[[str], Inputs]

    def logit_difference(self) -> float:
        """The largest difference of log-probabilities; the imported model reads the sources as one padded batch."""
        encoding = self.model.source_encoding
        with torch.no_grad():
            state = self.model.network.start(encoding.batch(encoding.encode(self.sources)))
            return max(self._path_difference(state.fixed["paths"][row], one) for row, one in enumerate(self.sources))

    def _path_difference(self, paths: Tensor, source: str) -> float:
        """Of the rows of a CTC model."""
        expected = self.library(**self.inputs(source)).logits[0].log_softmax(-1)  # S V
        rows = self.model.target.vocabulary.backend_ids
        known = [native for native, row in enumerate(rows) if row >= 0]
        assert not paths[len(expected) :, BLANK].any()  # padding
        return float((paths[: len(expected), known] - expected[:, [rows[native] for native in known]]).abs().max())

    def outputs(self, search: str) -> tuple[list[list[int]], list[list[int]]]:
        """Outputs of the library and of the imported model, in ids of the library."""
        found = self.model.generate(self.sources)
        rows = self.model.target.vocabulary.backend_ids
        return [self._best_path(one) for one in self.sources], [
            [rows[native] for native in one.decoded.hypothesis.text_ids] for one in found
        ]

    def _best_path(self, source: str) -> list[int]:
        with torch.no_grad():
            path = self.library(**self.inputs(source)).logits[0].argmax(-1).unique_consecutive().tolist()
        return [number for number in path if number != self.library.config.pad_token_id]


def write_recordings(folder: Path, rate: int = 16_000) -> list[str]:
    """Noise of different lengths, the first file being the longest."""
    sounds = pytest.importorskip("soundfile")
    chance, names = np.random.default_rng(2), []
    for number, length in enumerate((1300, 900, 640)):
        names.append(str(folder / f"{number}.wav"))
        sounds.write(names[-1], chance.normal(0, 0.1, length).clip(-0.4, 0.4), rate)
    return names


def _waveform_inputs(library: Any, folder: Path) -> Callable[[str], Inputs]:
    """Characters with `|` for a space, and normalised samples."""
    pieces = ["<s>", "</s>", "<unk>", "<pad>", "|", *"abcdefg"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    library.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    extractor = library.Wav2Vec2FeatureExtractor()
    extractor.save_pretrained(folder)

    def inputs(source: str) -> Inputs:
        samples, rate = pytest.importorskip("soundfile").read(source, dtype="float32")
        return dict(extractor(samples, sampling_rate=rate, return_tensors="pt"))

    return inputs


WAV2VEC2_SIZES = {
    "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
    "conv_dim": (8, 6, 12), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4, "pad_token_id": 3,
}  # fmt: skip
STABLE = {
    "feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True, "num_conv_pos_embeddings": 5,
    "hidden_act": "relu", "layer_norm_eps": 0.01, "feat_extract_activation": "silu",
}  # fmt: skip


def _varied_rows(model: Any) -> None:
    """Not one token for all rows: every token has the same mean logit."""
    model.lm_head.bias -= model(torch.randn(1, 900)).logits.mean((0, 1))


def _ctc(name: str, kind: str, **more: Any) -> MediaCase:
    return MediaCase(
        name,
        f"{kind}ForCTC",
        f"{kind}Config",
        WAV2VEC2_SIZES,
        _waveform_inputs,
        ({}, {**STABLE, **more}),
        prepare=_varied_rows,
        searches=("greedy",),
    )


MEDIA_CASES = {
    case.name: case for case in (_ctc("wav2vec 2.0", "Wav2Vec2"), _ctc("HuBERT", "Hubert", feat_proj_layer_norm=False))
}


@cache
def built_media(name: str, setting: int = 0) -> BuiltMedia:
    """The case as the library writes it, built once for all laws."""
    library, case = pytest.importorskip("transformers"), MEDIA_CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    torch.manual_seed(3)
    config = getattr(library, case.config)(**{**case.sizes, **case.settings[setting]})
    made = shake(getattr(library, case.architecture)(config), size=case.noise)
    with torch.no_grad():
        case.prepare(made)
    made.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    inputs, sources = case.write(library, folder), write_recordings(folder)
    return BuiltMedia(folder, made, transduce.load(folder, device="cpu"), sources, inputs)
