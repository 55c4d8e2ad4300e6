"""Small random models of the transformers library in folders, and comparisons of imported models with them."""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import transduce
from transduce.flow import EOS, Batch, Padded
from transduce.interop import read
from transduce.interop.export import export

WORDS = [f"w{number}" for number in range(20)]


SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
}


# Ids of the special tokens of each family; the words have the others.
MARIAN = {"pad_token_id": 23, "eos_token_id": 0, "decoder_start_token_id": 23}


BART = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


T5 = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


GPT2 = {"bos_token_id": 23, "eos_token_id": 23}


PIECES = {
    "marian": ["</s>", "<unk>", *WORDS, "extra", "<pad>"],
    "pegasus": ["<pad>", "</s>", "<unk>", *WORDS, "extra"],
    "bart": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "fsmt": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "mbart": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "t5": ["<pad>", "</s>", "<unk>", *WORDS],  # the model has more rows than these
    "gpt2": [*WORDS, "a", "b", "c", "<|endoftext|>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "distilbert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "electra": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "deberta": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "modernbert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "albert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "m2m": ["<s>", "<pad>", "</s>", "<unk>", *WORDS[:-2], "<eng>", "<deu>"],
}


# An additional token of masked language models.
MASK = {
    "bert": "[MASK]",
    "distilbert": "[MASK]",
    "electra": "[MASK]",
    "albert": "[MASK]",
    "modernbert": "[MASK]",
    "deberta": "[MASK]",
    "roberta": "<mask>",
}


ENDS = {"marian": 0.5, "bart": 3.5, "mbart": 3.5, "pegasus": 3.5}  # output bias of </s>


FRAMES = {
    "marian": "$A </s>",
    "pegasus": "$A </s>",
    "t5": "$A </s>",
    "bart": "<s> $A </s>",
    "fsmt": "$A </s>",
    "mbart": "<s> $A </s>",
    "bert": "[CLS] $A [SEP]",
    "distilbert": "[CLS] $A [SEP]",
    "electra": "[CLS] $A [SEP]",
    "albert": "[CLS] $A [SEP]",
    "modernbert": "[CLS] $A [SEP]",
    "deberta": "[CLS] $A [SEP]",
    "roberta": "<s> $A </s>",
    "m2m": "<eng> $A </s>",
}


ENCODERS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "xlm": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
    "mpnet": "MPNet",
    "albert": "Albert",
    "modernbert": "ModernBert",
    "deberta": "DebertaV2",
}


ARCHITECTURES = {
    "marian": ("Marian, OPUS-MT", "MarianMTModel"),
    "bart": ("BART", "BartForConditionalGeneration"),
    "mbart": ("mBART-50", "MBartForConditionalGeneration"),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration"),
    "t5": ("T5, T5 1.1, FLAN-T5", "T5ForConditionalGeneration"),
    "gpt2": ("GPT-2", "GPT2LMHeadModel"),
}


def record(
    name: str,
    architecture: str,
    *,
    logits: Tensor | float | None = None,  # differences
    searches: dict[str, tuple[Sequence[Any], Sequence[Any]]] | None = None,  # greedy, beam: found and expected outputs
    export: bool | str | None = None,  # True, or the architecture that is written for it
) -> None:
    """Adds measurements to the row of a family in the file FAMILY_RECORD, which docs/interop.md is written from.

    Kept are the number of settings, the largest difference, and how many outputs were equal.
    """
    if not (place := os.environ.get("FAMILY_RECORD")):
        return
    file = Path(place)
    content = json.loads(file.read_text()) if file.exists() else {}
    row = content.setdefault(name, {"architecture": architecture})
    if logits is not None:
        difference = float(logits.abs().max()) if isinstance(logits, Tensor) else logits
        row["logits"], row["settings"] = max(difference, row.get("logits", 0.0)), row.get("settings", 0) + 1
    for search, (found, expected) in (searches or {}).items():
        equal, total = row.get(search, [0, 0])
        row[search] = [equal + sum(map(eq, found, expected)), total + len(expected)]
    if export is not None:
        row["export"] = export
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def search_name(settings: dict[str, Any]) -> str:
    """The column of a search in the record."""
    return "beam" if settings.get("num_beams", 1) > 1 else "greedy"


