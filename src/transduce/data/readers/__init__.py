"""Readers of data files: compression, formats, folders, corpora."""
