"""Small random checkpoints in the layouts of legacy toolkits."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing import assert_close

from transduce.flow import EOS, Batch, Padded

WORDS = [f"w{number}" for number in range(15)] + ["a@@", "b"]
WIDTH, HEADS, HIDDEN, LAYERS = 8, 2, 12, 2


TEXTS = ["w1 w2 w3 w4", "w9", "w3 w3 nothing w12 w0 a@@ b"]
DECODER_IDS = torch.tensor([[1, 5, 9, 7], [1, 12, 11, 4], [1, 8, 3, 10]])  # in our numbers


def numbers(tokenizer, ids: torch.Tensor) -> torch.Tensor:
    """Our ids in foreign."""
    return torch.tensor(tokenizer.vocabulary.backend_ids)[ids]


def read(model) -> tuple[Padded, torch.Tensor]:
    """Sources in native and in foreign ids."""
    padded = Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(TEXTS)])
    return padded, numbers(model.source, padded.values)


def logits(model, source: Padded) -> torch.Tensor:
    with torch.no_grad():
        return model.network.advance(DECODER_IDS, model.network.start(Batch(source))).logits


def known(model) -> torch.Tensor:
    """Ids of native that are one of foreign; a first token that is only a copy is none."""
    rows = model.target.vocabulary.backend_ids
    return torch.tensor([n for n, row in enumerate(rows) if row >= 0 and (n != 1 or row not in rows[2:])])


def compare(model, source: Padded, expected: torch.Tensor) -> None:
    which = known(model)
    assert len(which) > 14
    found = logits(model, source).log_softmax(-1)[..., which]
    selected = expected[..., numbers(model.target, which)]
    everything = expected.logsumexp(-1, keepdim=True)
    assert_close(found, selected - everything, rtol=1e-5, atol=1e-5)


def randomised(module: nn.Module) -> nn.Module:
    """Random values for all weights, biases and norms included, so that none can be confused with another."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.dim() == 1) * 0.3)
    return module.eval()


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def save_marian(folder: Path, arrays: dict[str, np.ndarray], settings: str, words: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = np.frombuffer(settings.encode() + b"\0", dtype=np.int8)
    np.savez(folder / "model.npz", **arrays, **{"special:model.yml": text})
    write_lines(folder / "vocab.yml", [f"'{word}': {number}" for number, word in enumerate(words)])


def quantised(array: np.ndarray) -> tuple[np.ndarray, float]:
    """int8 numbers of a matrix, and what they are to be divided by."""
    multiplier = np.float32(127 / np.abs(array).max())
    return np.rint(array * multiplier).astype(np.int8), float(multiplier)


def marian_binary(arrays: dict[str, np.ndarray], settings: str) -> bytes:
    """A binary of Marian, as marian-conv writes it for intgemm8: int8 matrices, transposed but for embeddings."""
    items = []
    for name, array in arrays.items():
        kind, content = 0x404, array.astype("<f4").tobytes()
        if "_W" in name or name == "Wemb":
            numbers, multiplier = quantised(array)
            numbers = numbers if "Wemb" in name else numbers.T
            kind, content = 0x4101, np.ascontiguousarray(numbers).tobytes() + struct.pack("<f", multiplier)
        items.append((name, kind, array.shape, content + bytes(-len(content) % 256)))
        items.append((f"{name}_QuantMultA", 0x4101, (1, 1), bytes(256)))
    text = settings.encode() + b"\0"
    items.append(("special:model.yml", 0x101, (len(text),), text))
    top = struct.pack("<QQ", 1, len(items))
    for name, kind, shape, content in items:
        top += struct.pack("<QQQQ", len(name) + 1, kind, len(shape), len(content))
    top += b"".join(name.encode() + b"\0" for name, *_ in items)
    top += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(top) + 8) % 256
    return top + struct.pack("<Q", padding) + bytes(padding) + b"".join(content for *_, content in items)


