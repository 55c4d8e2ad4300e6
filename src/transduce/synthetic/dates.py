"""Written dates in many languages and styles, with ISO 8601 as the target.

A source always determines its target:

- years are 1950 to 2049, so two digits determine the year;
- where the text alone is ambiguous, a locale tag precedes it: `[en_US] 3/4/26`. That applies to numeric months (unless
  a four-digit year comes first), to two-digit years, and to the few words that name different months in different
  languages (`3. listopada 2026.`: October in Croatian, November in Polish without the full stops).
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cached_property, lru_cache
from typing import Any

from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

_NAMES = """
af ar_EG az bg bn ca cs cy da de el en_GB en_US es et eu fa fi fil fr ga he hi hr hu hy id is it ja ka kk ko lt lv mr
ms nb nl pl pt_BR ro ru sk sl sq sr sv sw ta th tr uk ur vi zh
"""
LOCALES = tuple(_NAMES.split())

# Date patterns inside a sentence, in CLDR's pattern letters; `#` is the ordinal suffix of the day.
_SPOKEN: dict[str, tuple[str, ...]] = {
    "af": ("'op' d MMMM y",),
    "bg": ("'на' d MMMM y 'г'.",),
    "ca": ("'el' d MMMM 'del' y",),
    "cs": ("'dne' d. MMMM y",),
    "da": ("'den' d. MMMM y",),
    "de": ("'am' d. MMMM y", "EEEE, 'den' d. MMMM y", "'am' EEEE, 'dem' d. MMMM y"),
    "el": ("'στις' d MMMM y",),
    "en_GB": ("'on' d MMMM y", "'the' d'#' 'of' MMMM y", "EEEE d'#' MMMM y", "d'#' MMM y"),
    "en_US": ("'on' MMMM d, y", "MMMM d'#', y", "EEEE, MMMM d'#', y", "d MMMM y", "'the' d'#' 'of' MMMM, y"),
    "es": ("'el' d 'de' MMMM 'de' y", "'el' EEEE d 'de' MMMM 'del' y"),
    "fil": ("'noong' MMMM d, y", "'ika'-d 'ng' MMMM y"),
    "fr": ("'le' d'#' MMMM y", "'le' EEEE d'#' MMMM y"),
    "hr": ("'dana' d. MMMM y.",),
    "id": ("'tanggal' d MMMM y",),
    "it": ("'il' d MMMM y", "EEEE d'#' MMMM y"),
    "ms": ("'pada' d MMMM y", "d 'haribulan' MMMM y"),
    "nb": ("'den' d. MMMM y",),
    "nl": ("'op' d MMMM y", "'op' EEEE d MMMM y"),
    "pl": ("'dnia' d MMMM y 'r'.", "d MMMM y 'roku'"),
    "pt_BR": ("'em' d 'de' MMMM 'de' y", "'dia' d'#' 'de' MMMM 'de' y"),
    "ro": ("'pe' d MMMM y", "'la' d MMMM y"),
    "ru": ("d MMMM y 'года'", "'от' d MMMM y 'г'."),
    "sk": ("'dňa' d. MMMM y",),
    "sl": ("'dne' d. MMMM y",),
    "sv": ("'den' d MMMM y", "EEEE 'den' d MMMM y"),
    "sw": ("'tarehe' d MMMM y",),
    "tr": ("d MMMM y 'tarihinde'",),
    "uk": ("d MMMM y 'року'",),
    "vi": ("'ngày' d MMMM 'năm' y", "EEEE, 'ngày' d MMMM 'năm' y"),
    "zh": ("y 年 M 月 d 日", "y年M月d号"),
}
_ORDINALS: dict[str, Callable[[int], str]] = {
    "en": lambda day: {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day // 10 != 1 else 0, "th"),
    "fr": lambda day: "er" if day == 1 else "",
    "it": lambda day: "º" if day == 1 else "",
    "pt": lambda day: "º" if day == 1 else "",
}

_SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd", "yMMMMd", "yMMMMEd", "yMMMMEEEEd")  # CLDR's style names

# The digit zero of the non-Latin numbering systems in which some locales write dates.
_ZERO = {"arab": "٠", "arabext": "۰", "beng": "০", "deva": "०", "mymr": "၀"}

_NUMBERS: dict[str, Callable[[date], str]] = {
    "d": lambda day: f"{day.day}",
    "dd": lambda day: f"{day.day:02}",
    "M": lambda day: f"{day.month}",
    "MM": lambda day: f"{day.month:02}",
    "y": lambda day: f"{day.year}",
    "yy": lambda day: f"{day.year % 100:02}",
}


@dataclass(frozen=True)
class Form:
    """One date format: a style of one locale."""

    locale: str
    style: str
    template: str  # "%(EEEE)s, %(d)s. %(MMMM)s %(y)s"
    words: Mapping[str, tuple[str, ...]]  # field -> its 12 months, its 7 weekdays or its one era
    zero: str  # zero of the non-Latin digits of this locale, or ""
    tagged: frozenset[int] = frozenset(range(1, 13))  # months for which a locale tag precedes the date

    @cached_property
    def fields(self) -> list[str]:
        return re.findall(r"%\((\w+)\)s", self.template)

    @cached_property
    def numeric(self) -> bool:
        return "M" in self.fields or "MM" in self.fields

    @cached_property
    def complete(self) -> bool:
        """Whether the year has four digits, so that it cannot be mistaken for a day."""
        return "y" in self.fields

    @property
    def order(self) -> str:
        return "".join(field[0] for field in self.fields if field[0] in "dMy")

    @property
    def unambiguous(self) -> bool:
        """Whether a reader who knows the words needs no locale tag."""
        return self.complete and (not self.numeric or self.order == "yMd")

    def write(self, day: date) -> str:
        values = {field: _NUMBERS[field](day) for field in self.fields if field in _NUMBERS}
        text = self.template % (values | self.month_and_weekday(day.month, day.weekday()))
        return text.replace("#", _ORDINALS[self.locale[:2]](day.day)) if "#" in text else text

    def month_and_weekday(self, month: int, weekday: int) -> dict[str, str]:
        index = {12: month - 1, 7: weekday, 1: 0}
        return {field: words[index[len(words)]] for field, words in self.words.items()}

    @cached_property
    def readings(self) -> frozenset[tuple[str, int]]:
        """(folded text, month). Day, year and everything that a variation changes are removed, so two dates that may be
        written alike have equal folded texts. Empty for numeric forms, which look alike in all months."""
        if self.numeric:
            return frozenset()
        blank = dict.fromkeys(_NUMBERS, "_")
        weekdays = range(7) if any(len(words) == 7 for words in self.words.values()) else range(1)
        return frozenset(
            (_fold(self.template % (blank | self.month_and_weekday(month, weekday))), month)
            for month in range(1, 13)
            for weekday in weekdays
        )


@lru_cache(maxsize=8)
def forms(locales: tuple[str, ...] = LOCALES) -> tuple[tuple[Form, ...], ...]:
    """The forms of each locale, with the tags that distinguish the dates of all these locales."""
    groups = [_unambiguous(_locale_forms(locale)) for locale in locales]
    meanings = _meanings(form for group in groups for form in group if form.unambiguous)
    return tuple(tuple(_tag(form, meanings) if form.unambiguous else form for form in group) for group in groups)


def _meanings(all_forms: Iterable[Form]) -> dict[str, set[int]]:
    meanings: dict[str, set[int]] = {}
    for form in all_forms:
        for text, month in form.readings:
            meanings.setdefault(text, set()).add(month)
    return meanings


def _tag(form: Form, meanings: Mapping[str, set[int]]) -> Form:
    ambiguous = (month for text, month in form.readings if len(meanings[text]) > 1)
    return replace(form, tagged=frozenset(ambiguous))


def _unambiguous(group: Sequence[Form]) -> tuple[Form, ...]:
    """The forms of one locale that a reader who knows the locale cannot confuse: no two months look alike, and all
    ambiguous numeric forms have day, month and year in the order of the first one."""
    orders: dict[bool, str] = {}
    kept = [form for form in group if form.unambiguous or orders.setdefault(form.numeric, form.order) == form.order]
    meanings = _meanings(kept)
    return tuple(form for form in kept if all(len(meanings[text]) == 1 for text, _ in form.readings))


def _locale_forms(name: str) -> tuple[Form, ...]:
    """The distinct forms of one locale, in a fixed order."""
    from babel import Locale, UnknownLocaleError
    from babel.dates import parse_pattern
    from babel.localedata import locale_identifiers

    try:
        locale = Locale.parse(name)
    except (UnknownLocaleError, ValueError):
        raise InputError(f"unknown locale {name!r}", remedy=nearest(name, locale_identifiers())) from None
    patterns = {style: locale.date_formats[style] for style in ("short", "medium", "long", "full")}
    skeletons = locale.datetime_skeletons
    patterns |= {style: skeletons[style] for style in _SKELETONS if style in skeletons}
    patterns |= {f"spoken {number}": parse_pattern(text) for number, text in enumerate(_SPOKEN.get(name, ()), 1)}
    templates = {style: _clean(pattern.format) for style, pattern in patterns.items()}
    for style in ("yMd", "yMMMd"):
        templates[f"{style}, short year"] = templates[style].replace("%(y)s", "%(yy)s")
    templates["yMd, padded"] = templates["yMd"].replace("%(d)s", "%(dd)s").replace("%(M)s", "%(MM)s")
    zero = _ZERO.get(locale.default_numbering_system, "")
    distinct: dict[str, Form] = {}
    for style, template in templates.items():
        distinct.setdefault(template, Form(name, style, template, _words(locale, template), zero))
    return tuple(distinct.values())


def _words(locale: Any, template: str) -> dict[str, tuple[str, ...]]:
    from babel.dates import DateTimeFormat

    months = [date(2024, month, 1) for month in range(1, 13)]
    weekdays = [date(2024, 1, day) for day in range(1, 8)]  # a week, from Monday
    days = {"M": months, "L": months, "E": weekdays, "c": weekdays, "G": months[:1]}
    return {
        field: tuple(_clean(DateTimeFormat(day, locale)[field]) for day in days[field[0]])
        for field in re.findall(r"%\((\w+)\)s", template)
        if field not in _NUMBERS
    }


def _clean(text: str) -> str:
    """The text with plain spaces in place of typographic ones and without direction marks."""
    return re.sub("[\u200e\u200f]", "", re.sub("[\u00a0\u2009\u202f]", " ", text))


def _fold(text: str) -> str:
    """A form of the text that is equal for all its variations."""
    return re.sub(r"[.,،#\s]", "", strip_accents(text.casefold())).replace("ı", "i")


def strip_accents(text: str) -> str:
    """The text without the accents of Latin and Greek letters; in other scripts combining marks are letters."""
    if text.isascii():
        return text
    kept, bare = [], False
    for letter in unicodedata.normalize("NFD", text):
        mark = unicodedata.combining(letter) != 0
        bare = bare if mark else unicodedata.name(letter, "").startswith(("LATIN", "GREEK"))
        if not (mark and bare):
            kept.append(letter)
    return unicodedata.normalize("NFC", "".join(kept))


__all__ = ["FIRST", "LAST", "LOCALES", "VARIATIONS", "calendar", "generate", "generate_split", "split"]

FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)


def generate(
    count: int, seed: int = 1, locales: Sequence[str] = LOCALES, days: Sequence[date] | None = None
) -> Iterator[Example]:
    """`count` examples with uniformly sampled locales, styles and days; about one in six has a variation such as
    upper case or missing accents. `extra` names locale, style and variation.

    Equal arguments give equal examples for the same version of Babel's locale data.
    """
    groups, days = forms(tuple(locales)), calendar() if days is None else days
    if not (groups and days):
        raise InputError("dates need at least one locale and one day")
    rng = random.Random(seed)
    return (_sample(rng, groups, days) for _ in range(count))


def generate_split(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Endless examples of one part of the split, in all locales; days are held out."""
    groups, days = forms(), [day for day in calendar() if is_held_out(day.isoformat()) == held_out]
    while True:
        yield _sample(rng, groups, days)


