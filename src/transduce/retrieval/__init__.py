"""Vectors of texts enter; nearest texts, groups of texts, and maps of them leave."""
