"""GGUF files, as llama.cpp has them, made into Hugging Face checkpoints that nodes read."""
