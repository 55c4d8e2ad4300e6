"""Written dates: agreement with Babel, and sources that determine their targets."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from datetime import date
from functools import cache

import pytest
from babel.dates import format_date, format_skeleton
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic import dates
from transduce.synthetic.dates import Form, _fold, forms

any_day = st.dates(dates.FIRST, dates.LAST)
any_form = st.deferred(lambda: st.sampled_from(all_forms()))


@cache
def all_forms() -> list[Form]:
    return [form for group in forms() for form in group]


def typed(text: str) -> str:
    return re.sub("[\u200e\u200f]", "", re.sub("[\u00a0\u202f]", " ", text))


@given(form=any_form.filter(lambda form: " " not in form.style), day=any_day)
@settings(max_examples=400, deadline=None)
def test_styles_agree_with_babel(form: Form, day: date) -> None:
    if form.style.startswith("y"):
        expected = format_skeleton(form.style, day, locale=form.locale)
    else:
        expected = format_date(day, form.style, locale=form.locale)
    assert form.write(day) == typed(expected)


@pytest.mark.parametrize(
    ("locale", "text"),
    [
        ("en_US", "March 3rd, 2026"),
        ("en_GB", "the 3rd of March 2026"),
        ("fr", "le mardi 3 mars 2026"),
        ("de", "Dienstag, den 3. März 2026"),
        ("de", "am 3. März 2026"),
        ("vi", "ngày 3 tháng 3 năm 2026"),
        ("ja", "2026年3月3日火曜日"),
        ("ru", "вторник, 3 марта 2026 г."),
    ],
)
def test_known_dates(locale: str, text: str) -> None:
    assert text in {form.write(date(2026, 3, 3)) for form in all_forms() if form.locale == locale}


def test_ordinals() -> None:
    def ordinals(locale: str, pattern: str) -> list[str]:
        form = next(form for form in all_forms() if form.locale == locale and "#" in form.template)
        texts = [form.write(date(2026, 3, day)) for day in range(1, 32)]
        return [found.group() for text in texts if (found := re.search(pattern, text))]

    english = "1st 2nd 3rd 4th 5th 6th 7th 8th 9th 10th 11th 12th 13th 14th 15th 16th 17th 18th 19th 20th 21st 22nd"
    assert ordinals("en_US", r"\d+[a-z]+") == f"{english} 23rd 24th 25th 26th 27th 28th 29th 30th 31st".split()
    assert ordinals("fr", r"\b\d\d?(er)?\b")[:3] == ["1er", "2", "3"]


# The days that are most easily mistaken for each other: small numbers everywhere.
SMALL = [date(year, month, day) for year in range(2001, 2013) for month in range(1, 13) for day in (1, 2, 3, 6, 12)]


def test_every_source_determines_one_day() -> None:
    readings: dict[str, str] = {}
    for days in (SMALL, None):
        for example in dates.generate(40_000, 5, days=days):
            assert example.target is not None
            assert readings.setdefault(example.source, example.target) == example.target, example


def test_without_locale_tags_some_sources_are_ambiguous() -> None:
    """Shows that the previous test can fail, so the tags are necessary."""
    readings: dict[str, set[str | None]] = {}
    for example in dates.generate(20_000, 5, days=SMALL[:120]):
        readings.setdefault(re.sub(r"^\[\w+] ", "", example.source), set()).add(example.target)
    assert sum(len(targets) > 1 for targets in readings.values()) > 20


def test_words_that_name_two_months_are_tagged() -> None:
    """Listopad is October in Croatian and November in Polish; Czech writes it with another ending."""
    tagged = {form.locale: form.tagged for form in all_forms() if form.style == "long"}
    assert (tagged["hr"], tagged["pl"], tagged["cs"]) == (frozenset({10}), frozenset({11}), frozenset())
    alone = {form.style: form.tagged for form in forms(("hr",))[0]}
    assert alone["long"] == frozenset()


@given(form=any_form, day=any_day, seed=st.integers(0, 10**6), name=st.sampled_from(sorted(dates.VARIATIONS)))
@settings(max_examples=500, deadline=None)
def test_variations_keep_the_folded_text_and_the_numbers(form: Form, day: date, seed: int, name: str) -> None:
    """Tags are decided on folded text, so a variation must change neither it nor a number."""
    text = form.write(day)
    changed = dates.VARIATIONS[name](text, form, random.Random(seed))
    if name == "other separator":
        assert re.sub("[-/.]", "", changed) == re.sub("[-/.]", "", text)
    else:
        assert _fold(changed) == _fold(text)
    assert re.findall(r"\d+", changed) == re.findall(r"\d+", text)
    assert changed == changed.strip()


def test_variations_of_known_texts() -> None:
    def vary(name: str, locale: str, text: str) -> str:
        return dates.VARIATIONS[name](text, forms((locale,))[0][0], random.Random(1))

    assert vary("upper case", "tr", "3 Nisan 2026") == "3 NİSAN 2026"
    assert vary("upper case", "el", "3 Μαΐου 2026") == "3 ΜΑΙΟΥ 2026"
    assert vary("upper case", "ka", "3 მარ. 2026") == "3 მარ. 2026"
    assert vary("capitals", "fr", "le 1er août 2026") == "Le 1er Août 2026"
    assert vary("no accents", "fr", "1er août 2026") == "1er aout 2026"
    assert vary("no accents", "th", "3 มี.ค. 2026") == "3 มี.ค. 2026"
    assert vary("no full stops", "th", "3 มี.ค. 2026") == "3 มี.ค. 2026"
    assert vary("no full stops", "hr", "3. ožujka 2026.") == "3 ožujka 2026"
    assert vary("no commas", "ar_EG", "الثلاثاء، 3 مارس 2026") == "الثلاثاء 3 مارس 2026"


def is_numeric_without_tag(example: Example) -> bool:
    return re.fullmatch(r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}", example.source) is not None


def test_untagged_numeric_dates_are_unambiguous() -> None:
    alone = [example for example in dates.generate(20_000, 6) if is_numeric_without_tag(example)]
    assert len(alone) > 100
    assert all(int((example.target or "")[-2:]) > 12 for example in alone)
    assert not any(re.search(r"\D\d\d$", example.source) for example in alone)


def test_two_digit_years_are_between_1950_and_2049() -> None:
    short = [form for form in all_forms() if not form.complete]
    assert {form.locale for form in short} == set(dates.LOCALES)
    assert all(len(form.tagged) == 12 for form in short)
    targets = [example.target or "" for example in dates.generate(5_000, 2)]
    assert min(targets) >= "1950-01-01"
    assert max(targets) <= "2049-12-31"
    assert len({target[2:4] for target in targets}) == 100


def test_samples_cover_many_locales_scripts_and_styles() -> None:
    examples = list(dates.generate(20_000, 3))
    assert len(dates.LOCALES) == len(set(dates.LOCALES)) > 50
    assert {example.extra["locale"] for example in examples} == set(dates.LOCALES)
    assert {example.extra["variation"] for example in examples} == {"none", *dates.VARIATIONS}
    letters = {letter for example in examples for letter in example.source if letter.isalpha()}
    scripts = {unicodedata.name(letter).split()[0] for letter in letters}
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "HANGUL", "CJK"} <= scripts
    digits = {unicodedata.name(letter) for example in examples for letter in example.source if letter.isdecimal()}
    assert {"BENGALI DIGIT THREE", "ARABIC-INDIC DIGIT THREE", "DEVANAGARI DIGIT THREE"} <= digits
    per_locale = Counter(form.locale for form in all_forms())
    assert min(per_locale.values()) >= 5


def test_split_shares_no_day_and_training_covers_every_date_component() -> None:
    train, dev, test = dates.split(20_000, 500, 500, seed=4)
    assert [len(train), len(dev), len(test)] == [20_000, 500, 500]
    days = [{example.target or "" for example in part} for part in (train, dev, test)]
    assert sum(map(len, days)) == len(set.union(*days))
    for part in (slice(0, 4), slice(5, 7), slice(8, 10)):
        assert {day[part] for day in days[0]} >= {day[part] for day in days[1] | days[2]}


def test_equal_seeds_give_equal_examples() -> None:
    examples = list(dates.generate(200, 9))
    assert list(dates.generate(200, 9)) == examples
    assert list(dates.generate(50, 9)) == examples[:50]
    assert list(dates.generate(200, 10)) != examples
    assert dates.split(50, 10, 10, 2) == dates.split(50, 10, 10, 2)


def test_only_requested_locales_and_days_are_used() -> None:
    day = date(2000, 2, 29)
    examples = list(dates.generate(100, 1, locales=("de", "ja"), days=[day]))
    assert {example.extra["locale"] for example in examples} == {"de", "ja"}
    assert {example.target for example in examples} == {"2000-02-29"}


def test_unknown_locale_and_empty_choices_are_refused() -> None:
    with pytest.raises(InputError, match="unknown locale 'en_UZ'"):
        dates.generate(1, locales=("en_UZ",))
    with pytest.raises(InputError, match="unknown locale '!'"):
        dates.generate(1, locales=("!",))
    with pytest.raises(InputError, match="at least one"):
        dates.generate(1, locales=())
    with pytest.raises(InputError, match="at least one"):
        dates.generate(1, days=[])
