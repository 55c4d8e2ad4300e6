"""Small random models of the transformers library in folders as it writes them, each with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
# Where each family has its special tokens; the words fill the other places.
MARIAN = {"pad_token_id": 23, "eos_token_id": 0, "decoder_start_token_id": 23}
BART = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
GPT2 = {"bos_token_id": 23, "eos_token_id": 23}
PIECES = {
    "marian": ["</s>", "<unk>", *WORDS, "extra", "<pad>"],
    "pegasus": ["<pad>", "</s>", "<unk>", *WORDS, "extra"],
    "bart": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "mbart": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "t5": ["<pad>", "</s>", "<unk>", *WORDS],  # the model has more rows than these
    "gpt2": [*WORDS, "a", "b", "c", "<|endoftext|>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "distilbert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", *WORDS],
    "m2m": ["<s>", "<pad>", "</s>", "<unk>", *WORDS[:-2], "<eng>", "<deu>"],
}
MASK = {"bert": "[MASK]", "distilbert": "[MASK]", "roberta": "<mask>"}  # one more where masks are filled
ENDS = {"marian": 0.5, "bart": 3.5, "mbart": 3.5, "pegasus": 3.5}  # how readily outputs end
FRAMES = {
    "marian": "$A </s>",
    "pegasus": "$A </s>",
    "t5": "$A </s>",
    "bart": "<s> $A </s>",
    "mbart": "<s> $A </s>",
    "bert": "[CLS] $A [SEP]",
    "distilbert": "[CLS] $A [SEP]",
    "roberta": "<s> $A </s>",
    "m2m": "<eng> $A </s>",
}
ENCODERS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "xlm": "XLMRoberta",
    "camembert": "Camembert",
}


def shake(model: Any, seed: int = 5, size: float = 0.3) -> Any:
    """Norms and biases start at one and zero, where a mistake would not show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # waves are not learned
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
    """Writes a folder and gives the model that it holds."""
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
    shake(model, size=0.1 if family == "t5" else 0.3)  # its scores are not divided by the root of the width
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


def make_encoder(family: str, folder: Path, shape: str = "Model", **changes: Any) -> Any:
    """An encoder alone, or with what stands on top of it: Model, ForMaskedLM, ForSequenceClassification ..."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    frame = family if family in MASK else "roberta"
    if family == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2} if frame == "roberta" else {"pad_token_id": 0}
    name = ENCODERS[family]
    config = getattr(library, f"{name}Config")(vocab_size=25, max_position_embeddings=40, **{**sizes, **ids, **changes})
    model = shake(getattr(library, f"{name}{shape}")(config))
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    write_tokenizer(folder, frame, (MASK[frame],))
    return model


def write_modules(folder: Path, pooling: dict[str, Any], *, normalise: bool = True, **settings: Any) -> None:
    """What makes a folder with an encoder one of sentence-transformers."""
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
