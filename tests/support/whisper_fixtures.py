"""A small random Whisper model of the transformers library in a folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from huggingface_fixtures import shake

WORDS = [f"w{number}" for number in range(24)]
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
TIMES = [f"<|{number * 0.02:.2f}|>" for number in range(51)]  # of a window of one second
PIECES = [*WORDS, *SPECIAL, "<|notimestamps|>", *TIMES]
FIRST_TIME = len(PIECES) - len(TIMES)
END, START = PIECES.index("<|endoftext|>"), PIECES.index("<|startoftranscript|>")
PROMPT = ["<|de|>", "<|transcribe|>", "<|notimestamps|>"]
SETTINGS = {
    "lang_to_id": {name: PIECES.index(name) for name in ("<|en|>", "<|de|>")},
    "task_to_id": {name: PIECES.index(f"<|{name}|>") for name in ("translate", "transcribe")},
    "no_timestamps_token_id": PIECES.index("<|notimestamps|>"),
    "is_multilingual": True,
    "suppress_tokens": [
        3,
        5,
        *(number for number, name in enumerate(PIECES[: -len(TIMES)]) if name[0] == "<" and number != END),
    ],
    "begin_suppress_tokens": [1, END],
    "max_length": 30,
}


def _write_tokenizer(folder, times):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(
        models.WordLevel(
            {piece: number for number, piece in enumerate(PIECES[: FIRST_TIME + times])}, unk_token=SPECIAL[0]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(PIECES[len(WORDS) : -len(TIMES)])
    backend.add_tokens([AddedToken(name, normalized=False) for name in TIMES[:times]])  # times are not special there
    frame = [(name, PIECES.index(name)) for name in ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")]
    single = "<|startoftranscript|> <|notimestamps|> $A <|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=frame)
    backend.save(str(folder / "tokenizer.json"))


def make_whisper(folder, times=2, **generation):
    """`times`: the number of its timestamps."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = library.WhisperConfig(
        vocab_size=FIRST_TIME + times, num_mel_bins=80, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=24, encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=24,
        max_source_positions=50, max_target_positions=24, pad_token_id=END, bos_token_id=END, eos_token_id=END,
        decoder_start_token_id=START,
    )  # fmt: skip
    model = shake(library.WhisperForConditionalGeneration(config))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model.get_input_embeddings().weight[END] *= 2  # some outputs end by themselves
    for name, value in {**SETTINGS, **generation}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    library.WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    _write_tokenizer(folder, times)
    return model


def write_recordings(folder) -> list[str]:
    """Noise of one second and less."""
    sounds = pytest.importorskip("soundfile")
    chance, names = np.random.default_rng(2), []
    for number, length in enumerate((16_000, 9_000, 4_321)):
        names.append(str(folder / f"{number}.wav"))
        sounds.write(names[-1], chance.normal(0, 0.1, length).clip(-0.4, 0.4), 16_000)
    return names