def save_fairseq(folder: Path, state: dict[str, torch.Tensor], options: dict[str, Any], *, sections: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    languages = {"source_lang": "de", "target_lang": "en"}
    top: dict[str, Any] = {"args": argparse.Namespace(**options, **languages)}
    if sections:
        top = {"args": None, "cfg": {"model": argparse.Namespace(**options), "task": {**languages, "data": "x"}}}
    history = [{"num_updates": 3, "best_loss": 0.5}]
    optimiser = {"state": {0: {"step": 1, "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(
        {**top, "model": state, "optimizer_history": history, "last_optimizer_state": optimiser},
        folder / "checkpoint_best.pt",
    )
    for language, words in (("de", WORDS), ("en", WORDS if options.get("share_all_embeddings") else WORDS[:-3])):
        write_lines(folder / f"dict.{language}.txt", [f"{word} {number + 1}" for number, word in enumerate(words)])


def waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines turn by turn (Vaswani 2017)."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


class Reference(nn.Module):
    """A Transformer of torch.nn, with embeddings, waves and an output: what JoeyNMT and OpenNMT-py compute."""

    def __init__(self, source: int, target: int, *, before: bool, bias: bool = False) -> None:
        super().__init__()
        options = {"norm_first": before, "batch_first": True, "layer_norm_eps": 1e-6, "dropout": 0.0}
        self.source, self.target = nn.Embedding(source, WIDTH), nn.Embedding(target, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **options) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-6) if before else nn.Identity() for _ in range(2))
        self.output = nn.Linear(WIDTH, target, bias=bias)
        self.scale = WIDTH**0.5

    def forward(self, source: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = self.source(source) * self.scale + waves(source.size(1), WIDTH)
        for layer in self.encoder:
            rows = layer(rows, src_key_padding_mask=~mask)
        memory = self.norms[0](rows)
        rows = self.target(target) * self.scale + waves(target.size(1), WIDTH)
        later = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        for layer in self.decoder:
            rows = layer(rows, memory, tgt_mask=later, memory_key_padding_mask=~mask)
        return self.output(self.norms[1](rows))

    def parts(self, side: str, number: int, names: dict[str, str]) -> dict[str, torch.Tensor]:
        """The weights of a layer under other names: `names` says what each part of torch.nn's is called."""
        found = {}
        for name, tensor in getattr(self, side)[number].state_dict().items():
            module, _, leaf = name.rpartition(".")
            if leaf.startswith("in_proj"):
                for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                    found[f"{names[f'{module}.{letter}']}.{leaf.removeprefix('in_proj_')}"] = part.clone()
            else:
                found[f"{names[module]}.{leaf}"] = tensor
        return found


def save_joeynmt(folder: Path, model: Reference, *, before: bool, tied: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    attention = {"q": "q_layer", "k": "k_layer", "v": "v_layer", "out_proj": "output_layer"}
    feed = {"linear1": "feed_forward.pwff_layer.0", "linear2": "feed_forward.pwff_layer.3"}
    own = {"encoder": "src_src_att", "decoder": "trg_trg_att"}
    norms = {
        "encoder": ("layer_norm", "feed_forward.layer_norm"),
        "decoder": ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
    }
    state = {"src_embed.lut.weight": model.source.weight, "trg_embed.lut.weight": model.target.weight}
    for side in own:
        names = feed | {f"self_attn.{a}": f"{own[side]}.{b}" for a, b in attention.items()}
        names |= {f"multihead_attn.{a}": f"src_trg_att.{b}" for a, b in attention.items()}
        names |= {f"norm{number}": name for number, name in enumerate(norms[side], 1)}
        for number in range(LAYERS):
            state |= {f"{side}.layers.{number}.{a}": b for a, b in model.parts(side, number, names).items()}
        state[f"{side}.pe.pe"] = waves(50, WIDTH)[None]
    for side, norm in zip(own, model.norms, strict=True):
        state |= {f"{side}.layer_norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    state["decoder.output_layer.weight"] = model.output.weight
    torch.save({"steps": 5, "best_ckpt_score": 1.5, "model_state": state, "optim_state": {}}, folder / "best.ckpt")
    part = f"""
      type: transformer
      num_layers: {LAYERS}
      num_heads: {HEADS}
      hidden_size: {WIDTH}
      ff_size: {HIDDEN}
      dropout: 0.1
      layer_norm: {"pre" if before else "post"}
      embeddings: {{embedding_dim: {WIDTH}, scale: true}}"""
    head = f"name: small\ntesting: {{beam_size: 4}}\nmodel:\n    tied_softmax: {str(tied).lower()}\n"
    (folder / "config.yaml").write_text(f"{head}    encoder:{part}\n    decoder:{part}\n")
    for name, words in (("src_vocab.txt", WORDS), ("trg_vocab.txt", WORDS[:-3])):
        write_lines(folder / name, ["<unk>", "<pad>", "<s>", "</s>", *words])


def save_opennmt(folder: Path, model: Reference, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    attention = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "out_proj": "final_linear"}
    feed = {"linear1": "feed_forward.w_1", "linear2": "feed_forward.w_2"}
    layers = {"encoder": "encoder.transformer", "decoder": "decoder.transformer_layers"}
    norms = {
        "encoder": ("layer_norm", "feed_forward.layer_norm"),
        "decoder": ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
    }
    state = {}
    for side, table in (("encoder", model.source), ("decoder", model.target)):
        names = feed | {f"self_attn.{a}": f"self_attn.{b}" for a, b in attention.items()}
        names |= {f"multihead_attn.{a}": f"context_attn.{b}" for a, b in attention.items()}
        names |= {f"norm{number}": name for number, name in enumerate(norms[side], 1)}
        for number in range(LAYERS):
            state |= {f"{layers[side]}.{number}.{a}": b for a, b in model.parts(side, number, names).items()}
        state[f"{side}.embeddings.make_embedding.emb_luts.0.weight"] = table.weight
        state[f"{side}.embeddings.make_embedding.pe.pe"] = waves(50, WIDTH)[:, None]
    for side, norm in zip(layers, model.norms, strict=True):
        state |= {f"{side}.layer_norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    options = {
        "encoder_type": "transformer", "decoder_type": "transformer", "enc_layers": LAYERS, "dec_layers": LAYERS,
        "hidden_size": WIDTH, "heads": HEADS, "transformer_ff": HIDDEN, "position_encoding": True,
        "max_relative_positions": 0, "dropout": [0.1], "attention_dropout": [0.1], "pos_ffn_activation_fn": "relu",
        "share_embeddings": False, "share_decoder_embeddings": False, "copy_attn": False, "layer_norm": "standard",
    }  # fmt: skip
    specials = ["<unk>", "<blank>", "<s>", "</s>"]
    vocabulary = {"src": [*specials, *WORDS], "tgt": [*specials, *WORDS[:-3]], "data_task": "seq2seq"}
    content = {
        "model": {
            name: tensor
            for name, tensor in state.items()
            if changes.get("biased", True) or "self_attn" not in name or "bias" not in name
        },
        "generator": model.output.state_dict(),
        "vocab": {**vocabulary, "decoder_start_token": "<s>"},
        "opt": argparse.Namespace(**options, **{k: v for k, v in changes.items() if k != "biased"}),
        "optim": {"training_step": 3, "optimizer": {"state": {}}},
    }
    torch.save(content, folder / "model.pt")
