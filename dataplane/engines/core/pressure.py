"""KV has no room: what an engine's policy is told when it is asked for the way out (`core.remapping.relief`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dataplane.engines.core.remapping.relief import Way
from dataplane.engines.core.sequences import TokenSequence

KvPressure = Literal["auto", "remap", "swap", "recompute", "refuse"]
"""What is done when KV has no room: the cheapest by measured times, or always the same where it can be."""

VLLM_PRESSURES: tuple[KvPressure, ...] = ("auto", "recompute")
"""vLLM makes room by itself: it computes anew what it has dropped. All other engines have every way."""


def vllm_refusal(pressure: KvPressure) -> str | None:
    """Why vLLM cannot do what is asked for when KV has no room; None if it can."""
    if pressure in VLLM_PRESSURES:
        return None
    return f"kv_pressure must be {' or '.join(VLLM_PRESSURES)} for vLLM, which makes room by itself, not {pressure}"


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
