"""Pure: what runs next on a slot, in what order, and at what cost."""
