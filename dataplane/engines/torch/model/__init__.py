"""Transformer models of the torch engine: checkpoint, layout, attention, forward pass."""
