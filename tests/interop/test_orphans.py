"""Checkpoints of frozen toolkits, as models of ours: the same logits as what they computed, word for word."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from legacy_fixtures import (
    HEADS,
    HIDDEN,
    LAYERS,
    SAID,
    WIDTH,
    WORDS,
    Reference,
    compare,
    numbers,
    read,
    save_fairseq,
    save_joeynmt,
    save_marian,
    save_opennmt,
    shaken,
)
from test_pieces import write_model

import transduce
from transduce.flow import EOS, UNK
from transduce.interop.export import export


def marian_waves(length: int) -> torch.Tensor:
    """As Marian lays them out: all sines, then all cosines, the slowest of 1 / 10000."""
    half = WIDTH // 2
    angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(half) * np.log(10000) / (half - 1))
    return torch.cat((angles.sin(), angles.cos()), -1)


def marian_arrays(library) -> dict[str, np.ndarray]:
    arrays = {"Wemb": library.model.shared.weight[:-1], "decoder_ff_logit_out_b": library.final_logits_bias[:, :-1]}
    before = hasattr(library.model.encoder, "layer_norm")
    end = "_pre" if before else ""
    for side in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(library.model, side).layers, 1):
            start = f"{side}_l{number}"
            blocks = {"self": (layer.self_attn, layer.self_attn_layer_norm)}
            if side == "decoder":
                blocks["context"] = (layer.encoder_attn, layer.encoder_attn_layer_norm)
            for name, (block, norm) in blocks.items():
                for letter, part in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
                    arrays[f"{start}_{name}_W{letter}"] = getattr(block, part).weight.T
                    arrays[f"{start}_{name}_b{letter}"] = getattr(block, part).bias[None]
                arrays[f"{start}_{name}_Wo_ln_scale{end}"] = norm.weight[None]
                arrays[f"{start}_{name}_Wo_ln_bias{end}"] = norm.bias[None]
            for number_, part in (("1", layer.fc1), ("2", layer.fc2)):
                arrays[f"{start}_ffn_W{number_}"], arrays[f"{start}_ffn_b{number_}"] = part.weight.T, part.bias[None]
            arrays[f"{start}_ffn_ffn_ln_scale{end}"] = layer.final_layer_norm.weight[None]
            arrays[f"{start}_ffn_ffn_ln_bias{end}"] = layer.final_layer_norm.bias[None]
        if before:
            norm = getattr(library.model, side).layer_norm
            arrays[f"{side}_top_ln_scale"], arrays[f"{side}_top_ln_bias"] = norm.weight[None], norm.bias[None]
    return {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in arrays.items()}


def marian_model(before: bool, activation: str):
    transformers = pytest.importorskip("transformers")
    words = ["</s>", "<unk>", *WORDS, "no", "1"]
    name = "Pegasus" if before else "Marian"
    made = getattr(transformers, f"{name}Config")(
        vocab_size=len(words) + 1, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, scale_embedding=True,
        activation_function=activation, pad_token_id=len(words), eos_token_id=0, decoder_start_token_id=len(words),
        max_position_embeddings=64,
    )  # fmt: skip
    library = getattr(transformers, {"Pegasus": "PegasusForConditionalGeneration"}.get(name, "MarianMTModel"))(made)
    shaken(library)
    library.final_logits_bias = torch.randn_like(library.final_logits_bias)
    library.final_logits_bias[0, -1] = -1e9
    with torch.no_grad():
        library.model.shared.weight[-1] = 0  # what an output starts with
        for side in (library.model.encoder, library.model.decoder):
            side.embed_positions.weight[:] = marian_waves(64)
    for module in library.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    return library, words


def marian_settings(before: bool, activation: str) -> str:
    places = ("n", "da", "n") if before else ("", "dan", "")
    lines = {
        "type": "transformer", "dim-emb": WIDTH, "enc-depth": LAYERS, "dec-depth": LAYERS,
        "transformer-heads": HEADS, "transformer-dim-ffn": HIDDEN, "transformer-ffn-activation": activation,
        "transformer-preprocess": f'"{places[0]}"', "transformer-postprocess": places[1],
        "transformer-postprocess-top": f'"{places[2]}"', "transformer-postprocess-emb": "d",
        "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": "false",
        "transformer-dropout": 0.1, "version": "v1.9.0",
    }  # fmt: skip
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


@pytest.mark.parametrize(("before", "activation"), [(False, "swish"), (True, "relu")])
def test_marian(before, activation, tmp_path):
    library, words = marian_model(before, activation)
    save_marian(tmp_path, marian_arrays(library), marian_settings(before, activation), words)
    model = transduce.load(tmp_path, device="cpu")
    source, theirs = read(model)
    theirs = theirs.where(source.mask, len(words))
    said = numbers(model.target, SAID)
    said[:, 0] = len(words)
    with torch.no_grad():
        answer = library(input_ids=theirs, attention_mask=source.mask.long(), decoder_input_ids=said).logits
    compare(model, source, answer)
    # The same with a table for each side and a matrix of its own at the end, and a vocabulary for each side.
    arrays = marian_arrays(library)
    table = arrays.pop("Wemb")
    arrays |= {"encoder_Wemb": table, "decoder_Wemb": table, "decoder_ff_logit_out_W": np.ascontiguousarray(table.T)}
    save_marian(tmp_path / "two", arrays, marian_settings(before, activation), words)
    (tmp_path / "two" / "vocab.yml").rename(tmp_path / "two" / "vocab.de.yml")
    shutil.copy(tmp_path / "two" / "vocab.de.yml", tmp_path / "two" / "vocab.en.yml")
    (tmp_path / "two" / "model.npz.decoder.yml").write_text("vocabs: [/old/place/vocab.de.yml, vocab.en.yml]\n")
    two = transduce.load(tmp_path / "two" / "model.npz", device="cpu")
    assert two.recipe.model.tie == "none"
    compare(two, source, answer)


def test_marian_words_and_pieces(tmp_path):
    """YAML knows numbers and truth, a vocabulary only words; pieces of SentencePiece are cut here."""
    arrays = marian_arrays(marian_model(False, "relu")[0])
    words = ["</s>", "<unk>", "no", "1", "~", "1.5", "null", '"', ":", "#x", "-", "@@", "é", "<s>", "w", "</s>x"]
    words += [f"more{number}" for number in range(len(arrays["Wemb"]) - len(words))]
    save_marian(tmp_path, arrays, marian_settings(False, "relu"), words)
    tokenizer = transduce.load(tmp_path, device="cpu").source
    text = 'no 1 ~ 1.5 null " : #x - @@ é <s>'
    ids = tokenizer.encode(text).ids
    assert [tokenizer.vocabulary.backend_ids[number] for number in ids] == list(range(2, 14))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("</s> <unk> other").ids == [UNK] * 3  # which is text like any other
    assert tokenizer.decode([UNK, EOS]) == "<unk>"
    (tmp_path / "vocab.yml").unlink()
    pieces = {"▁a": -1.0, "b": -1.5, "▁b": -2.0, **{f"c{number}": -9.0 for number in range(len(arrays["Wemb"]) - 6)}}
    write_model(tmp_path / "vocab.spm", pieces)
    model = transduce.load(tmp_path, device="cpu")
    ids = model.source.encode("ab b").ids
    assert [model.source.vocabulary.backend_ids[number] for number in ids] == [3, 4, 5]
    assert model.target.decode([*ids, EOS]) == "ab b"


def fairseq_options(**changes) -> dict:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", LAYERS), ("embed_dim", WIDTH), ("ffn_embed_dim", HIDDEN), ("attention_heads", HEADS),
            ("normalize_before", False), ("learned_pos", False),
        )
    }  # fmt: skip
    return {
        "arch": "transformer", **sides, "dropout": 0.1, "activation_fn": "relu", "max_source_positions": 60,
        "max_target_positions": 60, "share_all_embeddings": False, "share_decoder_input_output_embed": True,
        "no_token_positional_embeddings": False, "adaptive_softmax_cutoff": None, "layernorm_embedding": False,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(("sections", "tied"), [(False, False), (True, True)])
def test_fairseq_with_waves(sections, tied, tmp_path):
    """FSMT of transformers is the Transformer of fairseq's WMT19 models."""
    transformers = pytest.importorskip("transformers")
    sizes = {"src_vocab_size": len(WORDS) + 4, "tgt_vocab_size": len(WORDS) + 1}
    config = transformers.FSMTConfig(
        langs=["de", "en"], **sizes, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_ffn_dim=HIDDEN, decoder_ffn_dim=HIDDEN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        activation_function="relu", max_position_embeddings=60, scale_embedding=True,
    )  # fmt: skip
    library = transformers.FSMTForConditionalGeneration(config)
    if tied:
        library.model.decoder.output_projection.weight = library.model.decoder.embed_tokens.weight
    shaken(library)
    for side in (library.model.encoder, library.model.decoder):
        side.embed_positions.make_weight(64, WIDTH, 1)
    state = {name.removeprefix("model."): tensor for name, tensor in library.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if "embed_positions" not in name and "lm_head" not in name}
    state |= {f"{side}.embed_positions._float_tensor": torch.zeros(1) for side in ("encoder", "decoder")}
    state["encoder.version"] = torch.tensor([3.0])
    save_fairseq(tmp_path, state, fairseq_options(share_decoder_input_output_embed=tied), sections=sections)
    model = transduce.load(tmp_path, device="cpu")
    source, theirs = read(model)
    said = numbers(model.target, SAID)
    with torch.no_grad():
        answer = library(input_ids=theirs, attention_mask=source.mask.long(), decoder_input_ids=said, use_cache=False)
    compare(model, source, answer.logits)
    assert model.recipe.generation.strategy == "huggingface_beam"


