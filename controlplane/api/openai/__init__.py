"""The OpenAI-compatible API: chat completions, responses, embeddings, batches, files and models."""
