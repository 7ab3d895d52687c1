"""Benchmarks of the engines on this machine."""
