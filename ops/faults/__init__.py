"""Fault injection: processes of a stack under load are killed, paused and disconnected, and its guarantees checked."""
