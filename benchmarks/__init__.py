"""Measurement against peers in the same run: `python -m benchmarks generate|train|recurrent|scale --help`."""
