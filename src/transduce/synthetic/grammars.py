"""Small grammars for the other text tasks: translation, sentiment, part-of-speech tags, entailment, running text."""

from __future__ import annotations

import random
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.dataset import invented_name, invented_names, is_held_out

# Translation from English to German: articles and adjectives agree with the gender and case of the noun, and a clause
# after `that` has its verb at the end. A noun phrase is (article, adjective, noun).
NOUNS = {
    "man": ("Mann", "m"),
    "dog": ("Hund", "m"),
    "tree": ("Baum", "m"),
    "king": ("König", "m"),
    "woman": ("Frau", "f"),
    "cat": ("Katze", "f"),
    "town": ("Stadt", "f"),
    "lamp": ("Lampe", "f"),
    "child": ("Kind", "n"),
    "horse": ("Pferd", "n"),
    "house": ("Haus", "n"),
    "book": ("Buch", "n"),
}
ADJECTIVES = {"old": "alt", "small": "klein", "young": "jung", "red": "rot", "new": "neu", "good": "gut"}
VERBS = {"sees": "sieht", "finds": "findet", "loves": "liebt", "draws": "zeichnet", "knows": "kennt"}
THINKING = {"says": "sagt", "believes": "glaubt", "hopes": "hofft"}
# (article, ending of an adjective) by definiteness, case and gender
ENDINGS = {
    ("the", "subject"): {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    ("the", "object"): {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    ("a", "subject"): {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    ("a", "object"): {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}
Phrase = tuple[str, str, str]


def german_phrase(phrase: Phrase, case: str) -> str:
    """A noun phrase in German, with agreement."""
    article, adjective, noun = phrase
    word, gender = NOUNS[noun]
    german_article, ending = ENDINGS[article, case][gender]
    return " ".join([german_article, *([ADJECTIVES[adjective] + ending] if adjective else []), word])


def _phrase(rng: random.Random) -> Phrase:
    return rng.choice(("the", "a")), rng.choice(("", *ADJECTIVES)), rng.choice(list(NOUNS))


def _clause(rng: random.Random) -> tuple[str, str, str]:
    """A clause in English, and in German with the verb in second place and at the end."""
    subject, verb, thing = _phrase(rng), rng.choice(list(VERBS)), _phrase(rng)
    english = " ".join(" ".join(part.split()) for part in (" ".join(subject), verb, " ".join(thing)))
    parts = german_phrase(subject, "subject"), VERBS[verb], german_phrase(thing, "object")
    return english, " ".join(parts), " ".join((parts[0], parts[2], parts[1]))


def generate_translations(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """English sentences are held out."""
    while True:
        english, main, subordinate = _clause(rng)
        if rng.random() < 0.4:
            thinker, thinks = rng.choice(list(NOUNS)), rng.choice(list(THINKING))
            english = f"the {thinker} {thinks} that {english}"
            main = f"{german_phrase(('the', '', thinker), 'subject')} {THINKING[thinks]} , dass {subordinate}"
        if is_held_out(english) == held_out:
            yield Example(f"{english} .", f"{main} .")


# Pronouns across sentences: `it` is masculine, feminine or neuter in German, by the noun that another sentence names.
PRONOUNS = {"subject": {"m": "er", "f": "sie", "n": "es"}, "object": {"m": "ihn", "f": "sie", "n": "es"}}
PEOPLE = ("man", "king", "woman", "child")


def generate_pronouns(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Documents of three sentences, `document TAB sentence`; whole documents are held out."""
    things = [noun for noun in NOUNS if noun not in PEOPLE]
    number = 0
    while True:
        noun, adjective, other = rng.choice(things), rng.choice(list(ADJECTIVES)), rng.choice(list(ADJECTIVES))
        person, verb, gender = rng.choice(PEOPLE), rng.choice(list(VERBS)), NOUNS[noun][1]
        if is_held_out(f"{noun} {adjective} {other} {person} {verb}") != held_out:
            continue
        number, name = number + 1, invented_name(rng, held_out)
        seen = f"{german_phrase(('the', '', person), 'subject')} {VERBS[verb]} {PRONOUNS['object'][gender]} ."
        known = [
            (f"it is {other} .", f"{PRONOUNS['subject'][gender]} ist {ADJECTIVES[other]} ."),
            (f"the {person} {verb} it .", seen),
        ]
        rng.shuffle(known)
        article = "an" if adjective[0] in "aeiou" else "a"
        first = (
            f"here is {article} {adjective} {noun} .",
            f"hier ist {german_phrase(('a', adjective, noun), 'subject')} .",
        )
        for english, german in (first, *known):
            yield Example(f"{name}-{number}\t{english}", german)


# Sentiment: one judgement, which a negation turns round, among sentences that say nothing about quality.
GOOD = ("moving", "funny", "brilliant", "charming", "clever", "thrilling")
BAD = ("boring", "clumsy", "dull", "tedious", "silly", "pointless")
ASPECTS = ("plot", "cast", "music", "ending", "dialogue", "camera")
NEUTRAL = (
    "i saw it on a {day}",
    "it lasts two hours",
    "{who} sat beside me",
    "the hall was full",
    "it is set in {who}",
)
WEEK = ("monday", "tuesday", "friday", "sunday")


def generate_reviews(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Whole reviews are held out. The label is that of the judgement, turned round by `not` or `anything but`."""
    while True:
        good, negated = rng.random() < 0.5, rng.random() < 0.4
        word = rng.choice(GOOD if good else BAD)
        says = rng.choice(("not {}", "anything but {}")) if negated else rng.choice(("{}", "very {}", "really {}"))
        parts = [f"the {rng.choice(ASPECTS)} was {says.format(word)}"]
        for sentence in rng.sample(NEUTRAL, rng.randint(1, 3)):
            name = invented_names(rng, held_out, 1)[0]
            parts.insert(rng.randint(0, len(parts)), sentence.format(day=rng.choice(WEEK), who=name.lower()))
        text = " . ".join(parts) + " ."
        if is_held_out(text) == held_out:
            yield Example(text, "positive" if good != negated else "negative")


# Part-of-speech tags: words that are nouns or verbs, and are told apart by their neighbours only.
AMBIGUOUS = ("walk", "play", "dance", "call", "visit", "drink", "smile", "work")
ADVERBS = ("often", "never", "always", "gladly")


def generate_tags(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Sentences are held out, and names: `Dorava often calls the walk .` has the tags PROPN ADV VERB DET NOUN PUNCT."""
    while True:
        name = invented_names(rng, held_out, 1)[0]
        tagged = [(name, "PROPN")] if rng.random() < 0.5 else [("the", "DET"), *_tagged_noun(rng)]
        tagged += [(rng.choice(ADVERBS), "ADV")] if rng.random() < 0.5 else []
        tagged += [
            (rng.choice(AMBIGUOUS), "VERB"),
            (rng.choice(("the", "a")), "DET"),
            *_tagged_noun(rng),
            (".", "PUNCT"),
        ]
        if is_held_out(" ".join(word for word, _ in tagged)) == held_out:
            yield Example(" ".join(word for word, _ in tagged), " ".join(tag for _, tag in tagged))


def _tagged_noun(rng: random.Random) -> list[tuple[str, str]]:
    adjective = [(rng.choice(list(ADJECTIVES)), "ADJ")] if rng.random() < 0.4 else []
    return [*adjective, (rng.choice((*AMBIGUOUS, *NOUNS)), "NOUN")]


# Entailment: who is where. Neither text alone tells the label.
ROOMS = ("kitchen", "garden", "cellar", "attic", "office", "hall")
PERSONS = ("anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo")


def generate_entailment(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Premises are held out. `neutral`: the hypothesis is about somebody whom the premise does not place."""
    while True:
        one, other, third = rng.sample(PERSONS, 3)
        at = dict(zip((one, other), rng.sample(ROOMS, 2), strict=True))
        premise = f"{one} is in the {at[one]} and {other} is in the {at[other]} , {third} is away"
        if is_held_out(premise) != held_out:
            continue
        label = rng.choice(("entailment", "contradiction", "neutral"))
        who = third if label == "neutral" else rng.choice((one, other))
        room = at[who] if label == "entailment" else rng.choice([name for name in ROOMS if name != at.get(who)])
        yield Example(f"{premise}\t{who} is in the {room}", label)


# Text without a source: sentences in which the verb and the last word follow from the noun.
ANIMALS = {"dog": "barks", "cat": "meows", "cow": "moos", "frog": "croaks", "bee": "buzzes", "owl": "hoots"}
TOOLS = {"saw": "cuts", "drill": "turns", "pump": "drips", "clock": "ticks", "mill": "grinds", "lamp": "shines"}
WHERE = {"animal": ("in the meadow", "by the pond", "under the tree"), "tool": ("in the shed", "on the bench")}


def generate_lines(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Lines are held out."""
    while True:
        kind, names = rng.choice((("animal", ANIMALS), ("tool", TOOLS)))
        noun, adverb = rng.choice(list(names)), rng.choice(("", *ADVERBS, "today", "again", "loudly", "slowly"))
        words = [rng.choice(("the", "a", "this", "that")), rng.choice(("", *ADJECTIVES)), noun, adverb, names[noun]]
        text = " ".join([*(word for word in words if word), rng.choice(WHERE[kind]), "."])
        if is_held_out(text) == held_out:
            yield Example("", text)


def generate_stories(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Lines of three to five sentences about one person and the things around them; persons are held out."""
    lines = generate_lines(rng, held_out)
    while True:
        name = invented_names(rng, held_out, 1)[0]
        heard = [f"{name} hears that {next(lines).target}" for _ in range(rng.randint(3, 5))]
        yield Example("", " ".join(heard))
