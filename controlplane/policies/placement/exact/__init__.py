"""Placement as one integer program, for an exact solver."""
