"""Pure: which layers are offloaded for KV and when they are reclaimed, and which action KV pressure is handled by."""
