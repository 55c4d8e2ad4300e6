"""Sentence-level data sets: summaries, reading comprehension, dialogues, records to text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transduce.flow import Example
from transduce.synthetic.dataset import invented_name, invented_names, is_held_out

# Summarisation of invented news: three to six sentences, and a summary of one sentence.
#
# The facts are in two sentences among others that are irrelevant and name other people. All names are invented, so a
# summary cannot be written without copying them from the source.


@dataclass(frozen=True)
class Story:
    """Sentence templates of one kind of event: the fact, a detail, and the summary. {who} and {place} are names."""

    facts: tuple[str, ...]
    details: tuple[str, ...]
    summary: str
    kinds: tuple[str, ...]


STORIES = (
    Story(
        ("the people of {place} have elected a new {kind} .", "after a long day of voting {place} has a new {kind} ."),
        ("{who} won with a clear majority .", "most of them voted for {who} ."),
        "{who} is the new {kind} of {place} .",
        ("mayor", "judge", "sheriff"),
    ),
    Story(
        ("a {kind} broke out in {place} last night .", "last night there was a {kind} in {place} ."),
        ("{who} was brought to hospital .", "doctors take care of {who} , who was hurt ."),
        "{who} was hurt in a {kind} in {place} .",
        ("fire", "storm", "flood"),
    ),
    Story(
        ("the {kind} of this year took place in {place} .", "thousands came to {place} to see the {kind} ."),
        ("{who} came in first .", "nobody was faster than {who} ."),
        "{who} won the {kind} in {place} .",
        ("marathon", "regatta", "race"),
    ),
    Story(
        ("a {kind} was robbed in {place} on monday .", "in {place} thieves emptied a {kind} ."),
        ("the police are looking for {who} .", "a witness claims to have seen {who} ."),
        "{who} is wanted for robbing a {kind} in {place} .",
        ("bank", "museum", "jeweller"),
    ),
    Story(
        ("a new {kind} was opened in {place} today .", "from today on {place} has a {kind} ."),
        ("it was paid for by {who} .", "the money came from {who} ."),
        "{who} gave {place} a new {kind} .",
        ("school", "bridge", "library"),
    ),
)
DISTRACTORS = (
    "{other} said that the weather was fine .",
    "{other} , a neighbour , heard of it in the morning .",
    "nobody had expected this , said {other} .",
    "the mayor of {elsewhere} sent a letter .",
    "in {elsewhere} nothing of the kind is known .",
    "there was music until late .",
    "the streets were full of people .",
    "{other} came all the way from {elsewhere} .",
)


def generate_summaries(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Names are held out. Fact and detail keep their order; one to four distractors are inserted anywhere."""
    while True:
        story = rng.choice(STORIES)
        named = ("who", "place", "other", "elsewhere")
        words = dict(zip(named, invented_names(rng, held_out, len(named)), strict=True))
        words["kind"] = rng.choice(story.kinds)
        sentences = [rng.choice(story.facts), rng.choice(story.details)]
        for distractor in rng.sample(DISTRACTORS, rng.randint(1, 4)):
            sentences.insert(rng.randint(0, len(sentences)), distractor)
        yield Example(" ".join(sentences).format(**words), story.summary.format(**words))


# Reading comprehension: short stories of who went where and took what, each with a question and its answer.
#
# The answer is a word of the story. Persons are invented, so the answer cannot be known without the story. Persons may
# move, so only the latest sentence about a place counts.

PLACES = ("kitchen", "garden", "cellar", "attic", "office", "hall")
THINGS = ("apple", "book", "lamp", "key", "letter", "coin")
MOVES = ("{who} went to the {place} .", "{who} is in the {place} .", "{who} walked into the {place} .")
TAKES = ("the {thing} belongs to {who} .", "the {thing} is with {who} .", "the {thing} was found by {who} .")


