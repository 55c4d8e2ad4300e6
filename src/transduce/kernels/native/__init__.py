"""C kernels for the CPU, compiled once on the machine that runs them, and their bindings."""
