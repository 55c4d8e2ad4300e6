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
from transduce.decoders.ctc import BLANK
from transduce.flow import BOS, Batch
from transduce.modalities.audio import pad_frames

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
    sizes_of_images: tuple[tuple[int, int], ...] = ()  # height and width of each; empty: sources are recordings
    configure: Callable[[Any, Changes], Any] | None = None  # the config of nested models
    token_inputs: str = "decoder_input_ids"  # the name of the tokens that the library reads

    def make_config(self, library: Any, setting: int) -> Any:
        changes = {**self.sizes, **self.settings[setting]}
        return self.configure(library, changes) if self.configure else getattr(library, self.config)(**changes)

    def write_sources(self, folder: Path) -> list[str]:
        return (
            write_images(folder, self.sizes_of_images)
            if self.sizes_of_images
            else write_recordings(folder, self.samples)
        )


@dataclass(frozen=True)
class BuiltMedia:
    """A folder, the model of the library that it holds, the imported model, and sources with their inputs."""

    folder: Path
    library: Any
    model: transduce.Model
    sources: list[str]
    inputs: Callable[[str], Inputs]
    token_inputs: str

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


def write_images(folder: Path, sizes: tuple[tuple[int, int], ...]) -> list[str]:
    """Noise on a white page, whose margin differs from one to the next."""
    pictures = pytest.importorskip("PIL.Image")
    chance, names = np.random.default_rng(2), []
    for number, size in enumerate(sizes):
        pixels = np.full((*size, 3), 255, np.uint8)
        pixels[1 + number :, number:-1] = chance.integers(0, 256, pixels[1 + number :, number:-1].shape)
        names.append(str(folder / f"{number}.png"))
        pictures.fromarray(pixels).save(names[-1])
    return names


def _image_inputs(processor: Any, folder: Path) -> Callable[[str], Inputs]:
    processor.save_pretrained(folder)

    def inputs(source: str) -> Inputs:
        image = pytest.importorskip("PIL.Image").open(source)
        return dict(processor(image, return_tensors="pt"))

    return inputs


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


SWIN_SIZES = {
    "image_size": [24, 16], "patch_size": 2, "embed_dim": 8, "depths": [2, 3], "num_heads": [2, 4], "window_size": 3,
}  # fmt: skip
PAGE_DECODER = {
    "vocab_size": 24, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 20,
    "max_position_embeddings": 40, "is_decoder": True, "add_cross_attention": True, **BART,
}  # fmt: skip
# Windows and pairs of cells that are incomplete, and a matrix between the two sides.
SWIN_OTHER = {
    "encoder": {
        "image_size": [20, 28], "patch_size": 4, "qkv_bias": False, "hidden_act": "relu", "mlp_ratio": 1.5,
        "layer_norm_eps": 0.1,
    },
    "decoder": {"d_model": 20, "scale_embedding": True, "activation_function": "relu", "tie_word_embeddings": False},
}  # fmt: skip


def _pages(library: Any, changes: Changes) -> Any:
    """DonutSwin with mBART."""
    encoder = library.DonutSwinConfig(**{**SWIN_SIZES, **changes.get("encoder", {})})
    decoder = library.MBartConfig(**{**PAGE_DECODER, **changes.get("decoder", {})})
    config = library.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.tie_word_embeddings = config.decoder.tie_word_embeddings
    for key, value in BART.items():
        setattr(config, key, value)
    return config


def _donut(library: Any, folder: Path) -> Callable[[str], Inputs]:
    write_tokenizer(folder, "roberta")
    size = _stored_size(folder)
    return _image_inputs(library.DonutImageProcessor(size=size, do_align_long_axis=True), folder)


def _nougat(library: Any, folder: Path) -> Callable[[str], Inputs]:
    write_tokenizer(folder, "roberta")
    return _image_inputs(library.NougatImageProcessor(size=_stored_size(folder)), folder)


def _stored_size(folder: Path) -> dict[str, int]:
    height, width = json.loads((folder / "config.json").read_text())["encoder"]["image_size"]
    return {"height": height, "width": width}


def _page_case(name: str, write: Callable[[Any, Path], Callable[[str], Inputs]]) -> MediaCase:
    return MediaCase(
        name, "VisionEncoderDecoderModel", "VisionEncoderDecoderConfig", {}, write, ({}, SWIN_OTHER), 0.3,
        sizes_of_images=((36, 24), (21, 33), (50, 20)), configure=_pages,
    )  # fmt: skip


PATCH_SIDES = {
    "vision_config": {
        "hidden_size": 16, "patch_embed_hidden_size": 48, "d_kv": 6, "d_ff": 24, "num_hidden_layers": 2,
        "num_attention_heads": 3, "seq_len": 20,
    },
    "text_config": {
        "vocab_size": 26, "hidden_size": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    },
}  # fmt: skip
PATCHES_OTHER = {
    "vision_config": {"dense_act_fn": "gelu", "layer_norm_eps": 0.1, "num_hidden_layers": 1},
    "text_config": {"dense_act_fn": "relu", "layer_norm_epsilon": 0.01, "num_layers": 3},
    "tie_word_embeddings": True,
}


def _patches(library: Any, changes: Changes) -> Any:
    sides = {side: {**sizes, **changes.get(side, {})} for side, sizes in PATCH_SIDES.items()}
    return library.Pix2StructConfig(**{**changes, **sides})


def _pix2struct(library: Any, folder: Path) -> Callable[[str], Inputs]:
    write_tokenizer(folder, "t5")
    return _image_inputs(library.Pix2StructImageProcessor(max_patches=12, patch_size={"height": 4, "width": 4}), folder)


GIT_SIZES = {
    "vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
    "max_position_embeddings": 30, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
GIT_VISION = {
    "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
GIT_OTHER = {
    "vision_config": {"hidden_act": "gelu", "layer_norm_eps": 0.1, "num_hidden_layers": 1},
    "hidden_act": "relu", "layer_norm_eps": 0.01, "num_hidden_layers": 3, "tie_word_embeddings": True,
}  # fmt: skip


def _captions(library: Any, changes: Changes) -> Any:
    vision = {**GIT_VISION, **changes.get("vision_config", {})}
    return library.GitConfig(**{**GIT_SIZES, **changes, "vision_config": vision})


def _git(library: Any, folder: Path) -> Callable[[str], Inputs]:
    write_tokenizer(folder, "bert", ("[MASK]",))
    size = {"height": 16, "width": 16}
    return _image_inputs(library.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size), folder)


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
            "GIT", "GitForCausalLM", "GitConfig", {}, _git, ({}, GIT_OTHER), 0.7,
            sizes_of_images=((16, 16), (25, 16), (20, 37)), configure=_captions, token_inputs="input_ids",
        ),
        MediaCase(
            "Pix2Struct", "Pix2StructForConditionalGeneration", "Pix2StructConfig", {}, _pix2struct,
            ({}, PATCHES_OTHER), 0.1, sizes_of_images=((36, 24), (9, 33), (50, 20)), configure=_patches,
        ),
        _page_case("Donut", _donut),
        _page_case("Nougat", _nougat),
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
    config = case.make_config(library, setting)
    made = shake(getattr(library, case.architecture)(config), size=case.noise)
    with torch.no_grad():
        case.prepare(made)
    made.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    inputs, sources = case.write(library, folder), case.write_sources(folder)
    return BuiltMedia(folder, made, transduce.load(folder, device="cpu"), sources, inputs, case.token_inputs)
