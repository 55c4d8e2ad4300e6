"""Generation: one token loop, strategies, logits processors, and scoring of given targets."""
