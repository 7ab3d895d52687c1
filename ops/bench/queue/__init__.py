"""Benchmarks of the batch queue: against other queues on Postgres, and beside interactive requests."""
