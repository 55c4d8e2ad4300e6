"""Attention enters; word alignments and pictures in the terminal, in PNG and in HTML leave."""
