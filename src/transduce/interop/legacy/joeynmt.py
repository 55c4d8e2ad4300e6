"""JoeyNMT: a folder of config.yaml, two lists of words and a checkpoint of a Transformer or a recurrent model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Family, Place, Settings
from transduce.interop.legacy import recurrent as recurrences
from transduce.interop.legacy.assemble import Orphan
from transduce.interop.legacy.checkpoint_process import Checkpoint
from transduce.interop.legacy.marian import parse_yaml
from transduce.interop.legacy.vocabularies import Side, Special, read_lines, spaced

CONFIG = "config.yaml"
ATTENTION = {"q_layer": "query", "k_layer": "key", "v_layer": "value", "output_layer": "output"}
FEED = {"feed_forward.pwff_layer.0": "feed_forward.grow", "feed_forward.pwff_layer.3": "feed_forward.shrink"}
SIDES = {
    "encoder": ({"src_src_att": "own.attention"}, ("layer_norm", "feed_forward.layer_norm")),
    "decoder": (
        {"trg_trg_att": "own.attention", "src_trg_att": "cross"},
        ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
    ),
}


def _table() -> dict[str, str]:
    table = {"src_embed.lut": "encoder.embedding.table", "trg_embed.lut": "decoder.embedding.table"}
    for side, (attentions, norms) in SIDES.items():
        layer = {f"{theirs}.{a}": f"{ours}.{b}" for theirs, ours in attentions.items() for a, b in ATTENTION.items()}
        layer |= FEED | {theirs: f"residuals.{number}.norm" for number, theirs in enumerate(norms)}
        table |= {f"{side}.layers.*.{theirs}": f"{side}.blocks.*.{ours}" for theirs, ours in layer.items()}
        table[f"{side}.layer_norm"] = f"{side}.norm"
    return table


OUTPUT = {"decoder.output_layer.weight": Place(("decoder.output.layer.weight",))}
WAVES = ("encoder.pe.pe", "decoder.pe.pe")


def _part(settings: Settings, norm: str) -> dict[str, Any]:
    settings.only("type", "transformer")
    settings.only("activation", "relu")
    settings.only("alpha", 1.0)
    if norm not in ("pre", "post"):
        raise InputError(f"layer_norm: {norm!r}?", where=settings.where, remedy="pre or post")
    return {
        "kind": "transformer",
        "layers": settings.count("num_layers"),
        "width": settings.count("hidden_size"),
        "heads": settings.count("num_heads"),
        "ff_width": settings.count("ff_size"),
        "norm": "pre" if norm == "pre" else "post",
        "norm_eps": 1e-6,
        "position": "sinusoidal",
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("dropout"),
        "activation_dropout": settings.rate("dropout"),
    }


def _transformer(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    parts = {side: section(settings, side) for side in SIDES}
    # Before norms had a place in the settings they stood before, and a last one at the end shows that.
    usual = "pre" if "encoder.layer_norm.weight" in names else "post"
    model: dict[str, Any] = {
        side: _part(part, str(part.content.get("layer_norm") or usual)) for side, part in parts.items()
    }
    tied = settings.flag("tied_softmax")
    every = settings.flag("tied_embeddings")
    scaled = {section(part, "embeddings").flag("scale") for part in parts.values()}
    if len(scaled) > 1:
        raise InputError("embeddings are scaled on one side alone", where=settings.where, remedy="not known here")
    return model | {"tie": ("all" if every else "target") if tied else "none", "scale_embedding": scaled.pop()}


TRANSFORMER = Family(_transformer, _table(), OUTPUT, aside=WAVES)


def _recurrent(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    encoder, decoder = (section(settings, side) for side in SIDES)
    for part in (encoder, decoder):
        part.only("type", "recurrent")
        section(part, "embeddings").only("scale", False)
    cells = {str(part.content.get("rnn_type") or "gru") for part in (encoder, decoder)}
    attention = decoder.content.get("attention") or "bahdanau"
    if attention not in SCORES or len(cells) > 1 or not cells <= {"gru", "lstm"}:
        remedy = "known: bahdanau and luong, gru or lstm on both sides"
        raise InputError(f"attention {attention!r} with {cells}?", where=decoder.where, remedy=remedy)
    if "decoder.bridge_layer.weight" not in names:
        remedy = "only init_hidden: bridge can be imported"
        raise InputError("its decoder does not start from a bridge", where=decoder.where, remedy=remedy)
    both = encoder.flag("bidirectional", True)
    reading = {
        "layers": encoder.count("num_layers", 1),
        "width": encoder.count("hidden_size") * (2 if both else 1),
        "bidirectional": both,
    }
    feeds = decoder.flag("input_feeding", True)
    writing = {
        "layers": decoder.count("num_layers", 1),
        "width": decoder.count("hidden_size"),
        "bridge": "tanh",
        "context": {"kind": "luong", "score": SCORES[attention], "input_feeding": feeds, "bias": True},
    }
    shared = {"cell": cells.pop(), "dropout": encoder.rate("dropout")}
    return recurrences.parts(shared, reading, writing) | {"tie": "target" if settings.flag("tied_softmax") else "none"}


SCORES = {"bahdanau": "mlp", "luong": "bilinear"}


def _context_first(weight: Tensor) -> list[Tensor]:
    """Theirs reads [state; context], ours [context; state]."""
    width = weight.size(0)
    return [torch.cat((weight[:, width:], weight[:, :width]), -1)]


def _bridged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One bridge for all layers, and for both parts of an LSTM's state: ours has one for each."""
    made = recurrences.widened(weights)
    times = len({name for name in weights if re.fullmatch(r"decoder\.stack\.layers\.\d+\.weight_hh_l0", name)})
    hidden = made.get("decoder.stack.layers.0.weight_hh_l0")
    times *= 2 if hidden is not None and hidden.size(0) == 4 * hidden.size(1) else 1
    for leaf in ("weight", "bias"):
        name = f"decoder.bridge.{leaf}"
        if name in made:
            made[name] = torch.cat([made[name]] * max(times, 1))
    return made


