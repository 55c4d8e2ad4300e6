"""Pictures: files in, pixels, rows of vectors and panels out."""
