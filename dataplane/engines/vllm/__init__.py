"""vLLM behind our Protocol: an optional second engine, for dedicated instances of hot models."""
