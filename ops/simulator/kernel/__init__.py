"""The simulator's clock, events and values. It imports nothing else of the simulator."""
