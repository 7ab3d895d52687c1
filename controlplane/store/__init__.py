"""The only SQL and the only Redis keys of the control plane."""
