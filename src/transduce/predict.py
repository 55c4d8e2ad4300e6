"""A run directory in, a model out that reads and writes raw text: generate, score, logits, explain."""

from __future__ import annotations

import math
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from transduce import build
from transduce.contracts import Scored
from transduce.data.batching import collate, ordered
from transduce.data.running import measure
from transduce.data.text import Tokenizer
from transduce.data.unknowns import encode_sources, encode_targets, unknown_words
from transduce.decoding.filling import Filling
from transduce.decoding.loop import search
from transduce.decoding.scoring import score as score_batch
from transduce.errors import InputError
from transduce.explain.alignment import Link, links, to_words
from transduce.explain.page import Explained
from transduce.explain.reread import Path, Rereader
from transduce.flow import EOS, Batch, Hypothesis, Padded
from transduce.language import go_on, score_running
from transduce.model import Embedder, EncoderOnly, Transducer, speechless
from transduce.recipe import GenerationRecipe, Recipe, explain_error
from transduce.run import Run
from transduce.training.devices import pick_device
from transduce.transfer.merging import weights_of


@dataclass(frozen=True)
class Prediction:
    """What the model made of one line. `score` is the sum of `token_scores` (natural logarithms)."""

    source: str
    text: str
    tokens: tuple[str, ...]  # the closing </s> included
    token_scores: tuple[float, ...]
    complete: bool = True  # False: cut at the greatest length
    source_cut: bool = False  # True: the source was longer than `max_source` tokens
    nbest: tuple[Prediction, ...] = ()  # this one and its rivals, best first
    path: Path | None = field(default=None, repr=False, compare=False)
    model: Model | None = field(default=None, repr=False, compare=False)

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @cached_property
    def explained(self) -> Explained | None:
        """The chosen path read once more, with the attention of every layer and head; None for an empty line."""
        return None if self.model is None else self.model.reread([self])[0]

    @property
    def attention(self) -> np.ndarray | None:
        """L H T S, exact; None where the decoder does not attend to the source."""
        return None if self.explained is None else self.explained.attention

    @property
    def alignment(self) -> list[Link]:
        """(source word, target word): each word of the output with the one it looked at most."""
        if self.explained is None or self.explained.attention is None:
            return []
        return links(to_words(self.explained.map()))


@dataclass(frozen=True)
class PairScore:
    """How probable a target is, given its source."""

    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.score / len(self.token_scores))


