"""Engines behind one Protocol: torch (real tokens) and replay (time from a profile)."""
