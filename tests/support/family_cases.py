"""Hugging Face families as test cases: small random models with unusual settings, and comparisons with the library."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from huggingface_fixtures import (
    BART,
    GPT2,
    MORE_TEXTS,
    T5,
    TEXTS,
    encode_sources_for_both,
    hf_ids,
    shake,
    write_tokenizer,
)

import transduce
from transduce.flow import Batch, Padded
from transduce.interop.huggingface import FAMILIES

Changes = dict[str, Any]
STARTS = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4], [1, 8, 13, 10], [1, 7, 7, 2]])


@dataclass(frozen=True)
class Case:
    """One family. The first of its settings is the one that is searched and exported."""

    name: str  # as the documentation writes it
    architecture: str
    config: str  # the config class of the library
    sizes: Changes
    frame: str  # the special tokens and the template of its tokenizer
    settings: tuple[Changes, ...] = ({},)
    noise: float = 0.3
    prepare: Callable[[Any], None] = field(default=lambda model: None)  # the last change of the weights
    configure: Callable[[Any, Changes], Any] | None = None  # the config of nested models
    exported_as: str = ""  # the architecture that an export writes, where it is a relative that computes the same

    @property
    def decoder_only(self) -> bool:
        return not FAMILIES[self.architecture].source_eos

    @property
    def exported(self) -> bool:
        return bool(self.exported_as) or FAMILIES[self.architecture].to_config is not None


@dataclass(frozen=True)
class Built:
    """A folder, the model of the library that it holds, and the imported model."""

    folder: Path
    library: Any
    model: transduce.Model


BART_SIZES = {
    "vocab_size": 24, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "max_position_embeddings": 40,
    "forced_eos_token_id": None, **BART,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": 26, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, **T5,
}  # fmt: skip


def _larger_end(model: Any) -> None:
    """Some outputs end by themselves."""
    model.get_output_embeddings().weight[model.config.eos_token_id] *= 4


def _likely_end(model: Any) -> None:
    unlikely = {"blenderbot": -1.0, "led": 0.0}
    model.final_logits_bias[0, model.config.eos_token_id] = unlikely.get(model.config.model_type, 3.5)


def _nllb_moe(model: Any) -> None:
    """Experts by their equation: the experts of transformers 5.22 take the places 0 and 1 for those of a token."""

    def forward(experts: Any, rows: Any, chosen: Any, gates: Any) -> Any:
        parts = (gates[:, number, None] * experts[f"expert_{number}"](rows) for number in range(gates.shape[1]))
        return sum(parts) * (1 - experts.moe_token_dropout)

    for part in model.modules():
        if type(part).__name__ == "NllbMoeExperts":
            part.forward = MethodType(forward, part)
    _german(model)


def _german_once(model: Any) -> None:
    _german(model)
    model.get_input_embeddings().weight[23] *= 0.2  # not the most likely token of all


def _german(model: Any) -> None:
    """Outputs begin with the code of a language, and some end by themselves."""
    model.get_input_embeddings().weight[model.config.eos_token_id] *= 2
    model.generation_config.forced_bos_token_id = 23


SCALED = {"scale_embedding": True, "activation_function": "relu", "encoder_layers": 1, "decoder_layers": 3}


def _bart_case(name: str, kind: str, first: Changes | None = None, exported_as: str = "") -> Case:
    settings = ({**(first or {})}, SCALED)
    return Case(
        name, f"{kind}ForConditionalGeneration", f"{kind}Config", BART_SIZES, "bart", settings, prepare=_likely_end,
        exported_as=exported_as,
    )  # fmt: skip


BART_MODEL = "BartForConditionalGeneration"


LLAMA_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, **GPT2,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 0.01}
NEOX_SIZES = {key: value for key, value in LLAMA_SIZES.items() if key != "num_key_value_heads"}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
OPT_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "word_embed_proj_dim": 16, "pad_token_id": 22, **GPT2,
}  # fmt: skip
BERT_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


LED_SIZES = {key: value for key, value in BART_SIZES.items() if key != "max_position_embeddings"} | {
    "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 30, "attention_window": 4,
}  # fmt: skip
GEMMA_SIDE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 3, "rms_norm_eps": 0.01,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "bos_token_id": 0, "pad_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
FSMT_SIZES = {key: value for key, value in BART_SIZES.items() if key != "vocab_size"} | {
    "src_vocab_size": 24, "tgt_vocab_size": 24, "langs": ["a", "b"], "num_beams": 1,
}  # fmt: skip


def _larger_output(model: Any) -> None:
    """As `_larger_end`, of FSMT, whose output projection the library does not name."""
    model.model.decoder.output_projection.weight[model.config.eos_token_id] *= 2


def _decoder_only(name: str, kind: str, sizes: Changes, *settings: Changes, exported_as: str = "") -> Case:
    return Case(
        name, f"{kind}ForCausalLM", f"{kind}Config", sizes, "gpt2", settings, prepare=_larger_end,
        exported_as=exported_as,
    )  # fmt: skip


def _joined(encoder: Any, decoder: Any, start: int, pad: int, end: int) -> Any:
    """The config of an EncoderDecoderModel."""
    library = pytest.importorskip("transformers")
    config = library.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for key, value in (
        ("decoder_start_token_id", start), ("pad_token_id", pad), ("eos_token_id", end), ("vocab_size", 24),
    ):  # fmt: skip
        setattr(config, key, value)
    return config


READING = {"is_decoder": True, "add_cross_attention": True}


def _bert_to_bert(library: Any, changes: Changes) -> Any:
    """An encoder and a decoder of different widths, or of one."""
    encoder, decoder = library.BertConfig(**{**BERT_SIZES, **changes}), library.BertConfig(**BERT_SIZES, **READING)
    return _joined(encoder, decoder, start=2, pad=0, end=3)


def _roberta_to_roberta(library: Any, changes: Changes) -> Any:
    sizes = {**BERT_SIZES, "pad_token_id": 1}
    encoder, decoder = library.RobertaConfig(**{**sizes, **changes}), library.RobertaConfig(**sizes, **READING)
    return _joined(encoder, decoder, start=0, pad=1, end=2)


def _bert_to_gpt2(library: Any, changes: Changes) -> Any:
    sizes = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40}
    decoder = library.GPT2Config(**sizes, bos_token_id=2, eos_token_id=3, **READING)
    return _joined(library.BertConfig(**{**BERT_SIZES, **changes}), decoder, start=2, pad=0, end=3)


def _t5gemma(library: Any, changes: Changes) -> Any:
    """`changes`: of the encoder, the decoder, or both."""
    sides = {side: {**GEMMA_SIDE, **changes.get(side, {})} for side in ("encoder", "decoder")}
    both = {key: value for key, value in changes.items() if key not in sides}
    config = library.T5GemmaConfig(**sides, vocab_size=24, **both)
    config.tie_word_embeddings = config.decoder.tie_word_embeddings = both.get("tie_word_embeddings", True)
    return config


GEMMA_SETTINGS = (
    {},
    {
        "tie_word_embeddings": False,
        "encoder": {"hidden_size": 20, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "decoder": {"layer_types": ["full_attention"] * 3, "attn_logit_softcapping": None,
                    "final_logit_softcapping": None, "attention_bias": True, "hidden_activation": "silu"},
    },
)  # fmt: skip


CASES = {
    case.name: case
    for case in (
        _decoder_only(
            "OPT", "OPT", OPT_SIZES, {}, {"enable_bias": False, "activation_function": "gelu"},
            exported_as="GPT2LMHeadModel",
        ),
        _decoder_only("Llama", "Llama", LLAMA_SIZES, ROPE, {"attention_bias": True, "tie_word_embeddings": True}),
        _decoder_only("Mistral", "Mistral", LLAMA_SIZES, {"sliding_window": 3, **ROPE}, {"sliding_window": None}),
        _decoder_only(
            "Qwen2", "Qwen2", LLAMA_SIZES, ROPE, {"tie_word_embeddings": True}, exported_as="LlamaForCausalLM"
        ),
        _decoder_only(
            "GPT-NeoX", "GPTNeoX", NEOX_SIZES, {"rope_parameters": NEOX_ROPE},
            {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "relu",
             "num_attention_heads": 2, "layer_norm_eps": 0.01},
        ),
        Case(
            "bert2bert", "EncoderDecoderModel", "EncoderDecoderConfig", {}, "bert", ({}, {"hidden_size": 20}),
            0.6, configure=_bert_to_bert,
        ),
        Case(
            "roberta2roberta", "EncoderDecoderModel", "EncoderDecoderConfig", {}, "roberta",
            ({}, {"hidden_size": 20, "hidden_act": "relu"}), 0.6, configure=_roberta_to_roberta,
        ),
        Case(
            "bert2gpt2", "EncoderDecoderModel", "EncoderDecoderConfig", {}, "bert", ({}, {"num_hidden_layers": 1}), 1.0,
            configure=_bert_to_gpt2,
        ),
        Case(
            "FSMT", "FSMTForConditionalGeneration", "FSMTConfig", FSMT_SIZES, "fsmt",
            ({}, {**SCALED, "tie_word_embeddings": True, "scale_embedding": False}), prepare=_larger_output,
            exported_as="MarianMTModel",
        ),
        Case(
            "LED", "LEDForConditionalGeneration", "LEDConfig", LED_SIZES, "bart",
            ({}, {"attention_window": [6, 6], "activation_function": "relu", "decoder_layers": 3}), prepare=_likely_end,
        ),
        Case(
            "LongT5", "LongT5ForConditionalGeneration", "LongT5Config", {**T5_SIZES, "local_radius": 2}, "t5",
            ({}, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "local_radius": 3}), 0.1, _larger_end,
        ),
        Case(
            "T5Gemma", "T5GemmaForConditionalGeneration", "T5GemmaConfig", {}, "bart", GEMMA_SETTINGS, 0.5,
            _larger_end, _t5gemma,
        ),
        Case(
            "Switch Transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
            {**T5_SIZES, "num_layers": 3, "num_sparse_encoder_layers": 1, "num_experts": 3, "num_decoder_layers": 2,
             "num_sparse_decoder_layers": 2},
            "t5", ({}, {"router_bias": True, "num_sparse_encoder_layers": 0, "dense_act_fn": "gelu"}), 0.1,
            _larger_end,
        ),
        Case(
            "NLLB-MoE", "NllbMoeForConditionalGeneration", "NllbMoeConfig",
            {**BART_SIZES, "decoder_layers": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 1, "num_experts": 4},
            "m2m", ({}, {"router_bias": True, "moe_token_dropout": 0.0, "decoder_sparse_step": 0}),
            prepare=_nllb_moe,
        ),
        _bart_case("PLBart", "PLBart", {"scale_embedding": False}, exported_as=BART_MODEL),
        _bart_case("MVP", "Mvp", exported_as=BART_MODEL),
        Case(
            "M2M100, NLLB", "M2M100ForConditionalGeneration", "M2M100Config", BART_SIZES, "m2m", ({}, SCALED),
            prepare=_german_once,
        ),
        _bart_case("Blenderbot", "Blenderbot", exported_as="PegasusForConditionalGeneration"),
        _bart_case("BlenderbotSmall", "BlenderbotSmall"),
        Case(
            "mT5", "MT5ForConditionalGeneration", "MT5Config", T5_SIZES, "t5",
            ({}, {"feed_forward_proj": "relu", "num_decoder_layers": 3}), 0.1, _larger_end,
            exported_as="T5ForConditionalGeneration",
        ),
        Case(
            "UMT5", "UMT5ForConditionalGeneration", "UMT5Config", T5_SIZES, "t5",
            ({}, {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3}), 0.1, _larger_end,
        ),
    )
}  # fmt: skip


@cache
def built(name: str, setting: int = 0) -> Built:
    """The case as the library writes it, built once for all laws."""
    library, case = pytest.importorskip("transformers"), CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    torch.manual_seed(3)
    changes = {**case.sizes, **case.settings[setting]}
    config = case.configure(library, changes) if case.configure else getattr(library, case.config)(**changes)
    made = shake(getattr(library, case.architecture)(config), size=case.noise)
    with torch.no_grad():
        case.prepare(made)
    made.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    write_tokenizer(folder, case.frame)
    return Built(folder, made, transduce.load(folder, device="cpu"))


def logit_difference(one: Built) -> float:
    """The largest difference of log-probabilities, over padded sources and every token that both have."""
    model, library = one.model, one.library
    read = torch.tensor([hf_ids(model, row) for row in STARTS.tolist()])
    rows = model.target.vocabulary.backend_ids
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    with torch.no_grad():
        if model.recipe.model.encoder is None:
            expected = library(input_ids=read).logits.log_softmax(-1)
            state = model.network.start(Batch(target=Padded.from_rows(STARTS.tolist())))
        else:
            source, numbers, mask = encode_sources_for_both(model)
            # With a cache FSMT expects single tokens, and has no causal mask.
            given = {"input_ids": numbers, "attention_mask": mask, "use_cache": False}
            expected = library(**given, decoder_input_ids=read).logits.log_softmax(-1)
            state = model.network.start(Batch(source))
        found = model.network.advance(STARTS, state).logits.log_softmax(-1)
    return float((found[..., known] - expected[..., torch.tensor(rows)[known]]).abs().max())


SEARCHES = {
    "greedy": ({"num_beams": 1}, {"strategy": "greedy", "beam": 1}),
    "beam": ({"num_beams": 4}, {"strategy": "huggingface_beam", "beam": 4, "stop": "length"}),
}


def continuations(one: Built, search: str, length: int = 12) -> tuple[list[list[int]], list[list[int]]]:
    """As `outputs`, of a decoder alone; each text is continued by itself, since the library pads on the left."""
    theirs, ours = SEARCHES[search]
    start, end = one.library.config.bos_token_id, one.library.config.eos_token_id
    expected, found = [], []
    for text in (TEXTS[0], TEXTS[1], TEXTS[3]):
        given = [start, *hf_ids(one.model, one.model.target.encode_batch([text])[0])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = one.library.generate(
                input_ids=torch.tensor([given]), max_new_tokens=length, pad_token_id=end, **theirs
            )[0, 1:].tolist()
        expected.append(row[: row.index(end) + 1] if end in row else row)
        hypothesis = one.model.generate([text], max_length=length, **ours)[0].decoded.hypothesis
        found.append(hf_ids(one.model, list(hypothesis.ids)))
    return expected, found


def outputs(one: Built, search: str, max_length: int = 15) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs of the library and of the imported model, in ids of the library, up to </s>."""
    if one.model.recipe.model.encoder is None:
        return continuations(one, search)
    theirs, ours = SEARCHES[search]
    _, numbers, mask = encode_sources_for_both(one.model, MORE_TEXTS)
    end, pad = one.library.config.eos_token_id, one.library.config.pad_token_id
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = one.library.generate(
            input_ids=numbers, attention_mask=mask, max_new_tokens=max_length, bad_words_ids=[[pad]], **theirs
        )
    cut = [row[: row.index(end) + 1] if end in row else row for row in rows[:, 1:].tolist()]
    found = one.model.generate(MORE_TEXTS, max_length=max_length, **ours)
    return cut, [hf_ids(one.model, list(result.decoded.hypothesis.ids)) for result in found]


__all__ = ["CASES", "SEARCHES", "TEXTS", "built", "logit_difference", "outputs"]
