"""Two steps of fixed size, by whose times nodes report how fast a model is there, whatever their own profiles say."""

PREFILL_TOKENS = 1024
"""One prompt of so many tokens."""
DECODE_SEQUENCES, DECODE_CONTEXT_TOKENS = 8, 8 * 1024
"""So many sequences whose contexts have so many tokens together."""