def _recurrent_family(attention: Any) -> Family:
    """`key_layer` is W of a bilinear score, or the half of an MLP that reads the memory."""
    mlp = attention != "luong"
    scores = (
        {"key_layer": "memory", "query_layer": "query", "energy_layer": "vector"} if mlp else {"key_layer": "weight"}
    )
    table = {f"decoder.attention.{theirs}": f"{recurrences.SCORE}.{ours}" for theirs, ours in scores.items()}
    table |= recurrences.TABLE | {
        "src_embed.lut": "encoder.embedding.table",
        "trg_embed.lut": "decoder.embedding.table",
    }
    table |= {"decoder.bridge_layer": "decoder.bridge", "decoder.att_vector_layer": recurrences.COMBINE}
    special = OUTPUT | {"decoder.att_vector_layer.weight": Place((f"{recurrences.COMBINE}.weight",), _context_first)}
    return Family(_recurrent, table, special, joined=_bridged)


def section(settings: Settings, name: str) -> Settings:
    content = settings.content.get(name)
    if not isinstance(content, Mapping):
        raise InputError(f"there is no section {name}", where=settings.where, remedy="fetch it again")
    return Settings(content, f"{settings.where}: {name}")


def read(checkpoint: Checkpoint) -> Orphan:
    folder = checkpoint.file.parent
    where = str(folder / CONFIG)
    content = parse_yaml("\n".join(read_lines(folder, CONFIG)), where)
    whole = Settings(content if isinstance(content, dict) else {}, where)
    model = section(whole, "model")
    weights = {name.removeprefix("model_state/"): one for name, one in checkpoint.weights.items()}
    sides = [_side(folder, name) for name in ("src_vocab.txt", "trg_vocab.txt")]
    beam = (whole.content.get("testing") or {}).get("beam_size")
    search = {"beam": beam} if isinstance(beam, int) and 1 < beam <= 100 else {}
    family = TRANSFORMER
    if "encoder.rnn.weight_ih_l0" in weights:
        family = _recurrent_family(section(model, "decoder").content.get("attention"))
        weights = {recurrences.renamed(name): one for name, one in weights.items()}
    return Orphan(family, model, weights, sides[0], sides[1], (".score.memory.bias",), search)


def _side(folder: Path, name: str) -> Side:
    words = read_lines(folder, name)
    number = {word: place for place, word in reversed(list(enumerate(words)))}
    special = Special(number.get("<pad>"), number.get("<s>"), number.get("</s>"), number.get("<unk>"))
    return spaced(words, special, str(folder / name))
