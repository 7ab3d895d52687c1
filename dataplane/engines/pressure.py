"""KV has no room: what an engine's policy is told when it is asked for the way out (`dataplane.remapping.relief`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dataplane.engines.sequences import TokenSequence
from dataplane.remapping.relief import Way

KvPressure = Literal["auto", "remap", "swap", "recompute", "refuse"]
"""What is done when KV has no room: the cheapest by measured times, or always the same where it can be."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A sequence finds no room for the KV of `tokens` tokens. `victim`: whose KV would leave for it, itself perhaps;
    None: nobody's.
    """

    sequence: TokenSequence[Any]
    tokens: int
    victim: TokenSequence[Any] | None


Relieve = Callable[[Shortage], Way | None]
"""Chooses the way; None when none is open. With "remap", there is more room when it returns."""


def always_swap(shortage: Shortage) -> Way | None:
    """KV goes to host memory: what an engine does that has no other way."""
    return "swap"
