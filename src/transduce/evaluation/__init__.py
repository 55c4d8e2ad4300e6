"""Evaluation: metrics, significance, held-out data, comparison of systems."""
