"""One worker per device: the model, the KV cache and the rows of running sequences."""
