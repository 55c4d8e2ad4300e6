"""Models from elsewhere -> runs of our own."""

from transduce.interop.cache import as_run
from transduce.interop.huggingface.family import Imported
from transduce.interop.huggingface.hub import located
from transduce.interop.huggingface.importing import KNOWN, convert, read, recognises
from transduce.interop.huggingface.languages import Languages

__all__ = ["KNOWN", "Imported", "Languages", "as_run", "convert", "located", "read", "recognises"]
