"""Documents: text, subtitles and HTML, translated sentence by sentence with everything else kept."""

from transduce.inference.documents.document import FORMATS, Document, Segment, read_document
from transduce.inference.documents.translation import translate_document

__all__ = ["FORMATS", "Document", "Segment", "read_document", "translate_document"]