def generate_questions(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Persons are held out. Two or three persons, each in a place and with an object; at most one moves."""
    while True:
        people = invented_names(rng, held_out, rng.randint(2, 3))
        owned = dict(zip(people, rng.sample(THINGS, len(people)), strict=True))
        at = dict(zip(people, rng.sample(PLACES, len(people)), strict=True))
        sentences = [rng.choice(MOVES).format(who=who, place=at[who]) for who in people]
        sentences += [rng.choice(TAKES).format(who=who, thing=owned[who]) for who in people]
        rng.shuffle(sentences)
        for who in rng.sample(people, rng.randint(0, 1)):
            at[who] = rng.choice([place for place in PLACES if place not in at.values()])
            sentences.append(rng.choice(MOVES).format(who=who, place=at[who]))
        question, answer = _question(rng, rng.choice(people), owned, at)
        yield Example(f"{' '.join(sentences)}\t{question}", answer)


def _question(rng: random.Random, who: str, owned: dict[str, str], at: dict[str, str]) -> tuple[str, str]:
    questions = (
        (f"where is {who} ?", at[who]),
        (f"who has the {owned[who]} ?", who),
        (f"what does {who} have ?", owned[who]),
    )
    return rng.choice(questions)


# Dialogues in which a guest books a table: the turns so far, and the next turn of the host.
#
# The host needs four values: number of people, day, time, name. The guest gives some of them in the first turn; the
# host asks for the first missing one, and once all are known repeats them all, some of which were given two or four
# turns earlier. In the last turn the guest may choose another day: the latest value counts.

TURNS = 5  # in a source, the oldest first; empty before the first turn
PEOPLE = ("two", "three", "four", "five", "six")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
TIMES = ("five", "six", "seven", "eight", "nine")
QUESTIONS = {
    "people": "how many people ?",
    "day": "for which day ?",
    "time": "at what time ?",
    "name": "under which name ?",
}
STATEMENTS = {
    "people": ("for {people}", "we are {people}"),
    "day": ("on {day}", "{day} it is"),
    "time": ("at {time} o'clock", "at {time}"),
    "name": ("under {name}", "my name is {name}"),
}
OPENINGS = ("good evening , a table please ,", "hello , i would like to come ,", "is there a table ,")
CONFIRMATION = "a table for {people} on {day} at {time} for {name} , see you then ."


def generate_dialogues(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Names are held out. Every turn of the host is an example; a dialogue has at most three of them."""
    while True:
        wanted = {
            "people": rng.choice(PEOPLE),
            "day": rng.choice(DAYS),
            "time": rng.choice(TIMES),
            "name": invented_name(rng, held_out),
        }
        yield from _dialogue(rng, wanted)


def _dialogue(rng: random.Random, wanted: dict[str, str]) -> Iterator[Example]:
    first = rng.sample(list(QUESTIONS), rng.randint(2, 3))
    turns = [" ".join((rng.choice(OPENINGS), _statement(rng, first, wanted), "."))]
    missing = [slot for slot in QUESTIONS if slot not in first]
    while missing:
        slot, *missing = missing
        yield _dialogue_example(turns, QUESTIONS[slot])
        answer = [_statement(rng, [slot], wanted)]
        if slot != "day" and not missing and rng.random() < 0.3:
            wanted = {**wanted, "day": rng.choice([day for day in DAYS if day != wanted["day"]])}
            answer.append(f"and better on {wanted['day']}")
        turns += [QUESTIONS[slot], " ".join((*answer, "."))]
    yield _dialogue_example(turns, CONFIRMATION.format(**wanted))


def _statement(rng: random.Random, slots: list[str], wanted: Mapping[str, str]) -> str:
    return " , ".join(rng.choice(STATEMENTS[slot]) for slot in slots).format(**wanted)


def _dialogue_example(turns: list[str], answer: str) -> Example:
    return Example("\t".join([""] * (TURNS - len(turns)) + turns), answer)


# Data-to-text: attributes of invented restaurants, and sentences that verbalise them.
#
# The attributes of a record appear in any order, and some are missing. A held-out record comes with all its reference
# sentences, one per line.

VALUES = {
    "food": ("french", "indian", "thai", "greek", "polish", "vegan"),
    "area": ("centre", "harbour", "suburbs", "hills"),
    "price": ("cheap", "moderate", "expensive"),
    "view": ("river", "park", "market"),
}


def generate_records(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Names are held out, and combinations of food and area: training has both values, never together."""
    while True:
        record = {"name": invented_name(rng, held_out)}
        present = rng.sample(list(VALUES), rng.randint(2, len(VALUES)))
        record |= {slot: rng.choice(VALUES[slot]) for slot in present}
        combination_held_out = is_held_out(f"{record.get('food')} {record.get('area')}")
        if {"food", "area"} <= record.keys() and combination_held_out != held_out:
            continue
        slots = rng.sample(list(record), len(record))
        source = " ".join(f"{slot}[ {record[slot]} ]" for slot in slots)
        sentences = references(record)
        for target in sentences if held_out else [rng.choice(sentences)]:
            yield Example(source, target)


def references(record: Mapping[str, str]) -> list[str]:
    """Three correct sentences for a record."""
    name, price = record["name"], record.get("price", "")
    kind = " ".join(word for word in (price, record.get("food", ""), "restaurant") if word)
    food = f"serves {record['food']} food" if "food" in record else "is a restaurant"
    area = f" in the {record['area']}" if "area" in record else ""
    view = f" with a view of the {record['view']}" if "view" in record else ""
    near = f" near the {record['view']}" if "view" in record else ""
    costs = f" at {price} prices" if price else ""
    return [
        f"{name} is {_article(kind)} {kind}{area}{view} .",
        f"{name}{near} {food}{costs}{area} .",
        f"there is {_article(kind)} {kind}{area} called {name}{view} .",
    ]


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def missing_values(source: str, text: str) -> list[str]:
    """The values of a record that do not appear in a text."""
    words = text.split()
    return [value for value in re.findall(r"\[ (\S+) \]", source) if value not in words]
