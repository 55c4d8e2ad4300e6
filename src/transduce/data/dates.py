"""Nothing enters; written dates of many languages and styles leave, with the same day in ISO 8601 as target.

A source always determines its target:

- years are 1950 to 2049, and two digits mean the year of that window;
- where the date alone does not tell, its locale stands in front: `[en_US] 3/4/26`. That is so for months written as
  numbers (unless a complete year comes first), for two-digit years, and for the few words that are different months
  in different languages (`3. listopada 2026.`: October in Croatian, November in Polish without the stops).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta

from transduce.data.locales import LOCALES, Form, forms, strip_accents
from transduce.errors import InputError
from transduce.flow import Example

__all__ = ["FIRST", "LAST", "LOCALES", "VARIATIONS", "calendar", "generate", "split"]

FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)


def generate(
    count: int, seed: int = 1, locales: Sequence[str] = LOCALES, days: Sequence[date] | None = None
) -> Iterator[Example]:
    """`count` examples: locales, their styles and days drawn evenly; about one in six has a variation as people
    make them (capitals, no accents, ...). `extra` names locale, style and variation.

    Equal arguments give equal examples, as long as Babel has the same locale data.
    """
    groups, days = forms(tuple(locales)), calendar() if days is None else days
    if not (groups and days):
        raise InputError("dates need at least one locale and one day")
    chance = random.Random(seed)
    return (_draw(chance, groups, days) for _ in range(count))


def calendar() -> list[date]:
    """Every day that dates are drawn from."""
    return [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1)]


def split(
    train: int, dev: int, test: int, seed: int = 1, locales: Sequence[str] = LOCALES
) -> tuple[list[Example], list[Example], list[Example]]:
    """Three lists of examples. The days are divided first, so a day of one list occurs in no other."""
    days = calendar()
    random.Random(seed).shuffle(days)
    held = len(days) // 20  # for each of dev and test: training keeps nine days in ten, so every part of a date
    return (
        list(generate(train, 3 * seed, locales, days[2 * held :])),
        list(generate(dev, 3 * seed + 1, locales, days[:held])),
        list(generate(test, 3 * seed + 2, locales, days[held : 2 * held])),
    )


def _draw(chance: random.Random, groups: Sequence[Sequence[Form]], days: Sequence[date]) -> Example:
    form, day = chance.choice(chance.choice(groups)), chance.choice(days)
    text = plain = form.write(day)
    variation = "none"
    if chance.random() < 0.5:  # most texts are left as they are by most variations
        variation = chance.choice(tuple(VARIATIONS))
        text = VARIATIONS[variation](plain, form, chance)
    extra = {"locale": form.locale, "style": form.style, "variation": variation if text != plain else "none"}
    if form.zero and chance.random() < 0.5:
        text = text.translate({ord("0") + value: ord(form.zero) + value for value in range(10)})
    # 25/12/2026 can be read in one way only, and people do write it alone.
    plainly = form.numeric and form.complete and day.day > 12 and chance.random() < 0.5
    tag = f"[{form.locale}] " if day.month in form.tagged and not plainly else ""
    return Example(tag + text, day.isoformat(), extra)


def _upper(text: str, form: Form) -> str:
    if form.locale == "ka":  # Georgian has capitals in Unicode, but nobody writes dates with them
        return text
    if form.locale == "el":  # Greek capitals go without accents
        return strip_accents(text).upper()
    return (text.replace("i", "İ") if form.locale in ("az", "tr") else text).upper()


def _without_stops(text: str) -> str:
    """Without the full stops that end words; those inside numbers and abbreviations stay."""
    words = text.split(" ")
    return " ".join(word[:-1] if word.endswith(".") and word.count(".") == 1 else word for word in words)


def _widen_space(text: str, form: Form, chance: random.Random) -> str:
    words = text.split(" ")
    place = chance.randrange(len(words))
    return " ".join([*words[:place], "", *words[place:]]) if place else text


def _other_separator(text: str, form: Form, chance: random.Random) -> str:
    separator = chance.choice("-/.")
    return re.sub(r"(?<=\d)[-/.](?=\d)", separator, text) if form.numeric else text


VARIATIONS: dict[str, Callable[[str, Form, random.Random], str]] = {
    "lower case": lambda text, form, chance: text.lower(),
    "upper case": lambda text, form, chance: _upper(text, form),
    "capitals": lambda text, form, chance: " ".join(_upper(word[:1], form) + word[1:] for word in text.split(" ")),
    "no commas": lambda text, form, chance: re.sub("[,،]", "", text),
    "no full stops": lambda text, form, chance: _without_stops(text),
    "no accents": lambda text, form, chance: strip_accents(text),
    "wide space": _widen_space,
    "other separator": _other_separator,
}
