"""What a run has done so far: updates enter one by one, JSON for a checkpoint and lines for the log leave."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from transduce.data.batching import DataPosition
from transduce.training.micro_batch import Result
from transduce.training.optimisers import Plateau


@dataclass
class Window:
    """Sums since the last log line. They are part of a checkpoint, so a resumed run logs the same lines."""

    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    count: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0

    def add(self, result: Result, tokens: int, slots: int, seconds: float) -> None:
        self.tokens, self.slots, self.seconds = self.tokens + tokens, self.slots + slots, self.seconds + seconds
        if result.bad:  # its loss is not a number
            return
        self.loss, self.count = self.loss + result.loss, self.count + result.count
        for name, value in result.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value


@dataclass
class Progress:
    """All that a resumed run must know besides tensors."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)  # of the next batch
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0  # validations since the best one
    validated: int = 0  # step of the last validation
    scores: dict[str, float | None] = field(default_factory=dict)  # of the best validation
    plateau: Plateau = field(default_factory=Plateau)
    bad: int = 0  # non-finite updates in a row
    skipped: int = 0  # non-finite updates in all
    lost: int = 0  # examples left out because they do not fit into memory
    tokens: int = 0
    seconds: float = 0.0
    window: Window = field(default_factory=Window)

    def judge(self, value: float, scores: dict[str, float], lower: bool) -> bool:
        """Takes one validation in; True when it is the best so far."""
        self.validated = self.step
        best = self.best_value
        better = best is None or (value < best if lower else value > best)
        if value == best:  # the loss still tells equal ones apart
            better = scores.get("loss", math.inf) < (self.scores.get("loss") or math.inf)
        if math.isfinite(value) and better:
            self.best_step, self.best_value, self.stale = self.step, value, 0
            self.scores = {name: score if math.isfinite(score) else None for name, score in scores.items()}
            return True
        self.stale += 1
        return False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "position": self.position.to_json(), "plateau": self.plateau.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(
            **{
                **content,
                "position": DataPosition.from_json(content["position"]),
                "plateau": Plateau.from_json(content["plateau"]),
                "window": Window(**content["window"]),
            }
        )
