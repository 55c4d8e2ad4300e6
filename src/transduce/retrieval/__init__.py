"""Sentence embeddings: storage, nearest-neighbour search, clustering."""
