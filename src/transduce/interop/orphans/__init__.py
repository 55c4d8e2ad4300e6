"""Checkpoints of frozen toolkits -> runs of our own."""

from transduce.interop.orphans.finding import ENDINGS, read, recognises

__all__ = ["ENDINGS", "read", "recognises"]
