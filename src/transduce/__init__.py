"""Encoder-decoder models: pairs in, a trained, scored, explained model out."""