def shake(model: Any, seed: int = 5, size: float = 0.3) -> Any:
    """Adds noise to all weights: norms and biases start at one and zero, where a mistake would not show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # sinusoids are not learned
                parameter.add_(torch.randn_like(parameter) * size)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.eval()


def write_tokenizer(folder: Path, family: str, more: tuple[str, ...] = ()) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = [*PIECES[family], *more]
    unknown = next((piece for piece in ("<unk>", "[UNK]") if piece in pieces), "<|endoftext|>")
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [piece for piece in pieces if piece[0] in "<["]
    backend.add_special_tokens(special)
    if family in FRAMES:
        frame = FRAMES[family]
        named = [(piece, pieces.index(piece)) for piece in frame.split() if piece != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=named)
    backend.save(str(folder / "tokenizer.json"))


def make(family: str, folder: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Writes a folder and returns the model that it holds."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    if family == "t5":
        config = library.T5Config(
            vocab_size=26, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=4, **T5,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, **changes,
        )  # fmt: skip
        model = library.T5ForConditionalGeneration(config)
    elif family == "gpt2":
        model = library.GPT2LMHeadModel(
            library.GPT2Config(vocab_size=24, n_positions=40, n_embd=16, n_layer=2, n_head=4, **GPT2, **changes)
        )
    elif family == "bert":
        config = library.BertConfig(
            vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
            max_position_embeddings=40, pad_token_id=0, **changes,
        )  # fmt: skip
        model = library.BertModel(config)
    else:
        kind, model_kind, ids = {
            "marian": (library.MarianConfig, library.MarianMTModel, {**MARIAN, "scale_embedding": True}),
            "pegasus": (
                library.PegasusConfig,
                library.PegasusForConditionalGeneration,
                {**T5, "scale_embedding": True},
            ),
            "bart": (library.BartConfig, library.BartForConditionalGeneration, BART),
            "mbart": (library.MBartConfig, library.MBartForConditionalGeneration, BART),
            "m2m": (library.M2M100Config, library.M2M100ForConditionalGeneration, {**BART, "scale_embedding": True}),
        }[family]
        model = model_kind(kind(vocab_size=24, **{**SIZES, **ids, **changes}))
    shake(model, size=0.1 if family == "t5" else 0.3)  # its attention scores are not scaled
    if hasattr(model, "final_logits_bias"):  # some outputs end by themselves
        model.final_logits_bias[0, model.config.eos_token_id] = ENDS[family]
    elif family in ("t5", "m2m"):
        with torch.no_grad():
            end, more = model.config.eos_token_id, 5 if family == "t5" else 2
            model.get_input_embeddings().weight[end] *= more
            if model.lm_head.weight is not model.get_input_embeddings().weight:
                model.lm_head.weight[end] *= more
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    write_tokenizer(folder, family)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DEBERTA = {
    "relative_attention": True, "position_buckets": 6, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0, "position_biased_input": False, "max_relative_positions": 12,
}  # fmt: skip


def make_encoder(family: str, folder: Path, shape: str = "Model", **changes: Any) -> Any:
    """An encoder without or with a head; `shape`: Model, ForMaskedLM, ForSequenceClassification ..."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    frame = family if family in MASK else "roberta"
    if family == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2} if frame == "roberta" else {"pad_token_id": 0}
    ids |= (
        {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3} if family == "modernbert" else {}
    )
    name = ENCODERS[family]
    sizes |= {"embedding_size": 16} if family == "electra" else {}
    sizes |= {"local_attention": 4, "num_hidden_layers": 4} if family == "modernbert" else {}
    sizes |= DEBERTA if family == "deberta" else {}
    sizes |= {"embedding_size": 12, "num_hidden_groups": 2, "inner_group_num": 2} if family == "albert" else {}
    config = getattr(library, f"{name}Config")(vocab_size=25, max_position_embeddings=40, **{**sizes, **ids, **changes})
    model = shake(getattr(library, f"{name}{shape}")(config))
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    write_tokenizer(folder, frame, (MASK[frame],))
    return model


