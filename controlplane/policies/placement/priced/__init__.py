"""Placement by column generation and Lagrangian relaxation, for problems that no exact solver finishes."""
