"""Audio: waveform and feature files, log-mel spectrograms, augmentation, front ends."""
