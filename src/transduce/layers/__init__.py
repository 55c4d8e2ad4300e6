"""The small parts that encoders and decoders are made of."""
