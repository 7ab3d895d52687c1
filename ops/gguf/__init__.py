"""Conversion of GGUF files, the format of llama.cpp, into Hugging Face checkpoints that nodes can read."""