class Model:
    """A trained network with its tokenizers."""

    def __init__(self, network: Transducer, source: Tokenizer, target: Tokenizer, recipe: Recipe) -> None:
        self.network, self.source, self.target, self.recipe = network.eval(), source, target, recipe

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def parameters(self) -> int:
        return build.count_parameters(self.network)

    @property
    def sourceless(self) -> bool:
        """Whether this is a language model: it reads nothing before <s>."""
        return self.recipe.data.form == "text" and self.recipe.model.encoder is None

    @property
    def running(self) -> bool:
        """Whether it learned from running text, read in passages, rather than from lines."""
        return self.sourceless and self.recipe.data.passage is not None

    @cached_property
    def _reach(self) -> tuple[int, int]:
        """Most tokens of a source and of a target: learned positions end somewhere."""
        ends: dict[bool, list[int]] = {True: [2**31], False: [2**31]}  # of the decoder, of the rest
        for name, part in self.network.named_modules():
            if isinstance(longest := getattr(part, "longest", None), int):
                ends[name.startswith("decoder")].append(longest)
        target = min(ends[True])
        if self.sourceless:
            return 0, target
        # One place is for the closing </s>; a decoder alone keeps half of its places for the target.
        alone = self.recipe.model.encoder is None
        return (target // 2 - 1, target // 2) if alone else (min(ends[False]) - 1, target)

    def settings(self, /, **changes: Any) -> GenerationRecipe:
        """The recipe's generation settings with these changes; a wrong name or value is an InputError."""
        known = self.recipe.generation.model_dump()
        changes = {name: value for name, value in changes.items() if value is not None}
        try:
            chosen = GenerationRecipe.model_validate({**known, **changes})
        except ValidationError as error:
            raise explain_error(error, "generate", known) from None
        if changes.get("strategy") == "sample" and "beam" not in changes:
            # One draw for each hypothesis asked for: the likeliest of several would be no fair sample.
            return chosen.model_copy(update={"beam": 1})
        several = chosen.nbest > 1 or ("beam" in changes and chosen.beam > 1)
        if chosen.strategy == "greedy" and several and "strategy" not in changes:
            return chosen.model_copy(update={"strategy": "beam"})
        return chosen

    def generate(
        self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None, **settings: Any
    ) -> list[Prediction]:
        """One prediction a line, in order. Settings are those of the recipe's `generation` section.

        To a language model a line is the beginning of the text that it writes; an empty one is none.
        """
        chosen = self.settings(**settings)
        check_texts("generate", texts)
        if self.sourceless:
            return self._continue(texts, prefixes, chosen)
        if prefixes is not None:
            check_texts("generate", prefixes)
            if len(prefixes) != len(texts):
                raise InputError(f"{len(texts)} lines but {len(prefixes)} prefixes", remedy="give one a line")
        most = min(chosen.max_source, self._reach[0])
        results: list[Prediction] = [Prediction(text, "", (), ()) for text in texts]
        busy = [number for number, text in enumerate(texts) if text.strip()]
        encoded = self._read([texts[number] for number in busy])
        sources = dict(zip(busy, (ids[:most] for ids in encoded), strict=True))
        uncut = dict(zip(busy, map(len, encoded), strict=True))
        for rows in ordered([len(sources[number]) for number in busy], chosen.batch_tokens):
            numbers = [busy[row] for row in rows]
            begun = None
            if prefixes is not None:
                begun = encode_targets(
                    self.target, [prefixes[number] for number in numbers], [texts[number] for number in numbers]
                )
            found = self.search_ids([sources[number] for number in numbers], begun, chosen, numbers)
            for number, hypotheses in zip(numbers, found, strict=True):
                cut = uncut[number] > len(sources[number])
                results[number] = self._prediction(texts[number], sources[number], hypotheses[: chosen.nbest], cut)
        return results

    def _continue(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, chosen: GenerationRecipe
    ) -> list[Prediction]:
        if prefixes is not None:
            raise InputError("a language model takes its lines as prefixes", remedy="give them as the lines")
        results = []
        for text, found in zip(texts, go_on(self.network, self.target, texts, chosen, self._reach[1]), strict=True):
            one = self._prediction(text, None, found.hypotheses[: chosen.nbest], found.cut)
            # The beginning stays as it was given, unknown characters and all; what follows was written after it.
            read = len(self.target.decode(found.begun))
            rivals = tuple(replace(rival, text=text + rival.text[read:]) for rival in one.nbest)
            results.append(replace(one, text=rivals[0].text, nbest=rivals))
        return results

    def search_ids(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        """What is found for each source, best first; `numbers` seed the draws of each."""
        batch = collate([(ids, None) for ids in sources], range(len(sources))).to(self.device)
        lengths = torch.tensor([len(ids) for ids in sources])
        longest = (lengths * settings.max_ratio + 50).clamp(max=min(settings.max_length, self._reach[1])).long()
        asked = Filling(self.network) if isinstance(self.network, EncoderOnly) and self._masked else self.network
        return search(
            asked,
            batch,
            build.build_strategy(settings),
            longest=longest,
            rules=build.build_rules(settings),
            prefix=None if prefixes is None else Padded.from_rows(prefixes).to(self.device),
            seeds=[(settings.seed * 1_000_003 + number) % 2**63 for number in numbers],
        )

    @property
    def _masked(self) -> bool:
        """Whether the model learned to restore a text, so that `<mask>` may stand for a token."""
        return self.recipe.data.noise is not None

    def _read(self, texts: Sequence[str]) -> list[list[int]]:
        return self.source.encode_sources(texts, masked=True) if self._masked else encode_sources(self.source, texts)

    def _prediction(self, text: str, source: list[int] | None, hypotheses: list[Hypothesis], cut: bool) -> Prediction:
        unknown = unknown_words(self.source, text)
        rivals = tuple(
            Prediction(
                text,
                self.target.decode(one.words, unknown),
                tuple(map(self.target.piece, one.ids)),
                one.token_scores,
                one.complete,
                cut,
            )
            for one in hypotheses
        )
        ranked = tuple((one.text, one.score) for one in rivals)
        path = Path(text, None if source is None else tuple(source), hypotheses[0], ranked)
        return replace(rivals[0], nbest=rivals, path=path, model=self)

    def reread(self, predictions: Sequence[Prediction]) -> list[Explained | None]:
        """The explanations of many predictions, read in batches, and kept in them; None for an empty line."""
        busy = [one for one in predictions if one.path is not None]
        rereader = Rereader(self.network, self.source, self.target, self.facts(), self._masked)
        found = rereader([one.path for one in busy if one.path is not None], self.recipe.generation.batch_tokens)
        for one, explained in zip(busy, found, strict=True):
            vars(one)["explained"] = explained
        return [vars(one).get("explained") for one in predictions]

    def facts(self) -> dict[str, Any]:
        """What a page may say about the model."""
        kinds = {name: part["kind"] for name, part in self.recipe.model if isinstance(part, dict)}
        return {**kinds, "parameters": self.parameters}

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[PairScore]:
        """The log-probability of each target given its source, token by token."""
        for side in (0, 1):
            check_texts("score", [pair[side] for pair in pairs])
        if self._masked:
            raise InputError(
                "this model restores damaged text, and has no probability of a whole one",
                remedy="`transduce evaluate RUN FILE` gives the perplexity of what it is asked for",
            )
        if isinstance(self.network, Embedder):
            raise speechless()
        texts = [source for source, _ in pairs]
        sources = encode_sources(self.source, texts)
        targets = encode_targets(self.target, [target for _, target in pairs], texts)
        results: list[PairScore | None] = [None] * len(pairs)
        lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
        for rows in ordered(lengths, self.recipe.generation.batch_tokens):
            read = [None if self.sourceless else sources[row] for row in rows]
            batch = collate(list(zip(read, [targets[row] for row in rows], strict=True)), rows).to(self.device)
            for row, scores in zip(rows, score_batch(self.network, batch), strict=True):
                tokens = tuple(map(self.target.piece, [*targets[row], EOS]))
                results[row] = PairScore(tokens, scores)
        return [result for result in results if result is not None]

    def score_running(self, blocks: Sequence[str]) -> list[Scored]:
        """How probable a running text is, passage by passage; `blocks` are its parts (see `sources.blocks`)."""
        passage = self.recipe.data.passage
        if passage is None:
            raise InputError("this model did not learn from running text", remedy="score lines: model.score([...])")
        text = measure(self.target, blocks)
        return score_running(self.network, text, passage, self.recipe.generation.batch_tokens)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """One vector a text, in order (B D): that of an embedder, else the mean of the encoder's memory."""
        check_texts("embed", texts)
        most = min(self.recipe.generation.max_source, self._reach[0])
        encoded = encode_sources(self.source, texts)
        if cut := sum(len(ids) > most for ids in encoded):
            warnings.warn(f"{cut:,} texts were cut to {most:,} tokens", stacklevel=2)
        sources = [ids[:most] for ids in encoded]
        found: dict[int, np.ndarray] = {}
        for rows in ordered([len(ids) + 1 for ids in sources], self.recipe.generation.batch_tokens):
            batch = collate([(sources[row], None) for row in rows], rows).to(self.device)
            assert batch.source is not None
            found.update(zip(rows, self.network.embed(batch.source).float().cpu().numpy(), strict=True))
        return np.stack([found[row] for row in range(len(texts))]) if texts else np.zeros((0, 0), np.float32)

    def read(self, pairs: Sequence[tuple[str, str]]) -> list[Explained]:
        """Each target as if the model had written it: its token scores, and where it looked at each of its tokens."""
        if self.sourceless:
            raise InputError("this model has no source to look at", remedy="give one that reads a source")
        texts = [source for source, _ in pairs]
        scored = self.score(pairs)
        sources = encode_sources(self.source, texts)
        targets = encode_targets(self.target, [target for _, target in pairs], texts)
        paths = [
            Path(text, tuple(source), Hypothesis((*target, EOS), one.token_scores, one.score))
            for text, source, target, one in zip(texts, sources, targets, scored, strict=True)
        ]
        rereader = Rereader(self.network, self.source, self.target, self.facts(), self._masked)
        return rereader(paths, self.recipe.generation.batch_tokens)

    def explain(self, text: str, **settings: Any) -> Explained:
        """One line with its attention, scores and rivals, ready to be drawn."""
        prediction = self.generate([text], **settings)[0]
        if prediction.explained is None:
            raise InputError("there is nothing to explain: the line is empty", remedy="give a source text")
        return prediction.explained

    @torch.inference_mode()
    def logits(self, *, target: Tensor, source: Tensor | None = None, source_mask: Tensor | None = None) -> Tensor:
        """Teacher-forced logits (B T V); `target` (B T) is what the decoder reads, <s> first."""
        given = None
        if source is not None:
            mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
            given = Padded(source, mask).to(self.device)
        fits = Padded(target, torch.ones_like(target, dtype=torch.bool)).to(self.device)
        state = self.network.start(Batch(given, fits))
        return self.network.advance(fits.values, state).logits


def check_texts(what: str, texts: Sequence[str]) -> None:
    """One text alone would be read letter by letter, and what is no text, or no Unicode, cannot be read at all."""
    if isinstance(texts, str):
        raise InputError(f"{what} takes a list of texts", remedy=f'write model.{what}(["..."])')
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number} of {len(texts)} is {text!r}", remedy="give strings")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"text {number} of {len(texts)} is not valid Unicode", remedy="write it in UTF-8")


def load(path: str | pathlib.Path, *, device: str = "auto", own_parts: bool = False) -> Model:
    """Opens a run. No code of the run is executed: parts of the user's own (`file:Class`) must be allowed."""
    run = Run(pathlib.Path(path))
    recipe = run.recipe()
    if (own := build.own_parts(recipe)) and not own_parts:
        raise InputError(
            f"this model needs code of its own: {', '.join(own)}",
            where=str(run.recipe_file),
            remedy="load it with own_parts=True (--own-parts) if you trust that code",
        )
    recipe = build.complete_recipe(recipe, str(run.recipe_file))
    source, target = run.tokenizers()
    network = build.build_model(recipe.model, source.size, target.size, source.starts)
    fill_weights(network, weights_of(run, recipe, list(network.state_dict())), str(run.folder))
    return Model(network.to(pick_device(device)), source, target, recipe)


def fill_weights(network: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copies weights in; a name or shape that does not fit is told in words. What was learned beside stays aside."""
    own = network.state_dict()
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("beside.")}
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or extra:
        raise InputError(
            f"weights do not fit the recipe: missing {missing[:3]}, not used {extra[:3]}",
            where=where,
            remedy="the recipe is not the one it was trained with",
        )
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            changed = "tokenizers are" if "embedding" in name or "output" in name else "recipe is"
            raise InputError(
                f"{name} is {tuple(weights[name].shape)} in the weights, {tuple(tensor.shape)} in the recipe",
                where=where,
                remedy=f"the {changed} not what it was trained with: restore the run directory",
            )
    network.load_state_dict(weights)


def in_chunks(lines: Iterator[str], size: int = 2000) -> Iterator[list[str]]:
    """Lines in groups large enough to sort by length, small enough to stream."""
    chunk: list[str] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
