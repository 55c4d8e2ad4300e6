"""Generation speed of imported Hugging Face models with random weights, against transformers.

`python -m benchmarks.imported_models`. Both generate the same number of tokens for the same sources, greedily and with
a beam of 4. Ours starts from texts and files, transformers from precomputed ids and features. `default` is a model that
was loaded without a precision, `modules` its network without lowering.
"""

from __future__ import annotations

import argparse
import tempfile
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as library
from rich.console import Console

import transduce
from benchmarks.harness import OURS, Implementation, Measurement, measure, show, write
from transduce.interop import Languages, convert

ROWS, SOURCE = 4, 24  # sources, and words of each


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    ff_width: int
    words: int

    @property
    def heads(self) -> int:
        return self.width // 64


SIZES = {"small": Size(256, 3, 1024, 8_000), "base": Size(512, 6, 2048, 32_000)}
ENDS = ["<pad>", "</s>", "<s>", "<unk>"]
HEARD = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]


@dataclass(frozen=True)
class Made:
    """A folder, what it holds, and one set of sources for either side."""

    model: Any
    sources: list[str]
    generate_inputs: dict[str, Any]
    languages: Languages | None = None
    given: int = 1  # tokens before what is counted
    text: int = 0  # tokens of the given text, which outputs begin with and lengths do not count


def write_tokenizer(folder: Path, size: Size, special: list[str], frame: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = [*special, *(f"w{number}" for number in range(size.words - len(special)))]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token=special[-1]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    named = [(piece, numbers[piece]) for piece in frame.split() if piece != "$A"]
    if named:
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=named)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def _texts(backend: Any, size: Size) -> tuple[list[str], dict[str, Any]]:
    chance = np.random.default_rng(2)
    texts = [" ".join(f"w{number}" for number in row) for row in chance.integers(0, size.words - 8, (ROWS, SOURCE))]
    ids = torch.tensor([one.ids for one in backend.encode_batch(texts)])
    return texts, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_bart(kind: str) -> Callable[[Path, Size], Made]:
    def make(folder: Path, size: Size) -> Made:
        config, model = {
            "marian": (library.MarianConfig, library.MarianMTModel),
            "bart": (library.BartConfig, library.BartForConditionalGeneration),
        }[kind]
        ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 0}
        made = model(config(
            vocab_size=size.words, d_model=size.width, encoder_layers=size.layers, decoder_layers=size.layers,
            encoder_attention_heads=size.heads, decoder_attention_heads=size.heads, encoder_ffn_dim=size.ff_width,
            decoder_ffn_dim=size.ff_width, max_position_embeddings=128, forced_eos_token_id=None, **ids,
        ))  # fmt: skip
        made.save_pretrained(folder)
        return Made(made, *_texts(write_tokenizer(folder, size, ENDS, "$A </s>"), size))

    return make


def make_t5(folder: Path, size: Size) -> Made:
    made = library.T5ForConditionalGeneration(library.T5Config(
        vocab_size=size.words, d_model=size.width, d_kv=64, d_ff=size.ff_width, num_layers=size.layers,
        num_heads=size.heads, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ))  # fmt: skip
    made.save_pretrained(folder)
    return Made(made, *_texts(write_tokenizer(folder, size, ENDS, "$A </s>"), size))


def make_gpt2(folder: Path, size: Size) -> Made:
    """Outputs begin with the given text."""
    made = library.GPT2LMHeadModel(library.GPT2Config(
        vocab_size=size.words, n_embd=size.width, n_layer=size.layers, n_head=size.heads, n_inner=size.ff_width,
        n_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    ))  # fmt: skip
    made.save_pretrained(folder)
    texts, inputs = _texts(write_tokenizer(folder, size, ENDS, "$A"), size)
    first = torch.cat((torch.ones(ROWS, 1, dtype=torch.long), inputs["input_ids"]), 1)  # the start token
    return Made(made, texts, {"input_ids": first, "attention_mask": torch.ones_like(first)}, text=SOURCE)


