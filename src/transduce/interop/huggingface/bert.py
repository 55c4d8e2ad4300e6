"""BERT, RoBERTa, ELECTRA, ALBERT, MPNet, DeBERTa-v3 and DistilBERT: post-norm, and a norm over the embeddings.

Each comes without a head (hidden states, pooled to embeddings), or with a masked language model, a sequence classifier
or a token classifier on top.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, pad

from transduce.contracts import Family
from transduce.interop.huggingface.family import NORM_EPS, Config, Content, TensorMap, WeightMap, Weights, max_positions
from transduce.interop.huggingface.heads import after_specials, without_specials
from transduce.recipe import Recipe

LAYER = {
    "attention.self.query": "self_attention.q_proj",
    "attention.self.key": "self_attention.k_proj",
    "attention.self.value": "self_attention.v_proj",
    "attention.output.dense": "self_attention.out_proj",
    "attention.output.LayerNorm": "self_attention_norm",
    "intermediate.dense": "feed_forward.fc1",
    "output.dense": "feed_forward.fc2",
    "output.LayerNorm": "feed_forward_norm",
}
DISTIL_LAYER = {
    "attention.q_lin": "self_attention.q_proj",
    "attention.k_lin": "self_attention.k_proj",
    "attention.v_lin": "self_attention.v_proj",
    "attention.out_lin": "self_attention.out_proj",
    "sa_layer_norm": "self_attention_norm",
    "ffn.lin1": "feed_forward.fc1",
    "ffn.lin2": "feed_forward.fc2",
    "output_layer_norm": "feed_forward_norm",
}
ALBERT_LAYER = {
    "attention.query": "self_attention.q_proj",
    "attention.key": "self_attention.k_proj",
    "attention.value": "self_attention.v_proj",
    "attention.dense": "self_attention.out_proj",
    "attention.LayerNorm": "self_attention_norm",
    "ffn": "feed_forward.fc1",
    "ffn_output": "feed_forward.fc2",
    "full_layer_layer_norm": "feed_forward_norm",
}
MPNET_LAYER = {
    **{f"attention.attn.{hf}": f"self_attention.{hf}_proj" for hf in ("q", "k", "v")},
    "attention.attn.o": "self_attention.out_proj",
    "attention.LayerNorm": "self_attention_norm",
    "intermediate.dense": "feed_forward.fc1",
    "output.dense": "feed_forward.fc2",
    "output.LayerNorm": "feed_forward_norm",
}
EMBEDDINGS = {
    "embeddings.LayerNorm": "encoder.embedding_norm",
    "embeddings.position_embeddings": "encoder.position.embed_positions",
}
BERT_MODULES = {
    **{f"encoder.layer.*.{hf}": f"encoder.layers.*.{native}" for hf, native in LAYER.items()},
    **EMBEDDINGS,
}
DISTIL_MODULES = {
    **{f"transformer.layer.*.{hf}": f"encoder.layers.*.{native}" for hf, native in DISTIL_LAYER.items()},
    **EMBEDDINGS,
}
ALBERT_MODULES = {**EMBEDDINGS, "encoder.embedding_hidden_mapping_in": "encoder.embedding_proj"}
DEBERTA_MODULES = {
    **{f"encoder.layer.*.{hf}": f"encoder.layers.*.{native}" for hf, native in LAYER.items() if "output" in hf},
    **{
        f"encoder.layer.*.attention.self.{hf}_proj": f"encoder.layers.*.self_attention.{native}_proj"
        for hf, native in (("query", "q"), ("key", "k"), ("value", "v"))
    },
    "encoder.layer.*.intermediate.dense": "encoder.layers.*.feed_forward.fc1",
    **EMBEDDINGS,
    # Tables of all layers and their projections, until each layer gets its own vectors of distances.
    "encoder.LayerNorm": "distances.norm",
    "encoder.rel_embeddings": "distances",
    "encoder.layer.*.attention.self.pos_key_proj": "distances.*.k_proj",
    "encoder.layer.*.attention.self.pos_query_proj": "distances.*.q_proj",
}
MPNET_MODULES = {
    **{f"encoder.layer.*.{hf}": f"encoder.layers.*.{native}" for hf, native in MPNET_LAYER.items()},
    **EMBEDDINGS,
    "encoder.relative_attention_bias": "encoder.position.relative.relative_attention_bias",
}
SEGMENTS = "segments"  # token type embeddings, until they are added to the positions
WORD_TABLE, POSITION_TABLE = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TOKENS = {WORD_TABLE: TensorMap(("encoder.embedding.weight",))}
TOKEN_TYPES = {"embeddings.token_type_embeddings.weight": TensorMap((SEGMENTS,))}
POSITION_OFFSET = 2  # of RoBERTa, whose first token is at position pad_token_id + 1
MPNET_BUCKETS = 32
DEBERTA_PRETRAINING = tuple(  # heads in the published files of version 3
    f"{module}.{leaf}"
    for module in (
        "lm_predictions.lm_head", "lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm",
        "mask_predictions.dense", "mask_predictions.LayerNorm", "mask_predictions.classifier",
    )
    for leaf in ("weight", "bias")
)  # fmt: skip
POOLERS = ("pooler.dense", "pooler", "cls.seq_relationship", "sop_classifier.classifier")  # of next sentences

# Masked language model: its output matrix is the embedding table.
MLM_BIAS = "head.output.projection.bias"
MLM_DENSE, MLM_NORM = "head.layers.1", "head.layers.3"
CLASSIFIER_DENSE, CLASSIFIER_OUTPUT, TAGGER_OUTPUT = "head.layers.1", "head.layers.3", "head.layers.1"
MLM_TABLES = {WORD_TABLE: TensorMap(("encoder.embedding.weight", "head.output.projection.weight"))}
# Modules, output bias, tied tensors.
MLM_HEADS: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "Bert": (
        {"cls.predictions.transform.dense": MLM_DENSE, "cls.predictions.transform.LayerNorm": MLM_NORM},
        "cls.predictions.bias",
        {"cls.predictions.decoder.weight": WORD_TABLE, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    "Roberta": (
        {"lm_head.dense": MLM_DENSE, "lm_head.layer_norm": MLM_NORM},
        "lm_head.bias",
        {"lm_head.decoder.weight": WORD_TABLE, "lm_head.decoder.bias": "lm_head.bias"},
    ),
    "Albert": (
        {"predictions.dense": MLM_DENSE, "predictions.LayerNorm": MLM_NORM},
        "predictions.bias",
        {"predictions.decoder.weight": WORD_TABLE, "predictions.decoder.bias": "predictions.bias"},
    ),
    "DebertaV2": (
        {"cls.predictions.transform.dense": MLM_DENSE, "cls.predictions.transform.LayerNorm": MLM_NORM},
        "cls.predictions.bias",
        {"cls.predictions.decoder.weight": WORD_TABLE, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    "MPNet": (
        {"lm_head.dense": MLM_DENSE, "lm_head.layer_norm": MLM_NORM},
        "lm_head.bias",
        {"lm_head.decoder.weight": WORD_TABLE, "lm_head.decoder.bias": "lm_head.bias"},
    ),
    "DistilBert": (
        {"vocab_transform": MLM_DENSE, "vocab_layer_norm": MLM_NORM},
        "vocab_projector.bias",
        {"vocab_projector.weight": WORD_TABLE},
    ),
    "Electra": (
        {"generator_predictions.dense": MLM_DENSE, "generator_predictions.LayerNorm": MLM_NORM},
        "generator_lm_head.bias",
        {"generator_lm_head.weight": WORD_TABLE},
    ),
}
# The activation of the masked language model is that of the encoder; others have gelu.
SAME_ACTIVATION = ("Bert", "DistilBert", "Albert", "DebertaV2")
# Hidden layer, its activation, output layer.
CLASSIFIERS = {
    "Bert": ("pooler.dense", "tanh", "classifier"),
    "Roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "Albert": ("pooler", "tanh", "classifier"),
    "DebertaV2": ("pooler.dense", "gelu", "classifier"),
    "MPNet": ("classifier.dense", "tanh", "classifier.out_proj"),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
    "Electra": ("classifier.dense", "gelu", "classifier.out_proj"),
}


# Suffix of the architecture name, by the kind of head.
SUFFIXES = {
    "embedder": "Model",
    "mlm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "tagger": "ForTokenClassification",
}


def _bert_encoder(config: Config) -> Content:
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    return {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_act", "gelu"),
        "norm": "post",
        "norm_eps": config.rate("layer_norm_eps", 1e-12),
        "embedding_norm": True,
        "position": {"kind": "learned", "max_positions": config.count("max_position_embeddings", 512)},
        "dropout": config.rate("hidden_dropout_prob"),
        "attention_dropout": config.rate("attention_probs_dropout_prob"),
    }


def _roberta_encoder(config: Config) -> Content:
    config.require("pad_token_id", POSITION_OFFSET - 1)
    encoder = _bert_encoder(config)
    encoder["position"]["max_positions"] -= POSITION_OFFSET
    return encoder


def _mpnet_encoder(config: Config) -> Content:
    """The library has 32 buckets and 128 distances, whatever the config says."""
    config.require("relative_attention_num_buckets", MPNET_BUCKETS)
    encoder = _roberta_encoder(config)
    positions = encoder["position"]["max_positions"]
    return {**encoder, "position": {"kind": "learned_relative", "max_positions": positions, "buckets": MPNET_BUCKETS}}


def _electra_encoder(config: Config) -> Content:
    narrow, width = config.count("embedding_size", 128), config.count("hidden_size")
    return {**_bert_encoder(config), "embedding_width": None if narrow == width else narrow}


def _albert_encoder(config: Config) -> Content:
    """Layers that share their weights become layers with equal weights."""
    encoder, inner = _bert_encoder(config), config.count("inner_group_num", 1)
    return {
        **encoder,
        "layers": encoder["layers"] * inner,
        "activation": config.activation("hidden_act", "gelu_new"),
        "embedding_width": config.count("embedding_size", 128),
    }


def _albert_weights(weights: WeightMap) -> Callable[[Config, Collection[str]], WeightMap]:
    def weight_map(config: Config, names: Collection[str]) -> WeightMap:
        count, groups = config.count("num_hidden_layers"), config.count("num_hidden_groups", 1)
        inner = config.count("inner_group_num", 1)
        if max(groups, inner) > len(names):
            raise config.wrong("num_hidden_groups", groups, "and inner_group_num are more than the weights")
        group = "encoder.albert_layer_groups.*.albert_layers"
        modules = {
            f"{group}.{number}.{hf}": f"groups.*.{number}.{native}"
            for number in range(inner)
            for hf, native in ALBERT_LAYER.items()
        }

        def combine(found: Weights) -> Weights:
            for name in [name for name in found if name.startswith("groups.")]:
                _, own, number, rest = name.split(".", 3)
                tensor = found.pop(name)
                for layer in range(count):
                    if int(layer / (count / groups)) == int(own):
                        found[f"encoder.layers.{layer * inner + int(number)}.{rest}"] = tensor
            return fold_segments(found)

        return replace(weights, modules={**weights.modules, **modules}, combine=combine)

    return weight_map


def _deberta_encoder(config: Config) -> Content:
    """Disentangled attention; version 3 has no positions beside it, and no segments."""
    config.require("relative_attention", True)
    config.require("conv_kernel_size", 0)
    config.require("embedding_size", config.count("hidden_size"))
    config.require("pooler_hidden_act", "gelu")
    config.require("pooler_hidden_size", config.count("hidden_size"))
    encoder = _bert_encoder(config)
    if not config.flag("position_biased_input", True):
        config.require("type_vocab_size", 0)
        encoder["position"] = "none"
    return {**encoder, "token_mixer": _disentangled(config), "norm_eps": config.rate("layer_norm_eps", 1e-7)}


def _disentangled(config: Config) -> Content:
    terms = config.content.get("pos_att_type") or []
    terms = sorted(terms.split("|") if isinstance(terms, str) else map(str, terms))
    known = {("c2p", "p2c"): "both", ("c2p",): "query", ("p2c",): "key"}
    if tuple(terms) not in known:
        raise config.wrong("pos_att_type", terms, "is not supported", "supported: c2p, p2c or both")
    longest = config.integer("max_relative_positions", -1) or -1
    longest = longest if longest > 0 else config.count("max_position_embeddings", 512)
    buckets = config.integer("position_buckets", -1) or -1
    grouped = (buckets, longest) if buckets > 0 else (longest, None)
    return {"kind": "disentangled", "buckets": grouped[0], "max_distance": grouped[1], "terms": known[tuple(terms)]}


def _deberta_weights(weights: WeightMap) -> Callable[[Config, Collection[str]], WeightMap]:
    """The vectors of distances in a layer are one table of all layers, projected as queries and keys are."""

    def weight_map(config: Config, names: Collection[str]) -> WeightMap:
        eps, layers = config.rate("layer_norm_eps", 1e-7), config.count("num_hidden_layers")
        terms = _disentangled(config)["terms"]
        kinds = [("k_proj", "relative_keys")] * (terms != "key") + [("q_proj", "relative_queries")] * (terms != "query")

        def combine(found: Weights) -> Weights:
            table, norm = (
                found.pop("distances.weight", None),
                [found.pop(f"distances.norm.{leaf}", None) for leaf in ("weight", "bias")],
            )
            if table is not None and norm[0] is not None:
                table = layer_norm(table, table.shape[1:], norm[0], norm[1], eps)
            for layer in range(layers):
                own, part = f"distances.{layer}", f"encoder.layers.{layer}.self_attention"
                for projection, name in kinds:
                    module = own if f"{own}.{projection}.weight" in found else part
                    weight, bias = (found.get(f"{module}.{projection}.{leaf}") for leaf in ("weight", "bias"))
                    if table is not None and weight is not None:
                        found[f"{part}.{name}.weight"] = linear(table, weight, bias)
            for name in [name for name in found if name.startswith("distances.")]:
                del found[name]
            return fold_segments(found)

        return replace(weights, combine=combine)

    return weight_map


def _distilbert_encoder(config: Config) -> Content:
    return {
        "kind": "transformer",
        "layers": config.count("n_layers"),
        "width": config.count("dim"),
        "heads": config.count("n_heads"),
        "ff_width": config.count("hidden_dim"),
        "activation": config.activation("activation", "gelu"),
        "norm": "post",
        "norm_eps": 1e-12,
        "embedding_norm": True,
        "position": {"kind": "learned", "max_positions": config.count("max_position_embeddings", 512)},
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }


def encoder_sizes(encoder: Mapping[str, Any]) -> Content:
    """Values of config.json that BERT and ViT have in common."""
    return {
        "hidden_size": encoder["width"],
        "num_hidden_layers": encoder["layers"],
        "num_attention_heads": encoder["heads"],
        "intermediate_size": encoder["ff_width"],
        "hidden_act": encoder["activation"].replace("gelu_tanh", "gelu_new"),
        "layer_norm_eps": encoder["norm_eps"] or NORM_EPS["layer"],
        "hidden_dropout_prob": encoder["dropout"],
        "attention_probs_dropout_prob": encoder["attention_dropout"],
    }


def _bert_config(encoder: Mapping[str, Any], positions: int) -> Content:
    return {
        "model_type": "bert",
        **encoder_sizes(encoder),
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
    }


def _roberta_config(encoder: Mapping[str, Any], positions: int) -> Content:
    return {
        **_bert_config(encoder, positions + POSITION_OFFSET),
        "model_type": "roberta",
        "type_vocab_size": 1,
        "pad_token_id": POSITION_OFFSET - 1,
    }


def _distilbert_config(encoder: Mapping[str, Any], positions: int) -> Content:
    sizes = encoder_sizes(encoder)
    return {
        "model_type": "distilbert",
        "dim": sizes["hidden_size"],
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "hidden_dim": sizes["intermediate_size"],
        "activation": sizes["hidden_act"],
        "max_position_embeddings": positions,
        "dropout": sizes["hidden_dropout_prob"],
        "attention_dropout": sizes["attention_probs_dropout_prob"],
    }


ENCODERS: dict[str, Callable[[Config], Content]] = {
    "Bert": _bert_encoder,
    "Roberta": _roberta_encoder,
    "DistilBert": _distilbert_encoder,
    "Electra": _electra_encoder,
    "Albert": _albert_encoder,
    "DebertaV2": _deberta_encoder,
    "MPNet": _mpnet_encoder,
}
CONFIGS: dict[str, Callable[[Mapping[str, Any], int], Content]] = {
    "Bert": _bert_config,
    "Roberta": _roberta_config,
    "DistilBert": _distilbert_config,
}
MODULES = {
    "Bert": BERT_MODULES,
    "Roberta": BERT_MODULES,
    "DistilBert": DISTIL_MODULES,
    "Electra": {**BERT_MODULES, "embeddings_project": "encoder.embedding_proj"},
    "Albert": ALBERT_MODULES,
    "DebertaV2": DEBERTA_MODULES,
    "MPNet": MPNET_MODULES,
}
OFFSET_POSITIONS = {
    POSITION_TABLE: TensorMap(
        ("encoder.position.embed_positions.weight",),
        lambda table: [table[POSITION_OFFSET:]],
        lambda native: pad(native[0], (0, 0, POSITION_OFFSET, 0)),
    )
}
TENSORS = {
    "Bert": {**TOKENS, **TOKEN_TYPES},
    "Roberta": {**TOKENS, **TOKEN_TYPES, **OFFSET_POSITIONS},
    "MPNet": {**TOKENS, **OFFSET_POSITIONS},
    "DistilBert": TOKENS,
    "Electra": {**TOKENS, **TOKEN_TYPES},
    "Albert": {**TOKENS, **TOKEN_TYPES},
    "DebertaV2": {**TOKENS, **TOKEN_TYPES},
}


CONFIGURED = {"Albert": _albert_weights, "DebertaV2": _deberta_weights}  # tables that depend on the config
PREFIXES = {"DebertaV2": "deberta."}


def fold_segments(weights: Weights, side: str = "encoder", segment_name: str = SEGMENTS) -> Weights:
    """Adds the embedding of the first segment to every position: a text is one segment here."""
    segments = weights.pop(segment_name, None)
    if segments is not None and (name := f"{side}.position.embed_positions.weight") in weights:
        weights[name] = weights[name] + segments[0]
    return weights


def _ignored(kind: str) -> tuple[str, ...]:
    """Weights that hidden states do not need: position ids, the next-sentence pooler, the masked language model."""
    modules, bias, tied = MLM_HEADS[kind]
    names = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias", "gamma", "beta")]
    names += [f"{module}.{leaf}" for module in POOLERS for leaf in ("weight", "bias")]
    names += DEBERTA_PRETRAINING if kind == "DebertaV2" else ()
    return ("embeddings.position_ids", *names, bias, *tied)


def _weight_map(kind: str, **changes: Any) -> WeightMap:
    maps = {"modules": MODULES[kind], "tensors": TENSORS[kind], "ignored": _ignored(kind), **changes}
    return WeightMap(combine=fold_segments, prefix=PREFIXES.get(kind, f"{kind.lower()}."), **maps)


def _family(kind: str, head: Content, weights: WeightMap, *, exported: bool, **options: Any) -> Family:
    suffix = SUFFIXES[head["kind"]]

    def to_recipe(config: Config, names: Collection[str]) -> Content:
        encoder = ENCODERS[kind](config)
        model = {"encoder": encoder, "head": dict(head), "scale_embedding": False}
        if head["kind"] == "mlm":
            config.require("tie_word_embeddings", True)
            own = {"norm_eps": encoder["norm_eps"], "output_width": encoder.get("embedding_width")}
            activation = encoder["activation"] if kind in SAME_ACTIVATION else "gelu"
            model |= {"head": {**head, **own, "activation": activation}, "tie": "target"}
        return model

    def to_config(recipe: Recipe, pad_id: int | None) -> Content | None:
        encoder = recipe.model.encoder
        if encoder is None or recipe.data.sources or (recipe.model.head or {}).get("kind") != head["kind"]:
            return None
        if kind == "Roberta" and pad_id != POSITION_OFFSET - 1:
            return None
        return CONFIGS[kind](encoder, max_positions(recipe, encoder))

    def constant_weights(config: Mapping[str, Any]) -> Weights:
        """Segment embeddings and pooler are zero: left out, the transformers library would draw them at random."""
        if "type_vocab_size" not in config:
            return {}
        width, prefix = config["hidden_size"], "" if suffix == "Model" else weights.prefix
        zeros = {f"{prefix}embeddings.token_type_embeddings.weight": torch.zeros(config["type_vocab_size"], width)}
        if suffix == "Model":
            zeros |= {"pooler.dense.weight": torch.zeros(width, width), "pooler.dense.bias": torch.zeros(width)}
        return zeros

    writer = to_config if exported else None
    weight_map = CONFIGURED[kind](weights) if kind in CONFIGURED else weights
    return Family(to_recipe, weight_map, writer, start_token="", constant_weights=constant_weights, **options)


def _masked_lm(kind: str, exported: bool) -> Family:
    modules, bias, tied = MLM_HEADS[kind]
    weights = _weight_map(
        kind,
        modules={**MODULES[kind], **modules},
        tensors={**TENSORS[kind], **MLM_TABLES, bias: TensorMap((MLM_BIAS,))},
        tied=tied,
        ignored=tuple(set(_ignored(kind)) - {bias, *tied}),
    )
    data = {"format": "text", "noise": {"kind": "mask_tokens"}}
    return _family(kind, {"kind": "mlm"}, weights, exported=exported, data=data)


def label_rows(hf: str, native: str) -> dict[str, TensorMap]:
    return {
        f"{hf}.{leaf}": TensorMap((f"{native}.{leaf}",), after_specials, without_specials)
        for leaf in ("weight", "bias")
    }


def _sequence_classifier(kind: str, exported: bool) -> Family:
    dense, activation, output = CLASSIFIERS[kind]
    weights = _weight_map(
        kind,
        modules={**MODULES[kind], dense: CLASSIFIER_DENSE},
        tensors={**TENSORS[kind], **label_rows(output, CLASSIFIER_OUTPUT)},
    )
    head = {"kind": "classifier", "pooling": "first", "activation": activation}
    return _family(kind, head, weights, exported=exported, label_kind="labels")


def _token_classifier(kind: str, exported: bool) -> Family:
    weights = _weight_map(kind, tensors={**TENSORS[kind], **label_rows("classifier", TAGGER_OUTPUT)})
    return _family(kind, {"kind": "tagger"}, weights, exported=exported, label_kind="words")


def _embedder(kind: str, exported: bool) -> Family:
    head = {"kind": "embedder", "pooling": "mean", "normalise": False}
    return _family(kind, head, _weight_map(kind), exported=exported)


# An export takes the first family that fits: RoBERTa, which needs pad_token_id 1, comes before BERT. XLM-RoBERTa and
# CamemBERT are RoBERTa with other vocabularies.
KINDS = {
    "Roberta": "Roberta",
    "Bert": "Bert",
    "DistilBert": "DistilBert",
    "XLMRoberta": "Roberta",
    "Camembert": "Roberta",
    "Electra": "Electra",
    "Albert": "Albert",
    "DebertaV2": "DebertaV2",
    "MPNet": "MPNet",
}
FAMILIES = {
    f"{name}{suffix}": make(kind, name == kind and kind in CONFIGS)
    for name, kind in KINDS.items()
    for suffix, make in (
        ("Model", _embedder),
        ("ForMaskedLM", _masked_lm),
        ("ForSequenceClassification", _sequence_classifier),
        ("ForTokenClassification", _token_classifier),
    )
}
