"""Tokenizers: vocabularies, encoding and decoding, OOV placeholders, running text."""
