"""Training pairs in, the few target tokens that each source may need out; and a network that scores only those."""

from transduce.shortlist.lists import Shortlist
from transduce.shortlist.narrowed import OutputRows, narrow
from transduce.shortlist.translations import make_shortlist

__all__ = ["OutputRows", "Shortlist", "make_shortlist", "narrow"]
