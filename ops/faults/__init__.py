"""Fault runs: a stack under load, whose processes are killed, paused and cut off, and what it promised, checked."""
