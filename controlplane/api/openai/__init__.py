"""The OpenAI-compatible API: chat completions, batches, files and models."""
