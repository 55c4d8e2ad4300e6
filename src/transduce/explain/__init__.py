"""Explanations of models: attention maps, word alignment, tensor shapes; in the terminal, as PNG, as HTML."""
