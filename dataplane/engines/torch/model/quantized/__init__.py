"""Weights that stay packed in memory: formats of published checkpoints, and layers that compute with them."""
