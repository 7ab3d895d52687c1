"""Benchmarks of the batch queue against other queues on Postgres."""
