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
from family_cases import SEARCHES, STARTS, Changes
from huggingface_fixtures import BART, hf_ids, shake, write_tokenizer
from torch import Tensor

import transduce
from transduce.decoding.ctc_prefix import BLANK
from transduce.flow import BOS, Batch
from transduce.modalities.audio.modality import pad_frames

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
    samples: int = 1300  # of the longest recording
    exported: bool = False


@dataclass(frozen=True)
class BuiltMedia:
    """A folder, the model of the library that it holds, the imported model, and sources with their inputs."""

    folder: Path
    library: Any
    model: transduce.Model
    sources: list[str]
    inputs: Callable[[str], Inputs]
    token_inputs: str = "decoder_input_ids"  # the name of the tokens that the library reads

    def logit_difference(self) -> float:
        """The largest difference of log-probabilities; the imported model reads the sources as one padded batch."""
        network = self.model.network
        with torch.no_grad():
            state = network.start(self._batch())
            if self.model.recipe.model.decoder is None:
                rows = enumerate(self.sources)
                return max(self._path_difference(state.fixed["paths"][row], one) for row, one in rows)
            logits = network.advance(STARTS[: len(self.sources)], state).logits.log_softmax(-1)
            return max(self._token_difference(logits[row], row) for row in range(len(self.sources)))

    def _batch(self) -> Batch:
        """The sources; where the library computes features in double precision, with its features."""
        encoding = self.model.source_encoding
        batch = encoding.batch(encoding.encode(self.sources))
        given = [self.inputs(one) for one in self.sources]
        if "input_features" not in given[0]:
            return batch
        features = pad_frames([one["input_features"][0] for one in given])
        assert torch.allclose(features.values, batch.source.values, atol=1e-3)
        return Batch(features)

    def _token_difference(self, logits: Tensor, row: int) -> float:
        """Of the tokens of a decoder."""
        read = torch.tensor([hf_ids(self.model, STARTS[row].tolist())])
        given = {**self.inputs(self.sources[row]), self.token_inputs: read}
        expected = self.library(**given).logits[0].log_softmax(-1)[-len(logits) :]
        rows = self.model.target.vocabulary.backend_ids
        known = [native for native, one in enumerate(rows) if one >= 0 and native != BOS]
        return float((logits[:, known] - expected[:, [rows[native] for native in known]]).abs().max())

    def _path_difference(self, paths: Tensor, source: str) -> float:
        """Of the rows of a CTC model."""
        expected = self.library(**self.inputs(source)).logits[0].log_softmax(-1)  # S V
        rows = self.model.target.vocabulary.backend_ids
        known = [native for native, row in enumerate(rows) if row >= 0]
        assert not paths[len(expected) :, BLANK].any()  # padding
        return float((paths[: len(expected), known] - expected[:, [rows[native] for native in known]]).abs().max())

    def outputs(self, search: str) -> tuple[list[list[int]], list[list[int]]]:
        """Outputs of the library and of the imported model, in ids of the library."""
        if self.model.recipe.model.decoder is not None:
            return self._generated(*SEARCHES[search])
        found = self.model.generate(self.sources)
        rows = self.model.target.vocabulary.backend_ids
        return [self._best_path(one) for one in self.sources], [
            [rows[native] for native in one.decoded.hypothesis.text_ids] for one in found
        ]

    def _generated(self, theirs: Changes, ours: Changes, length: int = 12) -> tuple[list[list[int]], list[list[int]]]:
        end, expected = self.library.config.eos_token_id, []
        for source in self.sources:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = self.library.generate(**self.inputs(source), max_new_tokens=length, **theirs)[0, 1:].tolist()
            expected.append(row[: row.index(end) + 1] if end in row else row)
        found = self.model.generate(self.sources, max_length=length, **ours)
        return expected, [hf_ids(self.model, list(one.decoded.hypothesis.ids)) for one in found]

    def _best_path(self, source: str) -> list[int]:
        with torch.no_grad():
            path = self.library(**self.inputs(source)).logits[0].argmax(-1).unique_consecutive().tolist()
        return [number for number in path if number != self.library.config.pad_token_id]


def write_recordings(folder: Path, samples: int) -> list[str]:
    """Noise of different lengths, the first file being the longest."""
    sounds = pytest.importorskip("soundfile")
    chance, names = np.random.default_rng(2), []
    for number, share in enumerate((1, 0.7, 0.5)):
        names.append(str(folder / f"{number}.wav"))
        sounds.write(names[-1], chance.normal(0, 0.1, int(share * samples)).clip(-0.4, 0.4), 16_000)
    return names


def _waveform_inputs(library: Any, folder: Path) -> Callable[[str], Inputs]:
    """Characters with `|` for a space, and normalised samples."""
    pieces = ["<s>", "</s>", "<unk>", "<pad>", "|", *"abcdefg"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    library.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    extractor = library.Wav2Vec2FeatureExtractor()
    extractor.save_pretrained(folder)
    return _sound_inputs(extractor)


def _sound_inputs(extractor: Any) -> Callable[[str], Inputs]:
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


def _spoken_words(library: Any, folder: Path) -> Callable[[str], Inputs]:
    """Words, and Kaldi's features."""
    write_tokenizer(folder, "fsmt")
    extractor = library.Speech2TextFeatureExtractor(feature_size=12, num_mel_bins=12)
    extractor.save_pretrained(folder)
    return _sound_inputs(extractor)


def _waveform_words(library: Any, folder: Path) -> Callable[[str], Inputs]:
    """Words, and samples as they are."""
    write_tokenizer(folder, "fsmt")
    extractor = library.Wav2Vec2FeatureExtractor(do_normalize=False)
    extractor.save_pretrained(folder)
    return _sound_inputs(extractor)


def _loud_samples(model: Any) -> None:
    """The first convolution sees small numbers."""
    model.model.encoder.conv1.weight *= 10


MOONSHINE_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
    "partial_rotary_factor": 0.5, **BART,
}  # fmt: skip
MOONSHINE_OTHER = {
    "encoder_hidden_act": "relu", "decoder_hidden_act": "gelu", "attention_bias": True, "rope_theta": 300.0,
    "partial_rotary_factor": 0.8, "decoder_num_hidden_layers": 3, "pad_head_dim_to_multiple_of": 6,
}  # fmt: skip
S2T_SIZES = {
    "vocab_size": 24, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "conv_channels": 12,
    "input_feat_per_channel": 12, "max_source_positions": 200, "max_target_positions": 60, **BART,
}  # fmt: skip
S2T_OTHER = {
    "scale_embedding": False, "conv_kernel_sizes": (3, 5, 7), "num_conv_layers": 3, "activation_function": "gelu",
    "decoder_layers": 3,
}  # fmt: skip


MEDIA_CASES = {
    case.name: case
    for case in (
        _ctc("wav2vec 2.0", "Wav2Vec2"),
        _ctc("HuBERT", "Hubert", feat_proj_layer_norm=False),
        MediaCase(
            "Speech2Text", "Speech2TextForConditionalGeneration", "Speech2TextConfig", S2T_SIZES, _spoken_words,
            ({}, S2T_OTHER), noise=0.5, samples=8000,
        ),
        MediaCase(
            "Moonshine", "MoonshineForConditionalGeneration", "MoonshineConfig", MOONSHINE_SIZES, _waveform_words,
            ({}, MOONSHINE_OTHER), prepare=_loud_samples, samples=8000,
        ),
    )
}  # fmt: skip


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
    inputs, sources = case.write(library, folder), write_recordings(folder, case.samples)
    return BuiltMedia(folder, made, transduce.load(folder, device="cpu"), sources, inputs)
