"""Anthropic's API: messages, for clients that speak nothing else."""
