"""Server: one queue and continuous batching for every model, HTTP interfaces, limits, keys and metrics."""
