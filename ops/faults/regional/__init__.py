"""Loses a region of a stack under load, and counts what was acknowledged and is gone or doubled."""
