"""The Conformer block against the one of the transformers library, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.attention.positions import NoPosition
from transduce.encoders.transformer import ConformerEncoder
from transduce.flow import Batch, Padded
from transduce.modalities.audio import FrameStacking

WIDTH, HEADS, HIDDEN, KERNEL = 16, 4, 24, 5


DENSE = {
    "feed_forward1.fc1": "ffn1.intermediate_dense",
    "feed_forward1.fc2": "ffn1.output_dense",
    "feed_forward2.fc1": "ffn2.intermediate_dense",
    "feed_forward2.fc2": "ffn2.output_dense",
    "self_attention.q_proj": "self_attn.linear_q",
    "self_attention.k_proj": "self_attn.linear_k",
    "self_attention.v_proj": "self_attn.linear_v",
    "self_attention.out_proj": "self_attn.linear_out",
    "convolution.norm": "conv_module.batch_norm",
    "feed_forward1_norm": "ffn1_layer_norm",
    "self_attention_norm": "self_attn_layer_norm",
    "convolution_norm": "conv_module.layer_norm",
    "feed_forward2_norm": "ffn2_layer_norm",
    "final_norm": "final_layer_norm",
}
ALONE = {
    "convolution.pointwise_conv1.weight": "conv_module.pointwise_conv1.weight",
    "convolution.pointwise_conv2.weight": "conv_module.pointwise_conv2.weight",
    "convolution.depthwise_conv.weight": "conv_module.depthwise_conv.weight",
    "convolution.norm.mean": "conv_module.batch_norm.running_mean",
    "convolution.norm.variance": "conv_module.batch_norm.running_var",
}


def copy(ours: nn.Module, theirs: nn.Module) -> None:
    names = {f"{mine}.{kind}": f"{name}.{kind}" for mine, name in DENSE.items() for kind in ("weight", "bias")}
    given, shapes = theirs.state_dict(), {name: value.shape for name, value in ours.state_dict().items()}
    ours.load_state_dict({mine: given[name].view(shapes[mine]) for mine, name in (names | ALONE).items()})


def test_conformer_layer_equals_transformers() -> None:
    library = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
    torch.manual_seed(1)
    config = library.Wav2Vec2ConformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=HIDDEN, hidden_act="swish",
        conv_depthwise_kernel_size=KERNEL, position_embeddings_type=None,
    )  # fmt: skip
    layer = library.Wav2Vec2ConformerEncoderLayer(config).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer.conv_module.batch_norm.running_mean.normal_()
    layer.conv_module.batch_norm.running_var.uniform_(0.5, 2)
    encoder = ConformerEncoder(
        FrameStacking(WIDTH, shape=(WIDTH,)), layers=1, width=WIDTH, heads=HEADS, ff_width=HIDDEN, kernel=KERNEL,
        norm_kind="batch", position=NoPosition,
    ).eval()  # fmt: skip
    with torch.no_grad():
        encoder.embedding.projection.weight.copy_(torch.eye(WIDTH))
        encoder.embedding.projection.bias.zero_()
    copy(encoder.conformer_layers[0], layer)
    rows = torch.randn(2, 9, WIDTH)
    wanted = layer(rows)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    found = encoder(Batch(Padded(rows, torch.ones(2, 9, dtype=torch.bool)))).values
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
