"""Checkpoints of frozen toolkits -> runs of our own."""

from transduce.interop.legacy.detect import ENDINGS, read, recognises

__all__ = ["ENDINGS", "read", "recognises"]
