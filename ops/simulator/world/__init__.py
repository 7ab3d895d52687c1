"""The simulated fleet: regions, loops, failures, and what is recorded of them."""
