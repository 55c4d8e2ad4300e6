"""fairseq checkpoints: logits equal to the transformers library or to the equations."""

from __future__ import annotations

import pytest
import torch
from legacy_fixtures import (
    DECODER_IDS,
    HEADS,
    HIDDEN,
    LAYERS,
    WIDTH,
    WORDS,
    compare,
    numbers,
    randomised,
    read,
    save_fairseq,
)
from legacy_recurrent_fixtures import Translator, save_fairseq_cells

import transduce
from transduce.errors import InputError


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
def test_transformer_with_sinusoidal_positions(sections, tied, tmp_path):
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
    randomised(library)
    for side in (library.model.encoder, library.model.decoder):
        side.embed_positions.make_weight(64, WIDTH, 1)
    state = {name.removeprefix("model."): tensor for name, tensor in library.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if "embed_positions" not in name and "lm_head" not in name}
    state |= {f"{side}.embed_positions._float_tensor": torch.zeros(1) for side in ("encoder", "decoder")}
    state["encoder.version"] = torch.tensor([3.0])
    save_fairseq(tmp_path, state, fairseq_options(share_decoder_input_output_embed=tied), sections=sections)
    model = transduce.load(tmp_path, device="cpu")
    source, foreign = read(model)
    decoder_ids = numbers(model.target, DECODER_IDS)
    with torch.no_grad():
        answer = library(
            input_ids=foreign, attention_mask=source.mask.long(), decoder_input_ids=decoder_ids, use_cache=False
        )
    compare(model, source, answer.logits)
    assert model.recipe.generation.strategy == "huggingface_beam"


def test_transformer_with_learned_positions(tmp_path):
    """Norm before, norms over the embeddings, one table for everything: the layout of mBART."""
    transformers = pytest.importorskip("transformers")
    size = len(WORDS) + 4
    config = transformers.MBartConfig(
        vocab_size=size, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        activation_function="gelu", max_position_embeddings=60, scale_embedding=False,
    )  # fmt: skip
    library = randomised(transformers.MBartForConditionalGeneration(config))
    library.final_logits_bias.zero_()
    state = {name.removeprefix("model."): tensor for name, tensor in library.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name.startswith(("encoder.", "decoder."))}
    changes = {"encoder_normalize_before": True, "decoder_normalize_before": True, "share_all_embeddings": True}
    changes |= {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True}
    options = fairseq_options(**changes, activation_fn="gelu", no_scale_embedding=True)
    save_fairseq(tmp_path, state, options, sections=False)
    model = transduce.load(tmp_path / "checkpoint_best.pt", device="cpu")
    source, foreign = read(model)
    with torch.no_grad():
        decoder_ids = numbers(model.target, DECODER_IDS)
        answer = library(input_ids=foreign, attention_mask=source.mask.long(), decoder_input_ids=decoder_ids).logits
    compare(model, source, answer)


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_lstm_equals_the_equations(layers, both, tmp_path):
    reference = randomised(Translator("lstm", layers, "bilinear", bridge=False, both=both))
    save_fairseq_cells(tmp_path, reference)
    model = transduce.load(tmp_path, device="cpu")
    source, foreign = read(model)
    with torch.no_grad():
        compare(model, source, reference(foreign, source.mask, numbers(model.target, DECODER_IDS)))


def convolutions(side: str, shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {f"{side}.convolutions.{place}.weight_v": torch.zeros(shape) for place, shape in enumerate(shapes)}


EVEN, ODD = (2, 8, 16), (3, 8, 16)


@pytest.mark.parametrize(
    ("encoder", "decoder", "changes", "problem"),
    [
        ([ODD, (8, 16)], [ODD], {}, "encoder_layers: .* does not fit the weights"),
        ([EVEN], [ODD], {}, "encoder_layers: .* even size"),
        ([ODD, ODD], [ODD], {"encoder_layers": "[(8, 3, 1), (8, 3, 2)]"}, "encoder_layers: .* residual connections"),
        ([ODD], [ODD], {"decoder_attention": "[False]"}, "decoder_attention: .* leaves out"),
    ],
)
def test_unsupported_convolutions_are_refused_by_name(encoder, decoder, changes, problem, tmp_path):
    """Models of which fairseq trained one are in test_recorded.py."""
    state = {**convolutions("encoder", encoder), **convolutions("decoder", decoder)}
    state |= {f"{side}.embed_tokens.weight": torch.zeros(len(WORDS) + 4, 8) for side in ("encoder", "decoder")}
    options = {"arch": "fconv", "encoder_embed_dim": 8, "decoder_embed_dim": 8, "encoder_layers": "[(8, 3)]", **changes}
    save_fairseq(tmp_path, state, options, sections=False)
    with pytest.raises(InputError, match=problem):
        transduce.load(tmp_path, device="cpu")
