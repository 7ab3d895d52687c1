"""Device and host memory of the torch engine: weights, KV cache and the copies between them."""
