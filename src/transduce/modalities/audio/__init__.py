"""Sound: waveforms and frames in, rows of vectors and spectrograms out."""
