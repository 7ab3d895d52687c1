"""Memory of a slot: the weight arena, the paged KV cache, and who is resident."""
