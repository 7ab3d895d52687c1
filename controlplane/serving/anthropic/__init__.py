"""Anthropic's Messages API, pure: requests become messages for nodes, and what nodes stream becomes its events."""
