"""Sequences and chunks whose KV is in the arena or in host memory."""

from dataplane.engines.core import sequences
from dataplane.engines.torch.memory.kv import SequenceKv

TokenSequence = sequences.TokenSequence[SequenceKv]
Chunk = sequences.Chunk[SequenceKv]
