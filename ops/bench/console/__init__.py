"""Benchmarks of the console: what its pages and its stream of events cost on a large fleet."""
