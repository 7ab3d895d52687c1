"""The torch engine: transformers model classes over our own weight arena and paged KV cache."""
