"""Benchmarks of a control plane over regions."""
