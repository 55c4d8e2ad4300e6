"""A Marian of the transformers library in, CTranslate2 with the same weights at its best settings out."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from transduce.flow import BOS, EOS, SPECIALS


class Translator:
    """CTranslate2 in one precision, with as many threads as torch has. It speaks tokens, not numbers."""

    def __init__(self, model: Any, precision: str, workers: int = 1) -> None:
        processor = Path("/proc/cpuinfo")
        if processor.exists() and "avx512f" in processor.read_text(encoding="utf-8"):
            os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")  # it takes AVX2 elsewhere than on Intel's own
        import ctranslate2

        self.name = f"CTranslate2 {precision}"
        self.tokens = [*SPECIALS, *(f"t{number}" for number in range(len(SPECIALS), model.config.vocab_size))]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        with tempfile.TemporaryDirectory() as folder:
            _save(model, self.tokens, folder)
            self.inner = ctranslate2.Translator(
                folder, compute_type=precision, inter_threads=workers, intra_threads=torch.get_num_threads()
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
    from ctranslate2.converters.transformers import BartLoader

    model.config.normalize_before = model.config.normalize_embedding = False
    loader = BartLoader()
    spec = loader.get_model_spec(model)
    loader.set_vocabulary(spec, tokens)
    spec.config.bos_token = spec.config.decoder_start_token = SPECIALS[BOS]
    spec.config.eos_token = SPECIALS[EOS]
    spec.config.add_source_eos = spec.config.add_source_bos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)