def test_fairseq_with_learned_positions(tmp_path):
    """Norm before, norms over the embeddings, one table for everything: the layout of mBART."""
    transformers = pytest.importorskip("transformers")
    size = len(WORDS) + 4
    config = transformers.MBartConfig(
        vocab_size=size, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        activation_function="gelu", max_position_embeddings=60, scale_embedding=False,
    )  # fmt: skip
    library = shaken(transformers.MBartForConditionalGeneration(config))
    library.final_logits_bias.zero_()
    state = {name.removeprefix("model."): tensor for name, tensor in library.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name.startswith(("encoder.", "decoder."))}
    changes = {"encoder_normalize_before": True, "decoder_normalize_before": True, "share_all_embeddings": True}
    changes |= {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True}
    options = fairseq_options(**changes, activation_fn="gelu", no_scale_embedding=True)
    save_fairseq(tmp_path, state, options, sections=False)
    model = transduce.load(tmp_path / "checkpoint_best.pt", device="cpu")
    source, theirs = read(model)
    with torch.no_grad():
        said = numbers(model.target, SAID)
        answer = library(input_ids=theirs, attention_mask=source.mask.long(), decoder_input_ids=said).logits
    compare(model, source, answer)


@pytest.mark.parametrize("before", [False, True])
def test_joeynmt(before, tmp_path):
    reference = shaken(Reference(len(WORDS) + 4, len(WORDS) + 1, before=before))
    save_joeynmt(tmp_path, reference, before=before)
    model = transduce.load(tmp_path, device="cpu")
    source, theirs = read(model)
    with torch.no_grad():
        compare(model, source, reference(theirs, source.mask, numbers(model.target, SAID)))
    assert model.recipe.generation.beam == 4


