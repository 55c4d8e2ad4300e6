"""HTTP interfaces of other servers: one module each, listed here."""

from __future__ import annotations

from transduce.serving.protocols import deepl, huggingface, libretranslate, openai, opennmt, tgi
from transduce.serving.service import Interface

INTERFACES: tuple[Interface, ...] = (
    libretranslate.INTERFACE,
    openai.INTERFACE,
    deepl.INTERFACE,
    opennmt.INTERFACE,
    tgi.INTERFACE,
    huggingface.INTERFACE,
)
