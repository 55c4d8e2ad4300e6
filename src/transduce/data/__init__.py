"""Text data: readers, tokenizers, the store of token ids, batches, noise."""
