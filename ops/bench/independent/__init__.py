"""Independent witnesses: load generators of other projects before a replayed node, beside what the gateway counted."""
