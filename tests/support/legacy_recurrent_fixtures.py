"""A small recurrent translation model from torch.nn cells, saved in the layouts of three toolkits."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from legacy_fixtures import WORDS, save_fairseq, write_lines
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

EMBEDDING, HIDDEN = 6, 8
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


class Translator(nn.Module):
    """s_t = f([y_{t-1}; a_{t-1}], s_{t-1}), a_t = tanh(W [c_t; s_t] + b), c_t read with s_t (Luong 2015)

    `bridge`: the first state of every layer is tanh(W h + b) of the last one of the top layer, for both parts of an
    LSTM's state; else it is the last state of the same layer of the encoder.
    """

    def __init__(
        self, cell: str, layers: int, score: str, *, bridge: bool, both: bool = True, states_bridge: bool = False
    ) -> None:
        super().__init__()
        self.bounded = bridge or score != "mlp"
        size = HIDDEN // (2 if both else 1) * layers
        self.states_bridge = nn.ModuleList(nn.Linear(size, size) for _ in range(2 if cell == "lstm" else 1))
        self.has_states_bridge = states_bridge
        self.kind, self.score, self.both = cell, score, both
        self.source, self.target = nn.Embedding(len(WORDS) + 4, EMBEDDING), nn.Embedding(len(WORDS) + 1, EMBEDDING)
        self.encoder = CELLS[cell](
            EMBEDDING, HIDDEN // (2 if both else 1), layers, batch_first=True, bidirectional=both
        )
        self.decoder = CELLS[cell](EMBEDDING + HIDDEN, HIDDEN, layers, batch_first=True)
        self.bridge = nn.Linear(HIDDEN, HIDDEN) if bridge else None
        self.keys = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=not self.bounded)
        self.energy = nn.Linear(HIDDEN, 1, bias=False)
        self.combine = nn.Linear(2 * HIDDEN, HIDDEN, bias=bridge or not self.bounded)  # [c; s]
        self.output = nn.Linear(HIDDEN, len(WORDS) + 1, bias=not bridge)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        rows = pack_padded_sequence(self.source(source), mask.sum(1), batch_first=True, enforce_sorted=False)
        made, last = self.encoder(rows)
        memory = pad_packed_sequence(made, batch_first=True, total_length=source.size(1))[0]
        state = self.start(last)
        combined, found = memory.new_zeros(len(source), HIDDEN), []
        for word in self.target(target).unbind(1):
            hidden, state = self.decoder(torch.cat((word, combined), -1)[:, None], state)
            query = hidden[:, 0]
            weights = self.scores(query, memory).masked_fill(~mask, -torch.inf).softmax(-1)
            context = torch.einsum("bs,bsd->bd", weights, memory)
            combined = self.combine(torch.cat((context, query), -1))
            combined = torch.tanh(combined) if self.bounded else combined
            found.append(self.output(combined))
        return torch.stack(found, 1)

    def start(self, last):
        directions = 2 if self.both else 1
        lasts = last if isinstance(last, tuple) else (last,)
        if self.has_states_bridge:  # relu(W s + b) for the first and for the second half of all states
            layers = self.encoder.num_layers
            lasts = [
                torch.relu(torch.cat([linear(part.transpose(0, 1).flatten(1)) for part in one.split(layers)], -1))
                .unflatten(1, (layers * directions, -1))
                .transpose(0, 1)
                for linear, one in zip(self.states_bridge, lasts, strict=True)
            ]
        parts = [part.unflatten(0, (-1, directions)).transpose(1, 2).flatten(2) for part in lasts]  # L B H
        if self.bridge is not None:
            first = torch.tanh(self.bridge(parts[0][-1])).expand_as(parts[0]).contiguous()
            parts = [first] * len(parts)
        return tuple(part.contiguous() for part in parts) if len(parts) == 2 else parts[0].contiguous()

    def scores(self, query: Tensor, memory: Tensor) -> Tensor:
        if self.score == "mlp":
            return self.energy(torch.tanh(self.query(query)[:, None] + self.keys(memory)))[..., 0]
        keys = memory if self.score == "dot" else self.keys(memory)
        return torch.einsum("bd,bsd->bs", query, keys)


def layers_of(model: Translator) -> int:
    return model.encoder.num_layers


def save_joeynmt_cells(folder: Path, model: Translator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"src_embed.lut.weight": model.source.weight, "trg_embed.lut.weight": model.target.weight}
    state |= {f"{side}.rnn.{name}": one for side in ("encoder", "decoder") for name, one in cells(model, side).items()}
    state["decoder.att_vector_layer.weight"] = model.combine.weight.roll(HIDDEN, -1)  # there [s; c]
    state["decoder.att_vector_layer.bias"] = model.combine.bias
    state |= {f"decoder.bridge_layer.{name}": one for name, one in model.bridge.state_dict().items()}
    state |= {
        "decoder.output_layer.weight": model.output.weight,
        "decoder.attention.key_layer.weight": model.keys.weight,
    }
    if model.score == "mlp":
        state["decoder.attention.query_layer.weight"] = model.query.weight
        state["decoder.attention.energy_layer.weight"] = model.energy.weight
    torch.save({"model_state": state}, folder / "best.ckpt")
    common = f"type: recurrent, rnn_type: {model.kind}, num_layers: {layers_of(model)}, dropout: 0.1"
    embeddings = f"embeddings: {{embedding_dim: {EMBEDDING}, scale: false}}"
    attention = "bahdanau" if model.score == "mlp" else "luong"
    (folder / "config.yaml").write_text(
        f"model:\n"
        f"  encoder: {{{common}, hidden_size: {HIDDEN // 2}, bidirectional: true, {embeddings}}}\n"
        f"  decoder: {{{common}, hidden_size: {HIDDEN}, attention: {attention}, init_hidden: bridge, {embeddings}}}\n"
    )
    for name, words in (("src_vocab.txt", WORDS), ("trg_vocab.txt", WORDS[:-3])):
        write_lines(folder / name, ["<unk>", "<pad>", "<s>", "</s>", *words])


def cells(model: Translator, side: str) -> dict[str, Tensor]:
    return getattr(model, side).state_dict()


def single(model: Translator) -> dict[str, Tensor]:
    """The decoder's cells one by one: `weight_ih_l1` -> `1.weight_ih`"""
    return {f"{name[-1]}.{name[:-3]}": tensor for name, tensor in cells(model, "decoder").items()}


