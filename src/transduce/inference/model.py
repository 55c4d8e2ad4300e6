"""The loaded model: generate, score, embed, explain and logits for raw text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.contracts import ScoredText
from transduce.data.batching import batch_by_length, collate
from transduce.data.readers.corpus import in_windows
from transduce.data.tokenizers.tokenizer import Tokenizer, count_text, encode_targets
from transduce.decoding.search import MaskFilling
from transduce.decoding.search import score as score_batch
from transduce.decoding.strategies import MinimumBayesRisk
from transduce.errors import InputError
from transduce.evaluation.calibration import Calibration
from transduce.explain.attention import (
    READ_AT,
    DecodedSource,
    Explainer,
    Explanation,
    ReadAt,
)
from transduce.explain.interventions import FORCED_KINDS, Intervention, intervene, parse_interventions
from transduce.flow import EOS, SPECIALS, Batch, Hypothesis, Padded
from transduce.inference.generation import (
    Searcher,
    change_settings,
    check_draft,
    check_pairs,
    check_shortlist,
    check_target_characters,
    check_target_lengths,
    check_texts,
    encode_truncated,
    length_limits,
    warn_of_cuts,
    warn_of_parts,
    without_line_feeds,
)
from transduce.inference.language_model import continue_texts, score_running
from transduce.inference.long_sources import SourcePart, split_source
from transduce.inference.lowering import lower_network, weight_versions
from transduce.inference.prediction import PairScore, Prediction
from transduce.inference.protected_spans import ProtectedLine
from transduce.inference.reranking import rank_by_utility
from transduce.inference.shortlist import Shortlist
from transduce.inference.streaming import StreamedToken, stream_tokens, stream_translate
from transduce.inference.terminology import Constraints, PhraseIds, check_constraints, encode_constraints
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.dispatch import has_hooks
from transduce.modalities.source_encoding import EncodedSource, SourceEncoding
from transduce.modalities.transcription import Transcriber, windowed_options_error, windowed_recordings
from transduce.model import CTCModel, EmbeddingModel, EncoderOnly, Transducer, no_decoder_error
from transduce.recipe import GenerationRecipe, Recipe, build
from transduce.recipe.compatibility import check_search


@dataclass(frozen=True)
class EncodedLines:
    """The sources of a search over lines."""

    parts: list[SourcePart]
    sources: list[EncodedSource]
    cuts: list[bool]  # which of them were cut
    prefixes: list[list[int]] | None
    numbers: list[int]  # of the lines, which seed the samples
    phrases: list[PhraseIds] | None


class Model:
    """A trained network with its tokenizers."""

    def __init__(
        self,
        network: Transducer,
        source: Tokenizer,
        target: Tokenizer,
        recipe: Recipe,
        *,
        parameters: int | None = None,  # None: those of the network; packed weights have fewer
        graphs: SearchGraphs | None = None,  # captured search steps, on a GPU, for weights that keep their storage
        source_encoding: SourceEncoding | None = None,  # None: that of the recipe
        lowers: bool = False,  # True: on a CPU a lowered copy of the network generates and embeds
    ) -> None:
        self.network, self.source, self.target, self.recipe = network.eval(), source, target, recipe
        self.parameters = build.count_parameters(network) if parameters is None else parameters
        self.source_encoding = source_encoding or build.build_source_encoding(recipe, (source, target))
        self.calibration: Calibration | None = None  # of the confidence of predictions
        self._lowers, self._graphs = lowers, graphs
        self._lowered: tuple[Any, Transducer] | None = None  # a lowered copy, and the weights that it was made of
        self._search: tuple[Transducer, Searcher] | None = None  # with the network that it was made for

    def __repr__(self) -> str:
        parts = (self.recipe.model.encoder, self.recipe.model.decoder, self.recipe.model.head)
        kinds = " -> ".join(str(part["kind"]) for part in parts if part is not None)
        tokens = f"{self.target.size:,}" if self.sourceless else f"{self.source.size:,} -> {self.target.size:,}"
        return f"<Model {kinds}, {self.parameters:,} parameters, {tokens} tokens, {self.device}>"

    @property
    def lowered(self) -> Transducer:
        """The network that generates and embeds: on a CPU a lowered copy, made again when weights have changed."""
        parts = list(self.network.modules()) if self._lowers and self.device.type == "cpu" else []
        if not parts or any(map(has_hooks, parts)):
            return self.network
        versions = weight_versions(parts)
        if self._lowered is None or self._lowered[0] != versions:
            self._lowered = versions, lower_network(self.network, "fp32")
        return self._lowered[1]

    @property
    def searcher(self) -> Searcher:
        network = self.lowered
        if self._search is None or self._search[0] is not network:
            searched = MaskFilling(network) if isinstance(network, EncoderOnly) and self._masked else network
            searcher = Searcher(searched, self.source_encoding, self._length_limits[1], self._graphs)
            self._search = network, searcher
        return self._search[1]

    def searching_with(self, searcher: Searcher) -> Model:
        """The same model, with another searcher for the network of the present weights."""
        found = copy.copy(self)
        found._search = self.lowered, searcher
        return found

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def sourceless(self) -> bool:
        """Whether this is a language model without a source."""
        return self.recipe.data.format == "text" and self.recipe.model.encoder is None

    @property
    def running(self) -> bool:
        """Whether it was trained on blocks of running text rather than on lines."""
        return self.sourceless and self.recipe.data.block_size is not None

    @cached_property
    def _length_limits(self) -> tuple[int, int]:
        return length_limits(self.network, alone=self.recipe.model.encoder is None, sourceless=self.sourceless)

    def settings(self, /, **changes: Any) -> GenerationRecipe:
        """The recipe's generation settings with these changes; a wrong name or value is an InputError."""
        chosen = change_settings(self.recipe.generation, changes)
        width = build.complete_strategy(chosen).get("width") or 1
        check_search(chosen, width, self.recipe.model, self.target.size)
        return chosen

    def max_source_tokens(self, /, **settings: Any) -> int:
        """The tokens of the longest source that is read at once: `generate` splits longer ones, `score` cuts them."""
        return min(self.settings(**settings).max_source_length, self._length_limits[0])

    def generate(
        self,
        texts: Iterable[str],
        *,
        prefixes: Iterable[str] | None = None,
        workers: int = 1,
        draft: Model | None = None,
        shortlist: Shortlist | None = None,
        first_number: int = 0,
        constraints: Iterable[Constraints | None] | None = None,
        timestamps: bool = False,
        interventions: Sequence[Intervention | str] = (),
        **settings: Any,
    ) -> list[Prediction]:
        """One prediction per line, in order. Settings are those of the section `generation` of a recipe.

        `texts` is any iterable of strings, such as an open file. For more lines than fit in memory, use `stream`.

        `workers` batches are processed in parallel, on one core each: for many lines on a CPU. `draft` is a small
        model with the same vocabulary, for speculative decoding: greedy outputs do not change. With a `shortlist`, each
        output consists of the tokens that the list has for its source.

        A language model continues each line; an empty line is an empty prompt.

        A source of more than `max_source_length` tokens is split into parts (sentences, else clauses, else words), and
        their outputs are joined: see `Prediction.parts`. With `long_sources="truncate"`, and where a source cannot be
        split (one word, several columns, labels), it is cut: see `Prediction.source_cut`.

        `constraints`, one per line, name phrases that the output must or must not contain; None: no constraints.

        `timestamps`: transcripts have segments with times. Recordings that are longer than the input of the model are
        transcribed in windows, and always have them.

        `interventions` change the model for this call: see `intervene`.

        `first_number` is the number of the first text in a longer input: samples are drawn by the numbers of the texts.
        """
        if interventions:
            options: dict[str, Any] = {"prefixes": prefixes, "workers": workers, "draft": draft, "shortlist": shortlist}
            options |= {"first_number": first_number, "constraints": constraints, "timestamps": timestamps}
            return self.intervene(interventions).generate(texts, **options, **settings)
        chosen = self.settings(**settings)
        texts = check_texts("generate", texts)
        if long := windowed_recordings(self.source_encoding, texts, chosen, timestamps=timestamps):
            if any(given is not None for given in (prefixes, draft, shortlist, constraints)):
                raise windowed_options_error(texts[long[0]])
            rest = ["" if number in long else text for number, text in enumerate(texts)]
            others = self.generate(rest, workers=workers, first_number=first_number, **settings)
            heard = self._transcribe([texts[number] for number in long], [first_number + n for n in long], chosen)
            transcripts = dict(zip(long, heard, strict=True))
            return [transcripts.get(number, one) for number, one in enumerate(others)]
        prefixes = None if prefixes is None else check_texts("generate", prefixes)
        if chosen.protect:
            lines = self._protected(texts, chosen.protect)
            plain = {**settings, "workers": workers, "draft": draft, "shortlist": shortlist, "protect": ()}
            plain |= {"prefixes": prefixes, "constraints": constraints, "first_number": first_number}
            return self._restore(lines, self.generate([line.text for line in lines], **plain))
        if shortlist is not None:
            check_shortlist(shortlist, (self.source, self.target), drafted=draft is not None, alone=self.sourceless)
        given = None
        if constraints is not None:
            given = check_constraints(constraints, texts, drafted=draft is not None, sourceless=self.sourceless)
        if self.sourceless:
            if workers > 1:
                raise InputError("language models generate with one worker", remedy="leave workers out")
            return self._continue(texts, prefixes, chosen, first_number)
        if prefixes is not None and len(prefixes) != len(texts):
            raise InputError(f"{len(texts)} lines but {len(prefixes)} prefixes", remedy="give one per line")
        if draft is not None:
            begins = prefixes or chosen.forced_prefix or None
            check_draft(draft.recipe, [draft.source, draft.target], [self.source, self.target], chosen, begins)
        searcher = self.searcher if shortlist is None else self.searcher.with_shortlist(shortlist)
        find = partial(searcher.search_all, workers=workers, draft=None if draft is None else draft.network)
        return self._search_lines(texts, prefixes, given, chosen, find, first_number)

    def _search_lines(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | None,
        constraints: Sequence[Constraints | None] | None,
        chosen: GenerationRecipe,
        find: Callable[..., Iterable[list[Hypothesis]]],
        first_number: int,
    ) -> list[Prediction]:
        """One prediction per line; long lines are searched in parts."""
        lines = self.encode_lines(texts, prefixes, constraints, chosen, first_number)
        found = find(lines.sources, lines.prefixes, chosen, lines.numbers, phrases=lines.phrases)
        return self.predict_lines(texts, lines, chosen, found)

    def encode_lines(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | None,
        constraints: Sequence[Constraints | None] | None,
        chosen: GenerationRecipe,
        first_number: int = 0,
    ) -> EncodedLines:
        """The input of a search: the sources of all lines, long ones in parts, with prefixes, numbers and phrases."""
        parts, sources, cuts = self.source_parts(texts, chosen)
        read = [part.text for part in parts]
        prefix_ids = phrases = None
        if prefixes is not None:  # the output of a line begins with that of its first part
            prefix_ids = encode_targets(
                self.target, [prefixes[part.line] if part.first else "" for part in parts], read
            )
        if constraints is not None:
            given = [part.constraints(constraints[part.line]) for part in parts]
            phrases = encode_constraints(self.target, given, read)
        numbers = [first_number + part.number for part in parts]
        return EncodedLines(parts, sources, cuts, prefix_ids, numbers, phrases)

    def predict_lines(
        self, texts: Sequence[str], lines: EncodedLines, chosen: GenerationRecipe, found: Iterable[list[Hypothesis]]
    ) -> list[Prediction]:
        """One prediction per line, from the hypotheses of all parts."""
        predictions: list[list[Prediction]] = [[] for _ in texts]
        for part, source, cut, hypotheses in zip(lines.parts, lines.sources, lines.cuts, found, strict=True):
            best = self._ranked(hypotheses, part.text, chosen)[: chosen.nbest]
            one = self._prediction(part.text, source, best, cut)
            predictions[part.line].append(one if part.count == 1 else replace(one, source=part.source))
        return [Prediction.of_line(text, made) for text, made in zip(texts, predictions, strict=True)]

    @property
    def _reads_prose(self) -> bool:
        """Whether the model generates text from text: labels, embeddings and masked tokens need the whole source."""
        texts = self.source_encoding.reads_text and not self.sourceless
        return texts and self.recipe.model.decoder is not None and not self._masked

    def _protected(self, texts: Sequence[str], kinds: tuple[str, ...]) -> list[ProtectedLine]:
        if not self._reads_prose:
            raise InputError(
                "protected spans need a model that reads and generates text",
                where="protect",
                remedy="leave it out",
            )
        return [ProtectedLine(text, kinds) for text in texts]

    def _restore(self, lines: Sequence[ProtectedLine], predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions with the protected spans of their lines."""
        pairs = list(zip(lines, predictions, strict=True))
        self.explain_predictions([one for line, one in pairs if one.tokens and not line.complete(one.text)])
        return [one.restored(line) for line, one in pairs]

    def source_parts(
        self, texts: Sequence[str], chosen: GenerationRecipe
    ) -> tuple[list[SourcePart], list[EncodedSource], list[bool]]:
        """All lines but empty ones, long ones in parts; how they are encoded, and which of them were cut."""
        most = min(chosen.max_source_length, self._length_limits[0])
        parts = [SourcePart(line, text, text) for line, text in enumerate(texts) if text.strip()]
        encoded = encode_truncated(self.source_encoding, [part.text for part in parts], most)
        if chosen.long_sources == "truncate" or not self._reads_prose or not any(encoded[1]):
            return parts, *encoded
        lengths, languages = self.source_encoding.lengths, bool(self.source.languages)
        rows = [
            split_source(one, most, lengths, languages=languages) if cut else [one]
            for one, cut in zip(parts, encoded[1], strict=True)
        ]
        if len(split := [part for row in rows for part in row]) > len(parts):
            warn_of_parts(most)
        return split, *encode_truncated(self.source_encoding, [part.text for part in split], most)

    def _transcribe(self, texts: list[str], numbers: list[int], chosen: GenerationRecipe) -> list[Prediction]:
        """Recordings in windows, with timestamps."""
        transcriber = Transcriber(self.searcher, self.target, chosen)
        found = []
        for text, one in zip(texts, transcriber(texts, numbers), strict=True):
            ids = [token for _, span in one.spans for token in span.ids]
            scores = tuple(score for _, span in one.spans for score in span.token_scores)
            pieces, segments = tuple(map(self.target.piece, ids)), transcriber.segments(one)
            found.append(Prediction(text, self.target.decode(ids), pieces, scores, one.complete, segments=segments))
        return found

    def _ranked(self, hypotheses: list[Hypothesis], text: str, chosen: GenerationRecipe) -> list[Hypothesis]:
        """The hypotheses of one source as the search ranked them, or by expected utility."""
        if chosen.strategy_kind != "mbr":
            return hypotheses
        strategy, unknown = build.build_strategy(chosen), self.source_encoding.oov_words(text)
        assert isinstance(strategy, MinimumBayesRisk)
        candidates = [self.target.decode(one.text_ids, unknown) for one in hypotheses]
        order = rank_by_utility(candidates, strategy.utility, aggregate=strategy.aggregate)
        return [hypotheses[index] for index in order]

    def stream(self, texts: Iterable[str], **settings: Any) -> Iterator[Prediction]:
        """The predictions of `generate`, one by one in order, in constant memory: lines are read as they are needed."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            check_texts("stream", texts)
        number = 0
        for window in in_windows(without_line_feeds(texts), lambda text: len(str(text))):
            yield from self.generate(window, first_number=number, **settings)
            number += len(window)

    def alternatives(self, text: str, prefix: str = "", k: int = 5, **settings: Any) -> list[Prediction]:
        """Forced decoding: one output for each of the k most probable tokens that may follow a prefix of the target.

        The most probable token comes first. After it the search is free.
        """
        chosen = self.settings(**settings)
        if self.sourceless or not text.strip() or k < 1:
            raise InputError("alternatives need a source and at least one token", remedy="give a text, and k from 1 on")
        parts, sources, (cut, *_) = self.source_parts([text], chosen.model_copy(update={"long_sources": "truncate"}))
        forced = encode_targets(self.target, [prefix], [text])[0] or list(chosen.forced_prefix)
        prefixes = [[*forced, token] for token in self.searcher.next_tokens(sources[0], forced, k)]
        numbers = [parts[0].number for _ in prefixes]
        searched = self.searcher.search_sources(sources * len(prefixes), prefixes, chosen, numbers)
        ranked = [self._ranked(one, text, chosen)[: chosen.nbest] for one in searched]
        return [self._prediction(text, sources[0], one, cut) for one in ranked]

    def stream_tokens(self, text: str, **settings: Any) -> Iterator[StreamedToken]:
        """The output of `generate` for one text, token by token, each as soon as all hypotheses have it."""
        return stream_tokens(self, text, **settings)

    def stream_translate(
        self, words: Iterable[str], k: int = 3, alignatt: int | None = None, **settings: Any
    ) -> Iterator[StreamedToken]:
        """Simultaneous translation: output tokens while the words of one source arrive.

        Wait-k: token t is written when k + t - 1 source tokens have arrived. With `alignatt`, when it attends to none
        of the last `alignatt` source tokens: see decoding/simultaneous.py.
        """
        return stream_translate(self, words, k, alignatt, **settings)

    @property
    def max_target_tokens(self) -> int:
        """The longest output in tokens: learned position encodings have a maximum."""
        return self._length_limits[1]

    def _continue(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, chosen: GenerationRecipe, first_number: int
    ) -> list[Prediction]:
        if prefixes is not None:
            raise InputError("a language model takes its lines as prefixes", remedy="give them as the lines")
        results = []
        find = partial(self.searcher.search_batch, chosen)
        limit = self._length_limits[1]
        continued = continue_texts(find, self.target, texts, chosen, limit, first_number)
        for text, found in zip(texts, continued, strict=True):
            best = self._ranked(found.hypotheses, text, chosen)[: chosen.nbest]
            one = self._prediction(text, None, best, found.truncated)
            # The prompt is returned as it was given, also where the tokenizer does not know a character.
            read = len(self.target.decode(found.prefix))
            nbest = tuple(replace(other, text=text + other.text[read:]) for other in one.nbest)
            results.append(replace(one, text=nbest[0].text, nbest=nbest))
        return results

    @property
    def _masked(self) -> bool:
        """Whether the model is a masked language model or a denoiser, whose sources may contain `<mask>`."""
        return self.recipe.data.noise is not None

    def _prediction(
        self, text: str, source: EncodedSource | None, hypotheses: list[Hypothesis], cut: bool
    ) -> Prediction:
        unknown = self.source_encoding.oov_words(text)
        rows = [
            (
                text,
                self.target.decode(one.text_ids, unknown),
                self.target.pieces(one.ids),
                one.token_scores,
                one.complete,
                cut,
                (),
                None if self.calibration is None else self.calibration.confidence(one.token_scores),
            )
            for one in hypotheses
        ]
        nbest = tuple(Prediction(*row) for row in rows)
        ranked = tuple((one.text, one.score) for one in nbest)
        decoded = DecodedSource(text, source, hypotheses[0], ranked)
        return Prediction(*rows[0], nbest=nbest, decoded=decoded, model=self)

    def explain_predictions(self, predictions: Sequence[Prediction]) -> list[Explanation | None]:
        """Computes the explanations of many predictions in batches and stores them there; None for an empty line."""
        parts = [part for one in predictions for part in one.parts or (one,) if part.decoded is not None]
        explain = Explainer(self.network, self.source_encoding, self.target, self.info())
        decoded = [part.decoded for part in parts if part.decoded is not None]
        for one, explanation in zip(parts, explain(decoded, self.recipe.generation.batch_tokens), strict=True):
            vars(one)["explanation"] = explanation
        return [vars(one).get("explanation") for one in predictions]

    def info(self) -> dict[str, Any]:
        """Kinds of the parts and number of parameters, for the HTML page."""
        kinds = {name: part["kind"] for name, part in self.recipe.model if isinstance(part, dict)}
        return {**kinds, "parameters": self.parameters}

    def intervene(self, interventions: Sequence[Intervention | str]) -> Model:
        """A model with changes, such as `mask-head:cross:1.3`, that shares all weights with this one.

        See explain/interventions.py. This model is not changed, and its later outputs are the same bits. Alternatives,
        attributions and streams of the changed model are those of the changed network.
        """
        given = parse_interventions(interventions)
        generation = self.recipe.generation
        for one in given:
            if one.kind not in FORCED_KINDS:
                continue
            (ids,) = encode_targets(self.target, [one.text], [""])
            if not ids or (one.kind == "force-token" and len(ids) > 1 and one.text not in SPECIALS):
                pieces = ", ".join(map(self.target.piece, ids))
                problem = f"{one.text!r} is not one token of the target: {pieces or 'nothing'}"
                raise InputError(problem, where="interventions", remedy="give one token")
            if one.kind == "force-prefix":
                update: dict[str, Any] = {"forced_prefix": (*generation.forced_prefix, *ids)}
            else:
                token = SPECIALS.index(one.text) if one.text in SPECIALS else ids[0]
                processor = {"kind": "forced_token", "token": token, "at": one.step}
                update = {"logits_processors": (*generation.logits_processors, processor)}
            generation = change_settings(generation, update)
        network = intervene(self.network, given, self._encode_source)
        recipe = self.recipe.model_copy(update={"generation": generation})
        changed = Model(
            network,
            self.source,
            self.target,
            recipe,
            parameters=self.parameters,
            source_encoding=self.source_encoding,
        )
        changed.calibration = self.calibration
        return changed

    def _encode_source(self, text: str) -> Batch:
        """One source as a batch."""
        return self.source_encoding.batch(self.source_encoding.encode([text])).to(self.device)

    def score(
        self, pairs: Iterable[tuple[str, str]], *, interventions: Sequence[Intervention | str] = (), **settings: Any
    ) -> list[PairScore]:
        """The log-probability of each target given its source, token by token.

        Sources are cut as in `generate`, with a warning. A target that is too long is an error. `interventions` change
        the model for this call: see `intervene`.
        """
        if interventions:
            _refuse_forced(interventions)
            return self.intervene(interventions).score(pairs, **settings)
        chosen = self.settings(**settings)
        return self._score_encoded(*self._encode_pairs(check_pairs("score", pairs), chosen), chosen.batch_tokens)

    def _encode_pairs(
        self, pairs: Sequence[tuple[str, str]], chosen: GenerationRecipe
    ) -> tuple[list[EncodedSource], list[list[int]]]:
        """Sources, cut with a warning, and targets, refused where they are too long."""
        if self._masked:
            raise InputError(
                "this model restores noised text, and has no probability of a whole one",
                remedy="`transduce evaluate RUN FILE` gives the perplexity of the masked tokens",
            )
        if isinstance(self.network, EmbeddingModel):
            raise no_decoder_error()
        texts, given = [source for source, _ in pairs], [target for _, target in pairs]
        most = min(chosen.max_source_length, self._length_limits[0])
        sources, cuts = encode_truncated(self.source_encoding, texts, most)
        if not self.sourceless:
            warn_of_cuts(texts, cuts, most)
        # One position is for </s>.
        most = min(max(chosen.max_source_length, chosen.max_length), self._length_limits[1] - 1)
        check_target_characters(given, most)
        targets = encode_targets(self.target, given, texts)
        check_target_lengths(given, targets, most)
        return sources, targets

    def _score_encoded(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]], batch_tokens: int
    ) -> list[PairScore]:
        results: list[PairScore | None] = [None] * len(targets)
        lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
        for rows in batch_by_length(lengths, batch_tokens):
            given = [targets[row] for row in rows]
            if self.sourceless:
                batch = collate([(None, target) for target in given], rows).to(self.device)
            else:
                batch = self.source_encoding.batch([sources[row] for row in rows], given).to(self.device)
            for row, scores in zip(rows, score_batch(self.network, batch), strict=True):
                tokens = tuple(map(self.target.piece, [*targets[row], EOS]))
                results[row] = PairScore(tokens, scores)
        return [result for result in results if result is not None]

    def score_running(self, blocks: Sequence[str]) -> list[ScoredText]:
        """The log-probability of running text, block by block; `blocks` are its parts (see `data/lm_blocks.py`)."""
        block_size = self.recipe.data.block_size
        if block_size is None:
            raise InputError("this model was not trained on running text", remedy="score lines: model.score([...])")
        text = count_text(self.target, blocks)
        return score_running(self.network, text, block_size, self.recipe.generation.batch_tokens)

    @torch.inference_mode()
    def embed(self, texts: Iterable[str]) -> np.ndarray:
        """One vector per text, in order (B D): that of an embedding model, else the mean of the memory."""
        texts = check_texts("embed", texts)
        most = self.max_source_tokens()
        sources, cuts = encode_truncated(self.source_encoding, texts, most)
        warn_of_cuts(texts, cuts, most)
        found: dict[int, np.ndarray] = {}
        network = self.lowered
        for rows in batch_by_length([len(ids) + 1 for ids in sources], self.recipe.generation.batch_tokens):
            batch = self.source_encoding.batch([sources[row] for row in rows]).to(self.device)
            assert batch.source is not None
            found.update(zip(rows, network.embed(batch.source, batch.extra).float().cpu().numpy(), strict=True))
        return np.stack([found[row] for row in range(len(texts))]) if texts else np.zeros((0, 0), np.float32)

    @torch.inference_mode()
    def embed_targets(self, texts: Iterable[str]) -> np.ndarray:
        """One vector per target, in order (B D), of a model with an encoder for targets; else the same as `embed`."""
        texts = check_texts("embed_targets", texts)
        network = self.lowered
        if not (isinstance(network, EmbeddingModel) and network.has_target_encoder):
            return self.embed(texts)
        rows = encode_targets(self.target, texts, texts)
        found: dict[int, np.ndarray] = {}
        for numbers in batch_by_length([len(ids) + 1 for ids in rows], self.recipe.generation.batch_tokens):
            batch = collate([(rows[number], None) for number in numbers], numbers).to(self.device)
            assert batch.source is not None
            found.update(zip(numbers, network.embed_targets(batch.source).float().cpu().numpy(), strict=True))
        return np.stack([found[row] for row in range(len(texts))]) if texts else np.zeros((0, 0), np.float32)

    def explain_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[Explanation]:
        """Explains given targets: their token scores and attention, as if the model had generated them."""
        if self.sourceless:
            raise InputError("a language model has no source to attend to", remedy="give a model with a source")
        explain = Explainer(self.network, self.source_encoding, self.target, self.info())
        return explain(self._decoded_pairs(check_pairs("explain_pairs", pairs)), self.recipe.generation.batch_tokens)

    def _decoded_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[DecodedSource]:
        """Sources with given targets, scored."""
        generation = self.recipe.generation
        sources, targets = self._encode_pairs(pairs, generation)
        scored = self._score_encoded(sources, targets, generation.batch_tokens)
        return [
            DecodedSource(text, source, Hypothesis((*target, EOS), one.token_scores, one.score))
            for (text, _), source, target, one in zip(pairs, sources, targets, scored, strict=True)
        ]

    def explain(
        self,
        text: str,
        target: str | None = None,
        methods: Sequence[str] | None = None,
        *,
        interventions: Sequence[Intervention | str] = (),
        measures: bool = True,
        seeds: Sequence[Model] = (),
        read_at: ReadAt = "output",
        **settings: Any,
    ) -> Explanation:
        """Attention, scores, alternatives and attributions of one output, ready to be drawn.

        The output is `target` where it is given, else what the model generates. `methods` names attribution methods
        (`transduce.explain.attribution.METHODS`); each comes with measures of its faithfulness. An encoder with a head
        has no attention to its source: its outputs are attributed by integrated gradients.
        `interventions` change the model for this call: see `intervene`. `measures=False` leaves out the measures of
        faithfulness. `seeds` are models trained with other seeds: their maps are compared with those of this one.
        `read_at`: the attention of a token is read at the step that outputs it, or that reads it as input (Chen 2020).
        """
        if not isinstance(text, str):
            raise InputError(f"explain takes one text, not {text!r}", remedy='write model.explain("...")')
        if read_at not in READ_AT:
            raise InputError(f"attention is not read at {read_at!r}", where="read_at", remedy="output or input")
        if interventions:
            if target is not None:
                _refuse_forced(interventions)
            options: dict[str, Any] = {"measures": measures, "seeds": seeds, "read_at": read_at}
            return self.intervene(interventions).explain(text, target, methods, **options, **settings)
        decoded = self._decoded(text, target, settings)
        explainer = Explainer(self.network, self.source_encoding, self.target, self.info())
        (explained,) = explainer([decoded], self.recipe.generation.batch_tokens)
        explained = replace(explained, read_at=read_at)
        if isinstance(self.network, (EncoderOnly, CTCModel)):
            explained = explainer.with_self_attention(explained, decoded)
            trainable = any(one.is_floating_point() for one in self.network.parameters())
            methods = methods or (["integrated_gradients"] if trainable else ["occlusion"])
        if not methods:
            return explained
        output = explained.output
        others = [one.explain(text, output, methods, measures=False) for one in seeds]
        return explainer.with_attributions(explained, decoded, methods, measures=measures, seeds=others)

    def _decoded(self, text: str, target: str | None, settings: dict[str, Any]) -> DecodedSource:
        """One source with a given target, or with the one that the model generates."""
        if target is not None:
            return self._decoded_pairs([(text, target)])[0]
        decoded = self.generate([text], **{**settings, "long_sources": "truncate"})[0].decoded
        if decoded is None:
            raise InputError("there is nothing to explain: the line is empty", remedy="give a source text")
        return decoded

    @torch.inference_mode()
    def logits(self, *, target: Tensor, source: Tensor | None = None, source_mask: Tensor | None = None) -> Tensor:
        """Teacher-forced logits (B T V); `target` (B T) is what the decoder reads, <s> first."""
        given = None
        if source is not None:
            mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
            given = Padded(source, mask).to(self.device)
        targets = Padded(target, torch.ones_like(target, dtype=torch.bool)).to(self.device)
        state = self.network.start(Batch(given, targets))
        return self.network.advance(targets.values, state).logits


def _refuse_forced(interventions: Sequence[Intervention | str]) -> None:
    """Refuses interventions on the search where the target is given."""
    for one in parse_interventions(interventions):
        if one.kind in FORCED_KINDS:
            problem = f"{one.kind} is for an output that is generated, and the target is given"
            raise InputError(problem, where="interventions", remedy="leave out one of them")
