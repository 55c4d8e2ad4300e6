"""Batches and a model enter; trained weights, checkpoints and a log leave."""