def save_opennmt_cells(folder: Path, model: Translator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = "embeddings.make_embedding.emb_luts.0.weight"
    state = {f"encoder.{words}": model.source.weight, f"decoder.{words}": model.target.weight}
    state |= {f"encoder.rnn.{name}": tensor for name, tensor in cells(model, "encoder").items()}
    state |= {f"decoder.rnn.layers.{name}": tensor for name, tensor in single(model).items()}
    state |= {f"decoder.attn.linear_out.{name}": tensor for name, tensor in model.combine.state_dict().items()}
    if model.has_states_bridge:
        state |= {f"encoder.bridge.{name}": tensor for name, tensor in model.states_bridge.state_dict().items()}
    if model.score == "mlp":
        parts = {"linear_context": model.keys, "linear_query": model.query, "v": model.energy}
        state |= {
            f"decoder.attn.{a}.{name}": one for a, part in parts.items() for name, one in part.state_dict().items()
        }
    elif model.score != "dot":
        state["decoder.attn.linear_in.weight"] = model.keys.weight.T.contiguous()
    specials = ["<unk>", "<blank>", "<s>", "</s>"]
    options = argparse.Namespace(
        encoder_type="brnn" if model.both else "rnn", decoder_type="rnn", rnn_type=model.kind.upper(),
        enc_layers=layers_of(model), dec_layers=layers_of(model), hidden_size=HIDDEN, word_vec_size=EMBEDDING,
        global_attention={"bilinear": "general"}.get(model.score, model.score), input_feed=1,
        bridge=model.has_states_bridge, dropout=[0.3],
        copy_attn=False, coverage_attn=False, global_attention_function="softmax", generator_function="softmax",
    )  # fmt: skip
    vocabulary = {"src": [*specials, *WORDS], "tgt": [*specials, *WORDS[:-3]], "decoder_start_token": "<s>"}
    generator = {f"0.{name}": tensor for name, tensor in model.output.state_dict().items()}
    torch.save({"model": state, "generator": generator, "vocab": vocabulary, "opt": options}, folder / "model.pt")


def save_fairseq_cells(folder: Path, model: Translator) -> None:
    state = {"encoder.embed_tokens.weight": model.source.weight, "decoder.embed_tokens.weight": model.target.weight}
    state |= {f"encoder.lstm.{name}": tensor for name, tensor in cells(model, "encoder").items()}
    state |= {f"decoder.layers.{name}": tensor for name, tensor in single(model).items()}
    state["decoder.attention.input_proj.weight"] = model.keys.weight.T
    state["decoder.attention.output_proj.weight"] = model.combine.weight
    state |= {f"decoder.fc_out.{name}": tensor for name, tensor in model.output.state_dict().items()}
    options = {
        "arch": "lstm", "encoder_layers": layers_of(model), "decoder_layers": layers_of(model),
        "encoder_hidden_size": HIDDEN // (2 if model.both else 1), "encoder_bidirectional": model.both,
        "decoder_hidden_size": HIDDEN, "encoder_embed_dim": EMBEDDING, "decoder_embed_dim": EMBEDDING,
        "decoder_attention": "1", "dropout": 0.1, "share_all_embeddings": False,
        "share_decoder_input_output_embed": False,
    }  # fmt: skip
    save_fairseq(folder, state, options, sections=False)
