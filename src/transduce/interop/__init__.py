"""Models from elsewhere -> runs of our own."""

from transduce.interop.family import Imported
from transduce.interop.hub import located
from transduce.interop.importing import KNOWN, convert, read, recognises
from transduce.interop.kept import as_run
from transduce.interop.languages import Languages

__all__ = ["KNOWN", "Imported", "Languages", "as_run", "convert", "located", "read", "recognises"]
