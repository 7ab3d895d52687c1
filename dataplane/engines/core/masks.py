"""The masks of sequences with constraints: computed on other threads, from the tokens that a step starts from."""

from collections.abc import Iterable

from dataplane.constraints.matcher import prepare
from dataplane.engines.core.kv import KvT
from dataplane.engines.core.sequences import TokenSequence


def prepare_masks(sequences: Iterable[TokenSequence[KvT]]) -> None:
    """Begin to compute which tokens may come next in each sequence that has a constraint."""
    prepare([(one.matcher, one.tokens) for one in sequences if one.matcher is not None])
