"""Attention: scores, normalisers, windows, position encodings, multi-head and self-attention."""
