"""Triton kernels; each module is imported only where there is a GPU."""