def write_modules(folder: Path, pooling: dict[str, Any], *, normalise: bool = True, **settings: Any) -> None:
    """Adds the files of sentence-transformers to a folder with an encoder."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if settings:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


TEXTS = ["w1 w2 w3 w4 w5 w6 w7", "w9", "w3 w3 nothing w12 w0", "w19 w18 w17 w2 w1 w0 w5 w6 w7 w8 w11"]


MORE_TEXTS = [*TEXTS, "w0 w1", "w14 w14 w15", "w2 w2 w2 w2", "w8 w10 w12", "w13", "w7 w6 w5", "w16 w4 w9 w1", "w11 w17"]


def hf_ids(model: transduce.Model, ids: list[int]) -> list[int]:
    """Hugging Face ids of native ids, including rows without a piece."""
    known = model.source.vocabulary
    ids = [number % model.source.size for number in ids]  # without word marks
    return [
        known.backend_ids[number] if known.backend_ids[number] >= 0 else int(known.pieces[number].strip("<unsed >"))
        for number in ids
    ]


def encode_sources_for_both(
    model: transduce.Model, texts: list[str] = TEXTS
) -> tuple[Padded, torch.Tensor, torch.Tensor]:
    """Native sources, and Hugging Face ids with their attention mask."""
    rows = [[*ids, EOS] for ids in model.source.encode_sources(texts)]
    padded = Padded.from_rows(rows)
    numbers = torch.tensor([hf_ids(model, row) for row in padded.values.tolist()])
    return padded, numbers, padded.mask.long()


def hf_source_ids(folder, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def generate_with_both(library, model, max_length: int):
    """Outputs of the transformers library and of the native model in Hugging Face ids, up to </s>."""
    _, numbers, mask = encode_sources_for_both(model, MORE_TEXTS)
    end = library.config.eos_token_id
    pads = [[library.config.pad_token_id]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = library.generate(input_ids=numbers, attention_mask=mask, max_new_tokens=max_length, bad_words_ids=pads)[
            :, 1:
        ].tolist()
    expected = [row[: row.index(end) + 1] if end in row else row for row in rows]
    results = model.generate(MORE_TEXTS, max_length=max_length)
    found = [hf_ids(model, list(one.decoded.hypothesis.ids)) for one in results]
    return expected, found


SEARCHES = {
    "greedy": {},
    "beam": {"num_beams": 4},
    "stops when full": {"num_beams": 4, "early_stopping": True},
    "never stops early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
    "short": {"num_beams": 4, "length_penalty": 0.2, "no_repeat_ngram_size": 2},
    "rules": {"num_beams": 3, "min_new_tokens": 6, "suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8, 9, 10]},
    "greedy rules": {"no_repeat_ngram_size": 2, "min_new_tokens": 3, "suppress_tokens": [4, 9]},
    "forced": {"num_beams": 4, "forced_bos_token_id": 3, "length_penalty": 1.5},
}


def hidden_states(library, numbers, mask) -> torch.Tensor:
    with torch.no_grad():
        base = getattr(library, library.base_model_prefix, library)
        return base(input_ids=numbers, attention_mask=mask).last_hidden_state


VIT_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.3,
    "id2label": {0: "cat", 1: "dog", 2: "a bird"},
}


def make_vit(folder, kind: str = "vit", **changes):
    torch.manual_seed(7)
    library = pytest.importorskip("transformers")
    config, model_class = {
        "vit": (library.ViTConfig, library.ViTForImageClassification),
        "deit": (library.DeiTConfig, library.DeiTForImageClassification),
    }[kind]
    model = model_class(config(**{**VIT_SIZES, **changes})).eval()
    with torch.no_grad():  # zeros would hide a token that is left out
        for name, weight in model.named_parameters():
            if "token" in name or "position" in name:
                weight.normal_()
    model.save_pretrained(folder)
    content = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 2, "size": {"height": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return model


def field(number: int, value: bytes | int) -> bytes:
    def varint(count: int) -> bytes:
        return bytes([count]) if count < 128 else bytes([count % 128 + 128]) + varint(count // 128)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def write_sentencepiece(
    path: Path, pieces: dict[str, float], kind: int = 1, special: list[tuple[str, float]] | None = None
) -> None:
    content = b""
    named = special or [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    first = [(piece, score, 2 if piece in ("<unk>", "[UNK]") else 3) for piece, score in named]
    for piece, score, type_ in [*first, *((piece, score, 1) for piece, score in pieces.items())]:
        scored = bytes([2 << 3 | 5]) + struct.pack("<f", score)
        content += field(1, field(1, piece.encode()) + scored + field(3, type_))
    path.write_bytes(content + field(2, field(3, kind)))


def check_logits_and_cross_attention(family: str, folder: Path, **changes: Any) -> None:
    """Equal logits, probabilities and cross-attention for padded sources."""
    library = make(family, folder, **changes)
    model = transduce.load(folder, device="cpu")
    source, numbers, mask = encode_sources_for_both(model)
    assert [row[: int(real.sum())] for row, real in zip(numbers.tolist(), mask, strict=True)] == [
        hf_source_ids(folder, text) for text in TEXTS
    ]
    rows = model.source.vocabulary.backend_ids
    decoder_ids = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4], [1, 8, 3, 10], [1, 7, 7, 2]])
    hf_decoder_ids = torch.tensor([hf_ids(model, row) for row in decoder_ids.tolist()])
    with torch.no_grad():
        expected = library(
            input_ids=numbers, attention_mask=mask, decoder_input_ids=hf_decoder_ids, output_attentions=True
        )
        step = model.network.advance(decoder_ids, model.network.start(Batch(source)), with_attention=True)
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    foreign = torch.tensor(rows)[known]
    record(*ARCHITECTURES[family], logits=step.logits[..., known] - expected.logits[..., foreign])
    assert_close(step.logits[..., known], expected.logits[..., foreign], rtol=1e-4, atol=1e-4)
    # Over the whole distribution: <s>, a copy of another row, must have no probability.
    assert_close(
        step.logits.log_softmax(-1)[..., known], expected.logits.log_softmax(-1)[..., foreign], rtol=1e-4, atol=1e-4
    )
    cross = torch.stack(expected.cross_attentions, 1)  # B L H T S
    assert_close(step.attention.cross, cross, rtol=1e-4, atol=1e-5)


def check_generation(family: str, folder: Path, search: str, **changes: Any) -> None:
    """Token for token the outputs of `generate`, with the generation settings of the folder."""
    library = make(family, folder, generation=SEARCHES[search], **changes)
    model = transduce.load(folder, device="cpu")
    for max_length in (12, 25):
        expected, found = generate_with_both(library, model, max_length)
        record(*ARCHITECTURES[family], searches={search_name(SEARCHES[search]): (found, expected)})
        assert found == expected


def check_outputs_vary(family: str, folder: Path) -> None:
    """`check_generation` means something only where outputs end by themselves, at different lengths."""
    library = make(family, folder, generation={"num_beams": 4})
    model = transduce.load(folder, device="cpu")
    expected, _ = generate_with_both(library, model, 25)
    assert len({len(row) for row in expected}) > 1
    native_beam = model.generate(MORE_TEXTS, max_length=25, strategy="beam")
    found = [hf_ids(model, list(one.decoded.hypothesis.ids)) for one in native_beam]
    assert found != expected


def check_round_trip(family: str, folder: Path) -> None:
    """Import, export, import: the same bits, recipe and tokens; the transformers library computes the same."""
    library = make(family, folder / "given", generation={} if family == "bert" else {"num_beams": 3})
    export(folder / "given", folder / "back", "huggingface")
    first, second = read(folder / "given"), read(folder / "back")
    assert first.recipe.model == second.recipe.model
    assert first.tokenizers[0].encode_sources(TEXTS) == second.tokenizers[0].encode_sources(TEXTS)
    assert first.weights.keys() == second.weights.keys()
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name
    again = type(library).from_pretrained(folder / "back", local_files_only=True)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    inputs |= {} if family in ("gpt2", "bert") else {"decoder_input_ids": torch.tensor([[9, 10, 11]])}
    with torch.no_grad():
        assert_close(again.eval()(**inputs)[0], library(**inputs)[0], rtol=1e-4, atol=1e-4)
    if family in ARCHITECTURES:
        record(*ARCHITECTURES[family], export=True)


def check_decoding_restores_text(family: str, folder: Path) -> None:
    make(family, folder)
    model = transduce.load(folder, device="cpu")
    ids = model.target.encode_batch(["w3 w19 w0"])[0]
    assert model.target.decode([*ids, EOS]) == "w3 w19 w0"
    assert hf_ids(model, ids) == [PIECES[family].index(word) for word in ("w3", "w19", "w0")]
