"""The measured load of a slot: the time its decode batches need, over the time they get. Pure.

Equation 3 counts what a round plans to spend. Prefills between the turns, prefetches that were late or for a model that
was not next, and waits for KV are not in it, but they reduce the share of the time in which decode steps run. With a
round of B sum 1/n seconds of decoding that share is B sum 1/n over the round's whole length, and alpha, the round over
B, is sum 1/n over the share.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from dataplane.scheduling.decode import BatchFacts

MEMORY_S = 10.0
"""The time constant of the exponential decay: a few rounds."""
SHARE_MIN = 0.01


class DecodeShare(Struct, frozen=True, kw_only=True):
    """The share of the time in which decode steps ran, while there was something to decode."""

    share: float = 1.0

    def observe(self, seconds: float, *, decoded: bool) -> "DecodeShare":
        """The share after a step of so many seconds, in which tokens were decoded or not."""
        assert seconds >= 0
        weight = 1 - math.exp(-seconds / MEMORY_S)
        return DecodeShare(share=self.share + weight * (decoded - self.share))

    def load(self, batches: Iterable[BatchFacts]) -> float:
        """Alpha: the reciprocal of the attainment to expect, where it is above 1; 0 without batches."""
        return sum([batch.step_s / batch.tbt_s for batch in batches]) / max(self.share, SHARE_MIN)
