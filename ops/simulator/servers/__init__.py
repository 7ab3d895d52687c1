"""Simulated instances and pools, which run the live scheduling code."""
