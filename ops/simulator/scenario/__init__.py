"""Scenario files: their tables, and what is built from them."""
