"""KV caches of fixed size, and steps of a batch of texts with different lengths."""
