"""Training: trainer, updates, optimisers, checkpoints, data feeding, distribution, report."""
