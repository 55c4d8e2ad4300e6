"""Scores, normalisers and positions, and the attention made of them."""