def calendar() -> list[date]:
    """Every day from `FIRST` to `LAST`."""
    return [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1)]


def split(
    train: int, dev: int, test: int, seed: int = 1, locales: Sequence[str] = LOCALES
) -> tuple[list[Example], list[Example], list[Example]]:
    """Train, development and test examples. The days are divided first: no day occurs in two lists."""
    days = calendar()
    random.Random(seed).shuffle(days)
    held = len(days) // 20  # for dev and test each; training has nine days in ten, so it covers every date component
    return (
        list(generate(train, 3 * seed, locales, days[2 * held :])),
        list(generate(dev, 3 * seed + 1, locales, days[:held])),
        list(generate(test, 3 * seed + 2, locales, days[held : 2 * held])),
    )


def _sample(rng: random.Random, groups: Sequence[Sequence[Form]], days: Sequence[date]) -> Example:
    form, day = rng.choice(rng.choice(groups)), rng.choice(days)
    text = plain = form.write(day)
    variation = "none"
    if rng.random() < 0.5:  # most variations leave most texts unchanged
        variation = rng.choice(tuple(VARIATIONS))
        text = VARIATIONS[variation](plain, form, rng)
    extra = {"locale": form.locale, "style": form.style, "variation": variation if text != plain else "none"}
    if form.zero and rng.random() < 0.5:
        text = text.translate({ord("0") + value: ord(form.zero) + value for value in range(10)})
    # 25/12/2026 is unambiguous, and people write it without a locale.
    untagged = form.numeric and form.complete and day.day > 12 and rng.random() < 0.5
    tag = f"[{form.locale}] " if day.month in form.tagged and not untagged else ""
    return Example(tag + text, day.isoformat(), extra)


