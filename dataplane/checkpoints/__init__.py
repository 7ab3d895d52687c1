"""Checkpoints of models: on disk, from a web server, or from the Hugging Face hub."""
