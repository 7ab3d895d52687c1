"""The HTTP faces: OpenAI-compatible, admin, node and health."""
