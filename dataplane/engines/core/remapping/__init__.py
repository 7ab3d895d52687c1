"""Pure: which layers lend their memory to KV and when they get it back, and whether that is the best way out."""
