"""Translation over a service: languages of the served models, detection, texts and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transduce.data.language_identification import DetectedLanguage, identify
from transduce.inference.documents import Document
from transduce.inference.long_sources import AlignedPart
from transduce.serving.service import (
    DeadlineExceeded,
    GeneratedText,
    GenerationRequest,
    Limits,
    Service,
    Want,
)

UNKNOWN = "und"  # ISO 639: undetermined


@lru_cache(maxsize=512)
def language_name(code: str) -> str:
    """The English name of a language."""
    from babel import Locale, UnknownLocaleError

    try:
        return str(Locale.parse(code.replace("-", "_")).get_display_name("en") or code)
    except (UnknownLocaleError, ValueError, TypeError):
        return code


def match_language(code: str, known: Sequence[str]) -> str | None:
    """The known language that a code means: itself, the language of a variant, or a variant of the language."""
    wanted = code.lower().replace("_", "-")
    for one in known:
        if one.lower() == wanted:
            return one
    base = wanted.split("-")[0]
    return next((one for one in known if one.lower() == base), None) or next(
        (one for one in known if one.lower().split("-")[0] == wanted), None
    )


class ServedLanguages:
    """The languages of the translation models of a service."""

    def __init__(self, service: Service) -> None:
        models = [one for one in service.models() if one.task == "translation" and one.modality == "text"]
        self.targets: dict[str, list[str]] = {}  # of each source language
        self.models: dict[tuple[str, str], str] = {}  # of each pair of languages
        self.open = next((one.name for one in models if not one.target_languages), None)  # its languages are not known
        for info in models:
            sources = info.source_languages or info.target_languages  # of one vocabulary: any of its languages
            for source in sources:
                own = source if len(info.target_languages) > 1 else None  # a multilingual model has no pair of its own
                for target in info.target_languages:
                    if target != own and (source, target) not in self.models:
                        self.models[source, target] = info.name
                        self.targets.setdefault(source, []).append(target)

    @property
    def all(self) -> list[str]:
        """Every language that a text may have."""
        return list(dict.fromkeys([*self.targets, *(one for row in self.targets.values() for one in row)]))

    def source(self, code: str) -> str | None:
        return match_language(code, list(self.targets)) or (code if self.open is not None else None)

    def target(self, code: str) -> str | None:
        known = list(dict.fromkeys(one for row in self.targets.values() for one in row))
        return match_language(code, known) or (code if self.open is not None else None)

    def model(self, source: str, target: str) -> str | None:
        """The name of the first model of a pair of languages."""
        return self.models.get((source, target), self.open)

    def detect(self, text: str) -> list[DetectedLanguage]:
        """The served languages, the most probable one first."""
        return identify(text, self.all) or [DetectedLanguage(UNKNOWN, 0.0)]

    def detect_source(self, text: str, target: str) -> DetectedLanguage:
        """The most probable language that can be translated into the target, or the target itself."""
        found = self.detect(text)
        possible = (one for one in found if one.language == target or self.model(one.language, target))
        return next(possible, found[0])


@dataclass(frozen=True)
class TranslationRequest:
    """How texts or documents of one language are translated."""

    target: str
    source: str
    n_best: int = 1
    protect: bool = False

    def generation(self, service: Service, sources: Sequence[str]) -> GenerationRequest | None:
        """The request to the service; None: the sources have the target language already, and no model reads them."""
        model = ServedLanguages(service).model(self.source, self.target)
        if model is None and self.source == self.target:
            return None
        return GenerationRequest(
            tuple(sources),
            model=model,
            source_language=None if self.source == UNKNOWN else self.source,
            target_language=self.target,
            n_best=self.n_best,
            protect=self.protect,
        )


async def translate_texts(
    service: Service, texts: Sequence[str], request: TranslationRequest, wants: frozenset[Want] = frozenset()
) -> list[tuple[GeneratedText, ...]]:
    """The n best translations of each text. A text that has the target language already is its own translation."""
    wanted = request.generation(service, texts)
    if wanted is None:
        return [(GeneratedText(text),) for text in texts]
    return list((await service.generate(replace(wanted, wants=wants))).outputs)


async def translate_document(
    service: Service, document: Document, request: TranslationRequest, limits: Limits
) -> Document:
    """The document with its sentences translated and all else kept, in requests of as many sentences as may be."""
    rows = document.sentences
    texts = [sentence.strip() for row in rows for sentence in row]
    request = replace(request, protect=True, n_best=1)
    wants: frozenset[Want] = frozenset({"alignment"} if document.has_tags else ())
    found: list[GeneratedText] = []
    try:
        async with asyncio.timeout(limits.request_seconds):
            for some in in_requests(texts, limits):
                found += [best for best, *_ in await translate_texts(service, some, request, wants)]
    except TimeoutError:
        raise DeadlineExceeded from None
    outputs = iter(found)
    return document.translated([[_part(sentence, next(outputs)) for sentence in row] for row in rows])


def _part(sentence: str, output: GeneratedText) -> AlignedPart:
    return AlignedPart(sentence, sentence, output.text, output.alignment or ())


def in_requests(texts: Sequence[str], limits: Limits) -> list[list[str]]:
    """The texts in groups within the limits of one request, where a single text is."""
    groups: list[list[str]] = []
    size = 0
    for text in texts:
        size += len(text)
        if not groups or len(groups[-1]) == limits.items or size > limits.characters:
            groups.append([])
            size = len(text)
        groups[-1].append(text)
    return groups
