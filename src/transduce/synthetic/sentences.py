"""Sentence-level data sets: summaries, reading comprehension, dialogues, records to text, paraphrases."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic.dataset import invented_name, invented_names, is_held_out

Synonyms = tuple[str, ...]  # expressions of one meaning: `a | b | c`

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


def _synonyms(*lines: str) -> tuple[Synonyms, ...]:
    return tuple(tuple(expression.strip() for expression in line.split("|")) for line in lines)


@dataclass(frozen=True)
class Topic:
    """The fillers of the five slots of a sentence: who does what to what, where and when."""

    people: tuple[Synonyms, ...]
    actions: tuple[Synonyms, ...]
    things: tuple[Synonyms, ...]
    places: tuple[Synonyms, ...]
    times: tuple[Synonyms, ...]

    @property
    def slots(self) -> tuple[tuple[Synonyms, ...], ...]:
        return self.people, self.actions, self.things, self.places, self.times


TOPICS = {
    "kitchen": Topic(
        _synonyms("the cook | a chef", "my mother | mum", "the baker | a pastry maker", "our guest | a visitor"),
        _synonyms("chops | cuts up", "burns | chars", "serves | dishes out", "tastes | samples"),
        _synonyms("the onions | some shallots", "the pie | a tart", "the soup | a broth", "the bread | a loaf"),
        _synonyms(
            "in the kitchen | by the stove", "at the table | over dinner", "on the terrace | outside on the porch"
        ),
        _synonyms(
            "at noon | for lunch",
            "after work | for supper",
            "every morning | for breakfast",
            "at christmas | for the feast",
        ),
    ),
    "office": Topic(
        _synonyms(
            "the boss | our manager", "a clerk | the assistant", "the lawyer | an attorney", "a colleague | my peer"
        ),
        _synonyms(
            "signs | puts a name under", "loses | cannot find", "prints | makes a copy of", "checks | looks through"
        ),
        _synonyms(
            "the contract | an agreement", "the letter | a note", "the invoice | a bill", "the report | a summary"
        ),
        _synonyms("at the office | at a desk", "in the meeting | before the board", "in the archive | among old files"),
        _synonyms(
            "on monday | as the week begins",
            "in time | before it is due",
            "too late | past the deadline",
            "each quarter | every three months",
        ),
    ),
    "sport": Topic(
        _synonyms(
            "the striker | a forward", "the goalkeeper | our keeper", "the coach | a trainer", "a fan | one supporter"
        ),
        _synonyms("kicks | shoots", "throws | hurls", "catches | grabs hold of", "misses | fails to reach"),
        _synonyms("the ball | a football", "the javelin | one spear", "the whistle | a pipe", "the medal | a trophy"),
        _synonyms("in the stadium | at the arena", "on the field | across the pitch", "in the gym | down at the hall"),
        _synonyms(
            "in the final | during the last match",
            "at half time | in the break",
            "in training | while warming up",
            "this season | in the league",
        ),
    ),
    "music": Topic(
        _synonyms(
            "the singer | a vocalist",
            "the pianist | a keyboard player",
            "my niece | a young girl",
            "the band | a group",
        ),
        _synonyms("plays | performs", "records | puts on tape", "practises | rehearses", "forgets | does not remember"),
        _synonyms(
            "the song | a tune", "the sonata | one classical piece", "the march | a parade", "the hymn | a chorale"
        ),
        _synonyms("on stage | before the crowd", "in the studio | behind glass", "in the church | under the organ"),
        _synonyms(
            "at the premiere | on opening night",
            "twice | two times over",
            "by heart | from memory",
            "much too fast | in a rush",
        ),
    ),
    "garden": Topic(
        _synonyms(
            "the gardener | a groundsman",
            "my grandfather | grandpa",
            "the farmer | a grower",
            "the neighbour | a man next door",
        ),
        _synonyms("waters | sprinkles", "plants | puts into the ground", "cuts down | fells", "picks | gathers"),
        _synonyms(
            "the roses | some flowers",
            "the apples | some ripe fruit",
            "the beans | some peas",
            "the hedge | a row of shrubs",
        ),
        _synonyms("in the garden | behind the house", "by the pond | at the water", "near the fence | along the wall"),
        _synonyms(
            "in spring | when it gets warm",
            "after the rain | once it is dry",
            "in autumn | as leaves fall",
            "before the frost | ahead of the cold",
        ),
    ),
    "travel": Topic(
        _synonyms(
            "the tourist | a traveller",
            "the pilot | an airman",
            "the driver | a chauffeur",
            "a student | one young scholar",
        ),
        _synonyms("books | reserves", "boards | gets on", "leaves | gets off", "photographs | takes a picture of"),
        _synonyms(
            "the train | a railway carriage", "the ship | a ferry", "the plane | an aircraft", "the hotel | an inn"
        ),
        _synonyms(
            "in the mountains | high in the alps", "at the coast | along the shore", "at the border | by customs"
        ),
        _synonyms(
            "on holiday | in august",
            "with a backpack | carrying next to nothing",
            "without a ticket | having paid no fare",
            "by night | while others sleep",
        ),
    ),
}
ORDERS = (
    "{time} {who} {does} {what} {where}",
    "{where} {who} {does} {what} {time}",
    "{who} {does} {what} {time} {where}",
)


def generate_paraphrases(count: int, seed: int = 1) -> Iterator[Example]:
    """`count` pairs with distinct meanings; `extra` names the topic.

    Each slot has few fillers, so every sentence has many neighbours that differ from it in one slot.
    """
    total = sum(prod(map(len, topic.slots)) for topic in TOPICS.values())
    if 4 * count > 3 * total:  # beyond this most samples would be repetitions
        raise InputError(f"{count} distinct meanings requested, but there are only {total}", remedy="request fewer")
    return islice(_sample(random.Random(seed)), count)


def generate_split(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Every pair of one part of the split, in random order; meanings are held out."""
    meanings = [(name, meaning) for name, topic in TOPICS.items() for meaning in product(*topic.slots)]
    part = [one for one in meanings if is_held_out(" ".join(slot[0] for slot in one[1])) == held_out]
    rng.shuffle(part)
    return (_pair(rng, name, meaning) for name, meaning in part)


def _sample(rng: random.Random) -> Iterator[Example]:
    seen: set[tuple[Synonyms, ...]] = set()
    while True:
        name = rng.choice(list(TOPICS))
        meaning = tuple(rng.choice(fillers) for fillers in TOPICS[name].slots)
        if meaning in seen:
            continue
        seen.add(meaning)
        yield _pair(rng, name, meaning)


def _pair(rng: random.Random, topic: str, meaning: Sequence[Synonyms]) -> Example:
    chosen = [rng.sample(synonyms, 2) for synonyms in meaning]
    one, other = (_sentence([pair[side] for pair in chosen], rng.choice(ORDERS)) for side in (0, 1))
    return Example(one, other, {"topic": topic})


def _sentence(parts: list[str], order: str) -> str:
    who, does, what, where, time = parts
    return order.format(who=who, does=does, what=what, where=where, time=time)
