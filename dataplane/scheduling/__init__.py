"""Pure: what runs next on a slot, in what order, and what it will cost."""
