"""Tensors and known sizes in, rows out: each tensor by name, shape in letters, sizes, meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from transduce.flow import Step
from transduce.shapes.recorder import Entry, Recorder, fold, leaves
from transduce.shapes.sizes import Sizes

LETTERS = {
    "B": "sources in a batch",
    "N": "beams per source",
    "R": "rows: hypotheses in flight, B * N",
    "S": "source or memory length",
    "T": "target length of this call",
    "U": "target length so far; a prompt counts",
    "D": "width",
    "H": "heads",
    "G": "heads of keys and values",
    "K": "width of one head",
    "L": "layers",
    "V": "vocabulary",
}
# Shapes that need more than sizes to be told: an axis of 1, heads, the width of a head (x: B or R, *: any size).
INSIDE = (
    *("x T V", "x T D", "x T S", "x T *", "x T"),
    *("x H T K", "x H S K", "x H U K", "x G T K", "x G S K", "x G U K", "x H N K"),
    *("x H T S", "x H T U", "x H S S", "x H N S"),
)
KEPT = ("x H S K", "x H U K", "x G S K", "x G U K")
BY_SIZE = ("B", "R", "N", "S", "T", "U", "D", "D'", "V")  # letters that a size alone may tell

FIELDS = {
    "memory": "keys and values of the memory, projected once",
    "keys": "the memory as the score compares it",
    "values": "the memory as it is read",
    "mask": "True: a real row of the memory",
    "summary": "the one vector of the bottleneck",
    "layers": "what each layer keeps of the rows so far",
    "cells": "the recurrent state of each layer",
    "reader": "what the reader fed or saw last",
    "next": "the place of the next token",
    "real": "True: a real token of the past",
    "places": "where each token of the past stands",
    "logits": "scores of every label, all said at once",
    "count": "how many labels there are to say",
    "place": "how many were said",
}


@dataclass(frozen=True)
class Row:
    """One tensor. A size without a letter stands as a number among the letters."""

    section: str
    name: str
    letters: str
    sizes: tuple[int, ...]
    meaning: str


class Scribe:
    """Puts tensors into rows and finds their letters, for one stage: training or generation."""

    def __init__(self, stage: str, sizes: Sizes) -> None:
        self.stage, self.sizes, self.rows = stage, sizes, list[Row]()
        # The vocabulary of a run may happen to be as large as a width: then neither is guessed from a size.
        met = sizes["V"] in (sizes["D"], sizes.get("D'"))
        self.telling = {name: size for name, size in sizes.items() if not (met and name in ("V", "D", "D'"))}

    def add(self, part: str, name: str, letters: str, tensor: Tensor | None, meaning: str) -> None:
        """A tensor whose letters the contracts tell."""
        if tensor is not None:
            shape = tuple(tensor.shape)
            self._write(part, name, self._fit(letters, shape, self.sizes) or self._match(shape, ()), shape, meaning)

    def tell_modules(self, recorder: Recorder) -> None:
        """What every module gave."""
        for entry in fold(recorder.entries()):
            if not entry.tensors:
                self._write("modules", entry.path, "", (), entry.meaning)
            for number, (place, shape) in enumerate(entry.tensors):
                name = entry.path + (f":{place}" if place else "")
                meaning = entry.meaning if number == 0 else ""
                self._write("modules", name, self._match(shape, INSIDE), shape, meaning)

    def tell(self, recorder: Recorder, step: Step) -> None:
        """What training and generation have in common: the insides, the state that follows, the step."""
        self.tell_modules(recorder)
        kept = [
            Entry(path, FIELDS.get(path.split(".")[1], "kept by the decoder"), (("", tuple(x.shape)),))
            for path, x in leaves({"fixed": step.state.fixed, "past": step.state.past})
        ]
        for entry in fold(kept, nested=False):
            shape = entry.tensors[0][1]
            self._write("state", entry.path, self._match(shape, KEPT, kept=True), shape, entry.meaning)
        rows = "R" if "R" in self.sizes else "B"
        self.add("step", "logits", f"{rows} T V", step.logits, "scores of every next token")
        if step.attention is not None:
            self.add("step", "attention.cross", f"{rows} L H T S", step.attention.cross, "weights over the memory")
            self.add("step", "attention.past", f"{rows} L H T U", step.attention.past, "weights over the past")

    def finish(self) -> list[Row]:
        """The rows, after a key to the letters that they use."""
        used = {letter for row in self.rows for letter in row.letters.split()}
        used |= {"B", "N"} if "R" in used else set()  # by which R is told
        key = []
        for name, meaning in LETTERS.items():
            for letter, whose in ((name, ""), (name + "'", ", of the encoder")):
                if letter in used:
                    key.append(Row(f"{self.stage}: letters", letter, letter, (self.sizes[letter],), meaning + whose))
        return key + self.rows

    def _write(self, part: str, name: str, letters: str, shape: tuple[int, ...], meaning: str) -> None:
        self.rows.append(Row(f"{self.stage}: {part}", name, letters, shape, meaning))

    def _fit(self, letters: str, shape: tuple[int, ...], sizes: Sizes) -> str:
        """The letters, with the encoder's where only those fit; nothing where they do not."""
        names = letters.split()
        found = []
        for name, size in zip(names, shape, strict=False):
            fitting = [letter for letter in (name, name + "'") if sizes.get(letter) == size]
            found += [str(size)] if name == "*" else fitting[:1]
        return " ".join(found) if len(found) == len(names) == len(shape) else ""

    def _match(self, shape: tuple[int, ...], templates: Sequence[str], kept: bool = False) -> str:
        for template in templates:
            for rows in ("B", "R"):
                if found := self._fit(template.replace("x", rows), shape, self.telling):
                    return found
        # A state knows no T: what it keeps is the past. Elsewhere U is meant only where it is not T.
        unsaid = {"T"} if kept else {"U"} if self.sizes["U"] == self.sizes["T"] else set()
        letters = [name for name in BY_SIZE if name in self.telling and name not in unsaid]
        axes = []
        for size in shape:
            fitting = [name for name in letters if self.sizes[name] == size and size > 1]
            axes.append(fitting[0] if len(fitting) == 1 else str(size))
        return " ".join(axes)
