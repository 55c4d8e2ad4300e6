"""Rows in, rows out, by our own kernels for the CPU: compiled once on the machine that reads them."""
