"""What operators run: CLI, the stack on one machine, demo and benchmarks. It may import everything; nobody imports it."""
