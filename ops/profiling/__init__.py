"""Measuring a node: step times, switch times, and whether its tokens are exact."""
