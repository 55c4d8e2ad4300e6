"""CTranslate2 with the weights of a Marian model of transformers, at its best settings."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.marian import PLACES, Size, ours
from transduce.contracts import Decoder, Encoder
from transduce.flow import SPECIALS
from transduce.interop.ctranslate2 import specification
from transduce.recipe import ModelRecipe
from transduce.recipe.registry import complete


class Translator:
    """CTranslate2 in one precision, by default with as many threads as torch; it takes token strings."""

    def __init__(self, model: Any, precision: str, workers: int = 1, threads: int | None = None) -> None:
        processor = Path("/proc/cpuinfo")
        if processor.exists() and "avx512f" in processor.read_text(encoding="utf-8"):
            os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")  # its default is AVX2 on other processors than Intel's
        import ctranslate2

        self.name = f"CTranslate2 {precision}" + ("" if threads is None else f" {workers}x{threads}")
        self.tokens = [*SPECIALS, *(f"t{number}" for number in range(len(SPECIALS), model.config.vocab_size))]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        with tempfile.TemporaryDirectory() as folder:
            _save(model, self.tokens, folder)
            self.inner = ctranslate2.Translator(
                folder, compute_type=precision, inter_threads=workers, intra_threads=threads or torch.get_num_threads()
            )

    def translate(self, sources: list[list[int]], beam: int, length: int) -> list[list[int]]:
        found = self.inner.translate_batch(
            [[self.tokens[number] for number in source] for source in sources],
            beam_size=beam,
            min_decoding_length=length,
            max_decoding_length=length,
            length_penalty=1.0,
        )
        # Where the length is forced, the closing </s> is not among what it gives.
        return [[self.numbers[token] for token in one.hypotheses[0]] for one in found]

    def translate_all(self, sources: list[list[int]], beam: int, longest: int, tokens: int) -> list[list[int]]:
        """Many lines with their own ends, sorted and put into batches by the library itself."""
        found = self.inner.translate_batch(
            [[self.tokens[number] for number in source] for source in sources],
            beam_size=beam,
            max_decoding_length=longest,
            max_batch_size=tokens,
            batch_type="tokens",
            length_penalty=1.0,
            return_end_token=True,
        )
        return [[self.numbers[token] for token in one.hypotheses[0]] for one in found]


def _save(model: Any, tokens: list[str], folder: str) -> None:
    """Through our own exporter, from our model with the same weights."""
    config = model.config
    sizes = (config.d_model, config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim)
    part = dict(zip(("width", "layers", "heads", "ff_width"), sizes, strict=True))
    part |= {"kind": "transformer", "norm": "post", "position": {"kind": "learned", "max_positions": PLACES}}
    encoder, decoder = complete(Encoder, part, "encoder"), complete(Decoder, part, "decoder")
    recipe = ModelRecipe(encoder=encoder, decoder=decoder, tie="all")
    spec = specification(ours(Size(*sizes, config.vocab_size), model), recipe, tokens, tokens, folder)
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)
