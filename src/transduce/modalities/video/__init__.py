"""Moving pictures: files in, frames, rows of vectors and strips out."""
