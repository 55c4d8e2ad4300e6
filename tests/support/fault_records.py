"""Records of injected faults: what docs/reliability.md states.

FAULT_FACTOR multiplies the number of cases, FAULT_RECORD is a folder for one JSON record of each fault.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def cases(number: int) -> int:
    """The number of cases of a test; `number` is for continuous integration."""
    return math.ceil(number * float(os.environ.get("FAULT_FACTOR", "1")))


def record(fault: str, outcome: str, count: int, survived: int, **figures: Any) -> None:
    """Stores how often a fault was injected and how often the outcome was the promised one; a figure has a name."""
    if folder := os.environ.get("FAULT_RECORD"):
        content = {"fault": fault, "outcome": outcome, "cases": count, "survived": survived, "figures": figures}
        path = Path(folder) / f"{fault.replace(' ', '-').replace(',', '')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
