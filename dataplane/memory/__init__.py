"""Memory of a slot: one arena of slabs for weights and KV blocks, who is resident, and what is still in flight."""
