"""The replay engine: deterministic tokens at the step times of a GPU profile, without a GPU."""
