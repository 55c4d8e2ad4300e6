"""Recordings of the original toolkits: `python tests/oracles/toolkits OUT [TOOLKIT ...]`, in their environment."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

TOOLKITS = ("marian", "opennmt", "fairseq_models", "joeynmt_models")

if __name__ == "__main__":
    out, chosen = Path(sys.argv[1]).resolve(), sys.argv[2:] or TOOLKITS
    with TemporaryDirectory() as work:
        for toolkit in chosen:
            importlib.import_module(toolkit).record(Path(work), out)
            print(f"recorded {toolkit}")
