"""Requests that arrive in a simulation: traces, rates and synthetic traffic."""
