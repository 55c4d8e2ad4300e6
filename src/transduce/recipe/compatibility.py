"""Compatibility of the parts of a recipe."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from transduce import contracts
from transduce.data.readers.files import TEXT
from transduce.errors import InputError, nearest
from transduce.objectives import Objective
from transduce.recipe import GenerationRecipe, ModelRecipe, Recipe
from transduce.recipe.registry import Spec, find

FP32_BYTES = 4
COPIES = 2  # of the values of a beam, while its hypotheses are reordered
CACHED_POSITIONS = 32  # of the first keys and values that a search stores


def labels_per(model: ModelRecipe) -> str | None:
    """The unit that gets a label: line, word, token or path; None without a head."""
    return None if model.head is None else str(find(contracts.Head, model.head["kind"], "model.head").label_unit)  # type: ignore[attr-defined]


def gives_vectors(model: ModelRecipe) -> bool:
    """Whether the head returns an embedding instead of labels."""
    kind = (model.head or {}).get("kind")
    return isinstance(kind, str) and bool(getattr(find(contracts.Head, kind, "model.head"), "is_embedding", False))


def check_shape(recipe: Recipe, where: str) -> None:
    model, where = recipe.model, f"{where}: model"
    if model.head is not None and model.encoder is None:
        raise InputError("a head needs an encoder", where=where, remedy="add model.encoder")
    if model.head is not None and model.decoder is not None:
        raise InputError("a model has a decoder or a head, not both", where=where, remedy="remove one of them")
    if model.head is None and model.decoder is None:
        raise InputError("a model needs a decoder, or an encoder and a head", where=where, remedy="add model.decoder")
    if model.head is not None:
        _check_labels(model.head, recipe, where)
    if (model.encoder or {}).get("kind") == "character_aware" and recipe.tokens.source.kind in ("chars", "bytes"):
        raise InputError(
            f"character_aware composes words, and {recipe.tokens.source.kind} do not tell where a word begins",
            where=f"{where}.encoder",
            remedy="set tokens.source: {kind: bpe, size: 2000}",
        )
    if model.target_encoder is not None:
        _check_target_encoder(recipe, where)
    for name, wanted in (
        ("copy", model.copy is not None),
        ("ctc", model.ctc is not None),
        ("share", model.share != "none"),
    ):
        if wanted and (model.encoder is None or model.decoder is None):
            raise InputError(
                f"{name} needs an encoder and a decoder",
                where=f"{where}.{name}",
                remedy=f"add the one that is missing, or leave {name} out",
            )
    if model.copy is not None and model.copy.source is not None and not recipe.data.sources:
        raise InputError("copy.source names one of several sources, and there is one source", where=f"{where}.copy")
    if not recipe.tokens.shared:
        _check_two_vocabularies(recipe, where)
    if recipe.data.format == "text":
        _check_text(recipe, where)
    _check_cls(recipe, where)


def _check_cls(recipe: Recipe, where: str) -> None:
    """<cls> begins texts that an encoder reads, and none that a decoder generates."""
    model, tokens = recipe.model, recipe.tokens
    generated = model.decoder is not None and tokens.shared
    read = model.encoder is not None and recipe.data.noise is None and not generated
    for side, allowed in (("source", read), ("target", read and gives_vectors(model))):
        if getattr(tokens, side).cls and not allowed:
            raise InputError(
                "<cls> begins the texts that an encoder reads, with a vocabulary of their own beside a decoder",
                where=where.replace(": model", f": tokens.{side}.cls"),
                remedy=f"leave tokens.{side}.cls out",
            )


def _check_target_encoder(recipe: Recipe, where: str) -> None:
    """Two encoders need vectors of one width, in which they can be compared."""
    model = recipe.model
    if not gives_vectors(model):
        raise InputError(
            "only embeddings have an encoder for their targets",
            where=f"{where}.target_encoder",
            remedy="set model.head.kind: embedder",
        )
    widths = [part.get("width") for part in (model.encoder, model.target_encoder) if part]
    if (model.head or {}).get("projection") is None and len(set(widths)) > 1:
        raise InputError(
            f"vectors of width {widths[0]} and {widths[1]} cannot be compared",
            where=f"{where}.target_encoder",
            remedy="give both encoders the same width, or set model.head.projection",
        )


def _check_two_vocabularies(recipe: Recipe, where: str) -> None:
    """With separate vocabularies, nothing may need equal ids on both sides."""
    model = recipe.model
    alone = model.encoder is None and recipe.data.format != "text"
    one = "set tokens.shared: true"
    for wrong, problem, key, remedy in (
        (
            gives_vectors(model) and model.target_encoder is None,
            "both sides of a pair go through one encoder, so they need one vocabulary",
            "",
            f"{one}, or add model.target_encoder",
        ),
        (model.share == "all", "share: all needs one vocabulary", ".share", f"{one}, or share: layers"),
        (
            model.copy is not None,
            "`copy` needs one vocabulary: a word has the same id on both sides",
            ".copy",
            one,
        ),
        (
            (model.decoder or {}).get("kind") == "edit_transducer" and (model.decoder or {}).get("copy_action", True),
            "the copies of an edit transducer need one vocabulary: a character has the same id on both sides",
            ".decoder",
            f"{one}, or model.decoder.copy_action: false",
        ),
        (model.tie == "all", "tie: all needs one vocabulary", "", f"{one}, or tie: target"),
        (alone, "a decoder-only model reads source and target as one sequence", "", one),
    ):
        if wrong:
            raise InputError(problem, where=f"{where}{key}", remedy=remedy)


def _check_text(recipe: Recipe, where: str) -> None:
    """Text without a source."""
    if recipe.model.encoder is not None and recipe.data.noise is None:
        raise InputError(
            "an encoder needs a source, and text has none",
            where=where,
            remedy="leave model.encoder out, or set data.noise",
        )
    if recipe.data.block_size is not None and (recipe.tokens.target.dropout or recipe.tokens.target.kind == "labels"):
        raise InputError(
            "running text is tokenised once, and not into whole lines",
            where=where,
            remedy="set tokens.target.dropout: 0 and another tokens.target.kind, or leave data.block_size out",
        )


def check_sources(recipe: Recipe, encoder: Spec | None, shapes: Mapping[str, Any], where: str) -> Spec:
    """Checks the encoder of every source, and gives every front end the shape of its input."""
    if encoder is None:
        raise InputError("sources need an encoder", where=f"{where}: data.sources", remedy="add model.encoder")
    _check_texts_among(recipe, encoder, shapes, where)
    if len(shapes) == 1 and "parts" not in encoder:
        return _check_source(*next(iter(shapes.items())), encoder, f"{where}: model.encoder")
    parts = encoder.get("parts", {})
    if list(parts) != list(shapes):
        raise InputError(
            f"sources {', '.join(shapes)} but encoders for {', '.join(parts) or 'one'}",
            where=f"{where}: model.encoder",
            remedy="kind: multi_source, with parts named and ordered as in data.sources",
        )
    checked = {
        name: _check_source(name, shape, parts[name], f"{where}: model.encoder.parts.{name}")
        for name, shape in shapes.items()
    }
    return {**encoder, "parts": checked}


def _check_texts_among(recipe: Recipe, encoder: Spec, shapes: Mapping[str, Any], where: str) -> None:
    """Tying, sharing, copying and placeholders need text sources."""
    model, parts = recipe.model, encoder.get("parts", {})
    texts = [name for name, shape in shapes.items() if shape is None]
    widths = [parts.get(name, encoder)["width"] for name in texts]
    for name, value in (("tie", model.tie), ("share", model.share)):
        if value == "all" and encoder["width"] not in widths:
            wanted = f"a text of width {encoder['width']} among the sources" if texts else "a text on both sides"
            raise InputError(f"{name}: all needs {wanted}", where=f"{where}: model.{name}")
    if model.copy is not None and model.copy.source is not None:
        if model.copy.source not in texts or not parts:
            problem = f"there is no text {model.copy.source!r} among several sources"
            raise InputError(problem, where=f"{where}: model.copy.source", remedy=nearest(model.copy.source, texts))
    elif model.copy is not None and len(texts) < len(shapes):
        problem = "there is nothing to copy: not all sources are texts"
        raise InputError(problem, where=f"{where}: model.copy", remedy="leave copy out")
    if recipe.tokens.oov_placeholders:
        raise InputError(
            "out-of-vocabulary placeholders need one source text, not several sources",
            where=f"{where}: tokens.oov_placeholders",
            remedy="set tokens.oov_placeholders: 0, and tokens of characters or pieces for words that are new",
        )


def _check_source(name: str, shape: Any, encoder: Spec, where: str) -> Spec:
    front = encoder.get("front")
    if (front is None) != (shape is None):
        needs = "needs no front: it is a text" if shape is None else "is not a text and needs a front"
        raise InputError(f"{name} {needs}", where=where, remedy="see `transduce models` for fronts")
    if front is None:
        return encoder
    if tuple(front["shape"]) not in ((), tuple(shape)):
        problem = f"the front is made for {list(front['shape'])}, and {name} comes as {list(shape)}"
        raise InputError(problem, where=where, remedy="leave shape out: it follows data.sources")
    return {**encoder, "front": {**front, "shape": tuple(shape)}}


def check_noise(recipe: Recipe, where: str) -> None:
    if recipe.data.format != "text" or recipe.data.block_size is not None:
        raise InputError(
            "noise needs lines of text, from which the original is predicted",
            where=f"{where}: data.noise",
            remedy="set data.format: text, without block_size",
        )
    if recipe.model.encoder is None:
        raise InputError(
            "noise needs an encoder that reads the noised text",
            where=f"{where}: data.noise",
            remedy="add model.encoder, or leave data.noise out",
        )


def check_augmentation(recipe: Recipe, where: str) -> None:
    """Artificial pairs are texts, made from the first source and the target."""
    first = next(iter(recipe.data.sources.values()), TEXT)
    if recipe.data.format != "pairs" or first not in (TEXT, {"kind": TEXT}):
        raise InputError(
            "augmentation needs pairs whose first source is a text",
            where=f"{where}: data.augmentation",
            remedy="leave data.augmentation out",
        )


def check_languages(recipe: Recipe, where: str) -> None:
    """A tag stands before the first source, which must be a text."""
    first = next(iter(recipe.data.sources.values()), TEXT)
    plain = recipe.data.format == "pairs" and recipe.data.noise is None
    if recipe.data.multilingual and (not plain or first not in (TEXT, {"kind": TEXT})):
        raise InputError(
            "languages need pairs whose first source is a text",
            where=f"{where}: data.train",
            remedy="leave out `language` and `language_column`",
        )


def _check_labels(head: Mapping[str, Any] | str, recipe: Recipe, where: str) -> None:
    """The labels of the head must be the target tokens."""
    if recipe.model.output != "plain":
        raise InputError(
            "output: deep is for decoders", where=where, remedy="leave output out; the head mlm has such a layer"
        )
    if recipe.model.logit_cap is not None:
        raise InputError("logit_cap is for decoders", where=where, remedy="leave logit_cap out")
    if gives_vectors(recipe.model):
        return
    kind = head if isinstance(head, str) else head.get("kind", "")
    part = find(contracts.Head, kind, where) if isinstance(kind, str) and kind else contracts.Head
    per = getattr(part, "label_unit", "line")
    if recipe.model.tie != "none" and not hasattr(part, "tie"):
        raise InputError("only a head that predicts source tokens can be tied", where=where, remedy="set tie: none")
    source, target = recipe.tokens.source.kind, recipe.tokens.target.kind
    if per == "token":
        _check_token_labels(kind, part, recipe, where)
        return
    if per == "word" and (target != "words" or source in ("chars", "bytes", "labels")):
        raise InputError(
            f"one label per word needs words on both sides, not {source} and {target}",
            where=where,
            remedy="set tokens.source.kind: words (or bpe, unigram) and tokens.target.kind: words",
        )
    if per == "line" and target != "labels":
        raise InputError(
            f"one label per line needs whole lines as target tokens, not {target}",
            where=where,
            remedy="set tokens.target.kind: labels",
        )


def _check_token_labels(kind: str, head: type, recipe: Recipe, where: str) -> None:
    """A head that predicts the tokens of its own input needs noised text, or separate directions."""
    noise, wanted = (recipe.data.noise or {}).get("kind"), getattr(head, "input_noise", "mask_tokens")
    if recipe.data.format != "text" or noise != wanted:
        raise InputError(
            f"{kind} reads lines of text with noise {wanted}, not {recipe.data.format} with {noise or 'none'}",
            where=where,
            remedy=f"set data.format: text and data.noise: {{kind: {wanted}}}",
        )
    encoder = (recipe.model.encoder or {}).get("kind")
    part = find(contracts.Encoder, str(encoder), where) if encoder else None
    separate = getattr(part, "separate_directions", False)
    if getattr(head, "needs_separate_directions", False) and not separate:
        raise InputError(
            f"{kind} needs separate directions: with {encoder}, position t would attend to its own label",
            where=where,
            remedy="set model.encoder.kind: elmo",
        )
    if getattr(head, "needs_independent_rows", False) and not getattr(part, "independent_rows", False):
        raise InputError(
            f"{kind} needs independent rows: with {encoder}, the rows around position t would know its label",
            where=where,
            remedy="set model.encoder.kind: identity",
        )


def check_search(settings: GenerationRecipe, width: int, model: ModelRecipe, size: int) -> None:
    """Ids must be those of a target vocabulary of this size, and the beam of one source must fit the memory."""
    forced = () if settings.forced_bos is None else (settings.forced_bos,)
    named = {"forced_bos": forced, "forced_prefix": settings.forced_prefix, "detected_first": settings.detected_first}
    for name, ids in {**named, "suppress": settings.suppress, "suppress_first": settings.suppress_first}.items():
        for number in ids:
            if not 0 <= number < size:
                raise InputError(
                    f"{name}: there is no token {number}",
                    where="generation",
                    remedy=f"the ids of the target vocabulary are 0 to {size - 1:,}",
                )
    decoder = model.decoder or {}
    keys = 2 * min(settings.max_length, CACHED_POSITIONS) * decoder.get("layers", 1) * decoder.get("width", 1)
    needed, memory = COPIES * width * (size + keys) * FP32_BYTES, available_memory()
    if needed > memory:
        raise InputError(
            f"a beam of {width:,} would need {needed:,} bytes for each source, and there are {memory:,}",
            where="generation",
            remedy="reduce beam",
        )


def available_memory() -> int:
    """Bytes of this machine, or those that a limit of this process (ulimit -v) leaves it."""
    page, limit = os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]
    physical = page * os.sysconf("SC_PHYS_PAGES")
    if limit == resource.RLIM_INFINITY:
        return physical
    pages = Path("/proc/self/statm")
    used = page * int(pages.read_text().split()[0]) if pages.is_file() else 0
    return min(physical, limit - used)


def check_size(model: nn.Module, where: str) -> None:
    """The weights must fit the memory of this machine. The model is an outline, without values."""
    needed = sum(parameter.numel() * FP32_BYTES for parameter in model.parameters())
    memory = available_memory()
    if needed > memory:
        raise InputError(
            f"the weights would need {needed:,} bytes, and there are {memory:,}",
            where=f"{where}: model",
            remedy="reduce width, ff_width or layers",
        )


def embedding_width(part: Mapping[str, Any]) -> int:
    """Of the token embeddings of an encoder or decoder: its own option, or the width of the part."""
    return int(part.get("embedding_width") or part["width"])


def check_widths(model: ModelRecipe, where: str) -> None:
    """A shared embedding needs equal widths. The model recipe is complete."""
    widths = {embedding_width(part) for part in (model.encoder, model.decoder) if part}
    for name, value in (("tie", model.tie), ("share", model.share)):
        if value == "all" and len(widths) > 1:
            raise InputError(
                f"{name}: all needs an encoder and a decoder of equal width", where=f"{where}: model.{name}"
            )
    _check_states(model.encoder or {}, model.decoder or {}, where)


def _check_states(encoder: Mapping[str, Any], decoder: Mapping[str, Any], where: str) -> None:
    """A decoder that starts from the encoder states of every layer needs the same layers."""
    gives, takes = encoder.get("summary") == "states", decoder.get("bridge") in ("states", "relu")
    alike = all(encoder.get(name) == decoder.get(name) for name in ("cell", "layers", "width"))
    if gives != takes or (gives and not alike):
        raise InputError(
            "summary: states of an encoder and bridge: states or relu of a decoder need each other, and equal layers",
            where=f"{where}: model",
            remedy="give both the same cell, layers and width; or leave both options out",
        )


def check_positions(model: ModelRecipe, longest: int, where: str) -> None:
    for name in ("encoder", "target_encoder", "decoder"):
        position = (getattr(model, name) or {}).get("position")
        end = position.get("max_positions") if isinstance(position, Mapping) else None
        if end is not None and end <= longest:  # one more for </s>
            raise InputError(
                f"positions end at {end}, but texts of up to {longest} tokens are allowed",
                where=f"{where}: model.{name}.position",
                remedy=f"set max_positions above {longest}, or data.max_length (data.block_size of a text) below {end}",
            )


def uses_similarities(recipe: Recipe) -> bool:
    """Whether the objective reads the gold similarities of the pairs."""
    kind = recipe.training.objective.get("kind", "cross_entropy")
    return bool(getattr(find(Objective, kind, "training.objective"), "uses_similarities", False))


def check_objective(objective: Spec, model: ModelRecipe, where: str) -> None:
    """The objective must read what the model returns: token logits, or vectors."""
    reads, gives = getattr(find(Objective, objective["kind"], where), "uses_embeddings", False), gives_vectors(model)
    if gives and not reads:
        raise InputError(
            f"{objective['kind']} reads token logits, and this head returns a vector",
            where=where,
            remedy="set training.objective: {kind: contrastive}",
        )
    if model.ctc is not None and objective["kind"] != "joint_ctc":
        raise InputError(
            f"{objective['kind']} does not train the CTC layer",
            where=where,
            remedy="set training.objective.kind: joint_ctc, or leave model.ctc out",
        )
    if reads and not gives:
        raise InputError(
            f"{objective['kind']} compares vectors, and this model returns token logits",
            where=where,
            remedy="set model.head: {kind: embedder} without a decoder, or another objective",
        )
