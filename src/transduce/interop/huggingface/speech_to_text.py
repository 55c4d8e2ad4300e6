"""Speech2Text: gated convolutions over Kaldi's log-mel frames, then the weight layout of BART with pre-norm.

The convolutions are multiplied by the square root of the width, like embeddings. Here the last one is stored so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.folder import read_json
from transduce.interop.huggingface.whisper import PREPROCESSOR, PROCESSOR, stack_options

KERNELS, STRIDE, HOP = (5, 5), 2, 0.01  # HOP: seconds per frame
PADDING = 1  # positions begin after it
MODULES = {**bart.LAYERS, **bart.FINAL_NORM, "model.encoder.conv.conv_layers.*": "encoder.embedding.layers.*"}
TENSORS = {
    "model.decoder.embed_tokens.weight": TensorMap(("decoder.embedding.weight", "decoder.output.projection.weight"))
}
TIED = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
SINUSOIDS = ("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")


def _weights(config: Config, names: Collection[str]) -> WeightMap:
    last = len(config.counts("conv_kernel_sizes", KERNELS)) - 1
    scale = math.sqrt(config.count("d_model")) if config.flag("scale_embedding", True) else 1.0

    def combine(weights: Weights) -> Weights:
        for leaf in ("weight", "bias"):
            name = f"encoder.embedding.layers.{last}.{leaf}"
            if name in weights:
                weights[name] = _scale_values(weights[name], scale)
        return weights

    return WeightMap(MODULES, TENSORS, TIED, SINUSOIDS, combine=combine)


def _scale_values(tensor: Tensor, scale: float) -> Tensor:
    """a sigmoid(b) with a multiplied; a and b are the halves of the rows."""
    tensor = tensor.clone()
    tensor[: len(tensor) // 2] *= scale
    return tensor


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("tie_word_embeddings", True)
    config.require("pad_token_id", PADDING)
    config.require("input_channels", 1)
    kernels = config.counts("conv_kernel_sizes", KERNELS)
    front = {
        "kind": "conv_subsampling",
        "strides": (STRIDE,) * len(kernels),
        "kernels": kernels,
        "conv_width": config.count("conv_channels", 1024) // 2,
        "activation": "glu",
    }
    position = {"kind": "sinusoidal", "halves": True, "inclusive": True, "offset": PADDING + 1}
    return {
        "encoder": {**stack_options(config, "encoder", "relu"), "position": position, "front": front},
        "decoder": {**stack_options(config, "decoder", "relu"), "position": position},
        "tie": "target",
        "scale_embedding": config.flag("scale_embedding", True),
    }


def _read_sources(folder: Path, config: Config) -> Content:
    """data.sources: features as Speech2TextFeatureExtractor computes them."""
    processor = Config(read_json(folder, PROCESSOR), str(folder / PROCESSOR))
    content = read_json(folder, PREPROCESSOR) or processor.section("feature_extractor")
    extractor = Config(content, str(folder / PREPROCESSOR))
    bands = config.count("input_feat_per_channel", 80)
    extractor.require("num_mel_bins", bands)
    extractor.require("dither", 0.0)
    normalise = extractor.flag("do_ceptral_normalize", True)
    if normalise:
        extractor.require("normalize_means", True)
        extractor.require("normalize_vars", True)
    seconds = HOP * config.count("max_source_positions", 6000)
    rate = extractor.count("sampling_rate", 16_000)
    sound = {"kind": "audio", "rate": rate, "mels": bands, "seconds": seconds, "scale": "kaldi", "normalise": normalise}
    return {"sound": sound}


FAMILIES = {
    "Speech2TextForConditionalGeneration": Family(_to_recipe, _weights, read_sources=_read_sources, modality="audio")
}
