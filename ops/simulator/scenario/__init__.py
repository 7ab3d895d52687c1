"""Scenario files: what may stand in them, and what they are made from."""
