"""What-if runs: facts of the fleet with changes, simulated by the command line in a process of its own."""
