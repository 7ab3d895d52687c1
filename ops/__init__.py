"""What operators run: CLI, local stack, demo, benchmarks. It may import everything; nobody imports it."""
