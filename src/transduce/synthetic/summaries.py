"""Summarisation of invented news: three to six sentences, and a summary of one sentence.

The facts are in two sentences among others that are irrelevant and name other people. All names are invented, so a
summary cannot be written without copying them from the source.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transduce.flow import Example
from transduce.synthetic.dataset import invented_names


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


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
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
