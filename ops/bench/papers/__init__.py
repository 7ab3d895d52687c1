"""The papers' comparisons, run in the simulator."""
