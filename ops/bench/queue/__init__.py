"""Benchmarks of the batch queue beside other queues on Postgres."""