@pytest.mark.parametrize("biased", [False, True])
def test_opennmt(biased, tmp_path):
    """Its sources are closed by nothing: ours are, and the model does not read it."""
    reference = shaken(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True))
    if not biased:
        with torch.no_grad():
            for layer in (*reference.encoder, *reference.decoder):
                layer.self_attn.in_proj_bias.zero_()
                layer.self_attn.out_proj.bias.zero_()
    save_opennmt(tmp_path, reference, biased=biased)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    source, theirs = read(model)
    lengths = source.mask.sum(1, keepdim=True) - 1
    mask = torch.arange(source.mask.size(1)) < lengths
    with torch.no_grad():
        compare(model, source, reference(theirs[:, :-1], mask[:, :-1], numbers(model.target, SAID)))
    assert model.generate(["", "w1"], max_length=5)  # an empty source has something to see


def test_opennmt_and_on(tmp_path):
    """On to CTranslate2, which its models were served with: it reads no </s> after a source either."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    reference = shaken(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True))
    save_opennmt(tmp_path, reference)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    texts = ["w1 w2 w3 w4", "w9", "w3 w3 w12 w0 a@@ b"]
    folder = export(tmp_path / "model.pt", tmp_path / "served", "ctranslate2")
    served = ctranslate2.Translator(str(folder)).translate_batch(
        [text.split() for text in texts], beam_size=1, max_decoding_length=8
    )
    mine = model.generate(texts, strategy="greedy", beam=1, max_length=8)
    assert [" ".join(one.hypotheses[0]) for one in served] == [one.text for one in mine]
