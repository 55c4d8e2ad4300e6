"""Marian .npz: names in one line (encoder_l1_self_Wq), matrices as inputs x outputs, settings among the arrays."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Family, Place, Settings
from transduce.interop.huggingface.folder import inside
from transduce.interop.huggingface.sentencepiece import read_model
from transduce.interop.legacy.assemble import Orphan
from transduce.interop.legacy.checkpoint_process import Checkpoint
from transduce.interop.legacy.vocabularies import Side, Special, read_lines, sentencepiece, spaced

MODEL = "special:model.yml"
WHERE = ("preprocess", "postprocess", "postprocess-top")  # of a layer, where a norm may stand
ACTIVATIONS = {"relu": "relu", "swish": "silu"}  # its gelu is x * sigmoid(1.702 x)
NUMBER = re.compile(r"^(encoder|decoder)_l(\d+)_")
ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "output"}
PARTS = {  # attentions and the feed-forward network of a layer, with the number of the norm that is theirs
    "encoder": {"self": ("own.attention", 0), "ffn": ("feed_forward", 1)},
    "decoder": {"self": ("own.attention", 0), "context": ("cross", 1), "ffn": ("feed_forward", 2)},
}
SOURCE, TARGET, OUTPUT = (
    "encoder.embedding.table.weight",
    "decoder.embedding.table.weight",
    "decoder.output.layer.weight",
)


def _turned(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous()]


def _row(bias: Tensor) -> list[Tensor]:
    return [bias.flatten()]


def _norm(theirs: str, ours: str) -> dict[str, Place]:
    """A norm is called after what it stands behind, and `_pre` where it stands before."""
    return {
        f"{theirs}_ln_{leaf}{end}": Place((f"{ours}.{name}",), _row)
        for leaf, name in (("scale", "weight"), ("bias", "bias"))
        for end in ("", "_pre")
    }


def _special() -> dict[str, Place]:
    places: dict[str, Place] = {}
    for side, parts in PARTS.items():
        for part, (ours, number) in parts.items():
            names = {"1": "grow", "2": "shrink"} if part == "ffn" else ATTENTION
            for theirs, name in names.items():
                places[f"{side}.*.{part}_W{theirs}"] = Place((f"{side}.blocks.*.{ours}.{name}.weight",), _turned)
                places[f"{side}.*.{part}_b{theirs}"] = Place((f"{side}.blocks.*.{ours}.{name}.bias",), _row)
            last = "ffn" if part == "ffn" else "Wo"
            places |= _norm(f"{side}.*.{part}_{last}", f"{side}.blocks.*.residuals.{number}.norm")
        places |= _norm(f"{side}_top", f"{side}.norm") | _norm(f"{side}_emb", f"{side}.entry")
    return places | {
        "Wemb": Place((SOURCE, TARGET)),
        "encoder_Wemb": Place((SOURCE,)),
        "decoder_Wemb": Place((TARGET,)),
        "decoder_ff_logit_out_W": Place((OUTPUT,), _turned),
        "decoder_ff_logit_out_Wt": Place((OUTPUT,)),
        "decoder_ff_logit_out_b": Place(("decoder.output.layer.bias",), _row),
    }


def _part(settings: Settings, side: str) -> dict[str, Any]:
    content = settings.content
    before, after, top = (str(content.get(f"transformer-{name}") or "") for name in WHERE)
    if (before, after, top) not in (("", "dan", ""), ("n", "da", "n")):
        problem = f"norms stand in places ({before!r}, {after!r}, {top!r}) that are not known here"
        raise InputError(problem, where=settings.where, remedy="known: ('', 'dan', '') and ('n', 'da', 'n')")
    activation = content.get("transformer-ffn-activation") or "swish"
    if activation not in ACTIVATIONS:
        problem = f"transformer-ffn-activation: there is no {activation!r} here"
        raise InputError(problem, where=settings.where, remedy=f"known: {', '.join(ACTIVATIONS)}")
    hidden = settings.count("transformer-dim-ffn")
    own = settings.content.get("transformer-decoder-dim-ffn") or 0
    return {
        "kind": "transformer",
        "layers": settings.count("enc-depth" if side == "encoder" else "dec-depth"),
        "width": settings.count("dim-emb"),
        "heads": settings.count("transformer-heads"),
        "ff_width": own if side == "decoder" and own else hidden,
        "activation": ACTIVATIONS[activation],
        "norm": "pre" if before else "post",
        "norm_eps": 1e-6,
        "embedding_norm": "n" in str(content.get("transformer-postprocess-emb") or ""),
        "position": {"kind": "sinusoidal", "halves": True, "inclusive": True},
        "dropout": settings.rate("transformer-dropout"),
        "attention_dropout": settings.rate("transformer-dropout-attention"),
        "activation_dropout": settings.rate("transformer-dropout-ffn"),
    }


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    for name, wanted in (
        ("type", "transformer"),
        ("transformer-decoder-autoreg", "self-attention"),
        ("transformer-no-projection", False),
        ("transformer-train-position-embeddings", False),
        ("transformer-ffn-depth", 2),
        ("transformer-no-bias", False),
        ("transformer-no-affine", False),
    ):
        settings.only(name, wanted)
    untied = any(name.startswith("decoder_ff_logit_out_W") for name in names)
    return {
        "encoder": _part(settings, "encoder"),
        "decoder": _part(settings, "decoder"),
        "tie": "none" if untied else ("all" if "Wemb" in names else "target"),
        "scale_embedding": True,
    }


FAMILY = Family(_model, {}, _special())


def _renamed(name: str) -> str:
    """`encoder_l1_self_Wq` -> `encoder.0.self_Wq`"""
    found = NUMBER.match(name)
    return name if found is None else f"{found[1]}.{int(found[2]) - 1}.{name[found.end() :]}"


def read(checkpoint: Checkpoint) -> Orphan:
    where = str(checkpoint.file)
    text = checkpoint.settings.get(MODEL)
    content = parse_yaml(text, where) if isinstance(text, str) else None
    if not isinstance(content, dict):
        raise InputError(f"it has no {MODEL}, as an .npz file of Marian has", where=where, remedy="fetch it again")
    weights = {_renamed(name): stored for name, stored in checkpoint.weights.items()}
    source, target = _sides(checkpoint.file)
    return Orphan(FAMILY, Settings(content, f"{where}: {MODEL}"), weights, source, target)


def parse_yaml(text: str, where: str, *, words: bool = False) -> Any:
    """Plain values, without tags; `words`: nothing but text, so that `no` is a word."""
    loader = yaml.BaseLoader if words else yaml.SafeLoader
    try:
        return loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"not readable as YAML: {str(error)[:200]}", where=where, remedy="fetch it again") from None


def _sides(file: Path) -> tuple[Side, Side]:
    folder = file.parent
    names = _vocabularies(file)
    if not names:
        remedy = "vocab.yml or vocab.spm, or the two that decoder.yml names under `vocabs`"
        raise InputError("its vocabulary is missing", where=str(folder), remedy=f"put it beside the file: {remedy}")
    spm = [name for name in ("source.spm", "target.spm") if (folder / name).is_file()]
    made = [_side(folder, name, spm[place] if len(spm) == 2 else "") for place, name in enumerate((names * 2)[:2])]
    return made[0], made[1]


def _vocabularies(file: Path) -> list[str]:
    """One for both sides, or one for each: those that a file of settings names, or those whose names say so."""
    folder = file.parent
    for name in (f"{file.name}.decoder.yml", "decoder.yml"):
        if (folder / name).is_file():
            content = parse_yaml("\n".join(read_lines(folder, name)), str(folder / name))
            listed = content.get("vocabs") if isinstance(content, dict) else None
            if isinstance(listed, list) and 1 <= len(listed) <= 2:
                return [Path(str(one)).name for one in listed]
    found = sorted(path.name for path in folder.iterdir() if re.fullmatch(r".*vocab.*\.(yml|yaml|spm)", path.name))
    sides = [[name for name in found if re.search(pattern, name)] for pattern in (r"src|source", r"trg|tgt|target")]
    if len(found) == 2 and all(len(side) == 1 for side in sides):
        return [side[0] for side in sides]
    return found if len(found) == 1 else []


def _side(folder: Path, name: str, spm: str) -> Side:
    """`</s>` also stands where an output starts, but as nothing: the first vector is zero."""
    path = inside(folder, name)
    if name.endswith(".spm"):
        model = read_model(folder, name)
        listed = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
    else:
        content = parse_yaml("\n".join(read_lines(folder, name)), str(path), words=True)
        if not isinstance(content, dict) or not all(str(number).isdecimal() for number in content.values()):
            raise InputError("expected words with their numbers", where=str(path), remedy="fetch it again")
        listed = {str(word): int(number) for word, number in content.items()}
    if sorted(listed.values()) != list(range(len(listed))):
        raise InputError("its numbers do not go from 0 to the last", where=str(path), remedy="fetch it again")
    special = Special(None, None, listed.get("</s>"), listed.get("<unk>"))
    if name.endswith(".spm") or spm:
        return sentencepiece(read_model(folder, spm or name), listed, special, str(path))
    return spaced(sorted(listed, key=listed.__getitem__), special, str(path))
