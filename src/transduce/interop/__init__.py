"""Models from elsewhere -> runs of our own."""

from transduce.interop.importing import KNOWN, Imported, convert, read, recognises

__all__ = ["KNOWN", "Imported", "convert", "read", "recognises"]
