"""Video: frame sampling from files, front ends."""