def make_whisper(folder: Path, size: Size) -> Made:
    made = library.WhisperForConditionalGeneration(library.WhisperConfig(
        vocab_size=size.words, d_model=size.width, encoder_layers=size.layers, decoder_layers=size.layers,
        encoder_attention_heads=size.heads, decoder_attention_heads=size.heads, encoder_ffn_dim=size.ff_width,
        decoder_ffn_dim=size.ff_width, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    ))  # fmt: skip
    told = {"lang_to_id": {"<|en|>": 2}, "task_to_id": {"transcribe": 3}, "no_timestamps_token_id": 4}
    for name, value in {**told, "is_multilingual": True}.items():
        setattr(made.generation_config, name, value)
    made.save_pretrained(folder)
    extractor = library.WhisperFeatureExtractor()
    extractor.save_pretrained(folder)
    write_tokenizer(folder, size, HEARD, "$A <|endoftext|>")
    chance, names, heard = np.random.default_rng(2), [], []
    for number in range(ROWS):
        samples = (chance.normal(0, 0.1, 160_000).clip(-1, 1) * 32767).astype(np.int16)
        names.append(str(folder / f"{number}.wav"))
        with wave.open(names[-1], "wb") as file:
            file.setparams((1, 2, 16_000, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
        heard.append(samples / 32768)
    features = extractor(heard, sampling_rate=16_000, return_tensors="pt").input_features
    inputs = {"input_features": features, "language": "en", "task": "transcribe"}
    return Made(made, names, inputs, Languages("en"), given=4)


def make_trocr(folder: Path, size: Size) -> Made:
    from PIL import Image

    eye = library.ViTConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=size.ff_width, image_size=224, patch_size=16,
    )  # fmt: skip
    hand = library.TrOCRConfig(
        vocab_size=size.words, d_model=size.width, decoder_layers=size.layers, decoder_attention_heads=size.heads,
        decoder_ffn_dim=size.ff_width, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    made = library.VisionEncoderDecoderModel(
        encoder=library.ViTModel(eye, add_pooling_layer=False), decoder=library.TrOCRForCausalLM(hand)
    )
    for one in (made.config, made.generation_config):
        one.decoder_start_token_id, one.pad_token_id, one.eos_token_id = 1, 0, 1
    made.save_pretrained(folder)
    write_tokenizer(folder, size, ENDS, "$A </s>")
    chance, names, seen = np.random.default_rng(2), [], []
    for number in range(ROWS):
        pixels = chance.integers(0, 256, (224, 224, 3), np.uint8)
        names.append(str(folder / f"{number}.png"))
        Image.fromarray(pixels).save(names[-1])
        seen.append(torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1)
    return Made(made, names, {"pixel_values": torch.stack(seen)})


FAMILIES: dict[str, Callable[[Path, Size], Made]] = {
    "marian": make_bart("marian"),
    "bart": make_bart("bart"),
    "t5": make_t5,
    "gpt2": make_gpt2,
    "whisper": make_whisper,
    "trocr": make_trocr,
}


def implementations(made: Made, own: dict[str, Any], beam: int, length: int) -> list[Implementation]:
    search = {"strategy": "greedy"} if beam == 1 else {"strategy": "huggingface_beam", "beam": beam, "stop": "full"}
    more = made.given - 1  # a prompt is a part of our outputs

    def ours(model: Any) -> Callable[[], int]:
        def run() -> int:
            found = model.generate(made.sources, min_length=length + more, max_length=length + more, **search)
            assert all(len(one.tokens) == made.text + length + more for one in found)
            return ROWS * length

        return run

    def theirs() -> int:
        with torch.inference_mode():
            made.model.generate(
                **made.generate_inputs, num_beams=beam, early_stopping=beam > 1, do_sample=False,
                min_new_tokens=length, max_new_tokens=length,
            )  # fmt: skip
        return ROWS * length

    every = [Implementation(OURS if name == "fp32" else f"{OURS} {name}", ours(model)) for name, model in own.items()]
    return [*every, Implementation("transformers", theirs)]


def run(sizes: list[str], families: list[str], length: int, repeats: int, clock: str) -> Iterator[list[Measurement]]:
    """What was measured so far, after each family."""
    rows: list[Measurement] = []
    for size in sizes:
        for family in families:
            torch.manual_seed(1)
            with tempfile.TemporaryDirectory() as folder:
                made = FAMILIES[family](Path(folder), SIZES[size])
                made.model.eval()
                convert(folder, Path(folder) / "run", made.languages)
                kinds: tuple[Any, ...] = ("fp32", "int8")
                own = {kind: transduce.load(Path(folder) / "run", device="cpu", precision=kind) for kind in kinds}
                # The folder itself, where it needs no language.
                plain = transduce.load(folder if made.languages is None else Path(folder) / "run", device="cpu")
                own["default"] = plain
                own["modules"] = transduce.Model(plain.network, plain.source, plain.target, plain.recipe)
                for beam in (1, 4):
                    told = f"{family} {size} beam {beam}"
                    rows += measure(told, implementations(made, own, beam, length), torch.device("cpu"), repeats, clock)
            yield rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imported_models", description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", default="processor", choices=["processor", "wall"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/imports-cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    rows: list[Measurement] = []
    for rows in run(args.sizes, args.families, args.length, args.repeats, args.clock):
        write(args.output, "imports-cpu", rows, torch.device("cpu"), args.clock)
    show("imports-cpu", rows, Console(width=140))


if __name__ == "__main__":
    main()
