"""Nothing enters; made-up news of three to six sentences leave, with one sentence that says what happened.

The facts stand in two sentences, somewhere among others in which other people say what does not matter. All names are
invented, so a summary cannot be written without taking them over.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transduce.flow import Example
from transduce.synthetic.words import invent_names


@dataclass(frozen=True)
class Story:
    """What can happen: how it is told, what more is told of it, and in short. {who} and {place} are names."""

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
ASIDES = (
    "{other} said that the weather was fine .",
    "{other} , a neighbour , heard of it in the morning .",
    "nobody had expected this , said {other} .",
    "the mayor of {elsewhere} sent a letter .",
    "in {elsewhere} nothing of the kind is known .",
    "there was music until late .",
    "the streets were full of people .",
    "{other} came all the way from {elsewhere} .",
)


def draw(chance: random.Random, held_out: bool) -> Iterator[Example]:
    """Held out are names. The facts come in their order; one to four asides stand before, between and after."""
    while True:
        story = chance.choice(STORIES)
        named = ("who", "place", "other", "elsewhere")
        words = dict(zip(named, invent_names(chance, held_out, len(named)), strict=True))
        words["kind"] = chance.choice(story.kinds)
        sentences = [chance.choice(story.facts), chance.choice(story.details)]
        for aside in chance.sample(ASIDES, chance.randint(1, 4)):
            sentences.insert(chance.randint(0, len(sentences)), aside)
        yield Example(" ".join(sentences).format(**words), story.summary.format(**words))