def _upper(text: str, form: Form) -> str:
    if form.locale == "ka":  # Unicode has Georgian capitals, but dates are not written with them
        return text
    if form.locale == "el":  # Greek capitals have no accents
        return strip_accents(text).upper()
    return (text.replace("i", "İ") if form.locale in ("az", "tr") else text).upper()


def _without_stops(text: str) -> str:
    """The text without full stops at the end of words; those inside numbers and abbreviations stay."""
    words = text.split(" ")
    return " ".join(word[:-1] if word.endswith(".") and word.count(".") == 1 else word for word in words)


def _widen_space(text: str, form: Form, rng: random.Random) -> str:
    words = text.split(" ")
    position = rng.randrange(len(words))
    return " ".join([*words[:position], "", *words[position:]]) if position else text


def _other_separator(text: str, form: Form, rng: random.Random) -> str:
    separator = rng.choice("-/.")
    return re.sub(r"(?<=\d)[-/.](?=\d)", separator, text) if form.numeric else text


VARIATIONS: dict[str, Callable[[str, Form, random.Random], str]] = {
    "lower case": lambda text, form, rng: text.lower(),
    "upper case": lambda text, form, rng: _upper(text, form),
    "capitals": lambda text, form, rng: " ".join(_upper(word[:1], form) + word[1:] for word in text.split(" ")),
    "no commas": lambda text, form, rng: re.sub("[,،]", "", text),
    "no full stops": lambda text, form, rng: _without_stops(text),
    "no accents": lambda text, form, rng: strip_accents(text),
    "wide space": _widen_space,
    "other separator": _other_separator,
}
