"""KV pressure: what an engine's policy gets when an allocation of KV fails. The policy: `core.remapping.actions`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.sequences import TokenSequence

KvPressure = Literal["auto", "remap", "swap", "recompute", "refuse"]
"""How KV pressure is handled: by the action that is cheapest by measured times, or always by one, where possible."""

VLLM_PRESSURES: tuple[KvPressure, ...] = ("auto", "recompute")
"""vLLM frees memory itself: it recomputes what it has preempted. All other engines have every action."""


def vllm_refusal(pressure: KvPressure) -> str | None:
    """Why vLLM cannot handle KV pressure in this way; None if it can."""
    if pressure in VLLM_PRESSURES:
        return None
    return f"kv_pressure must be {' or '.join(VLLM_PRESSURES)} for vLLM, which handles it itself, not {pressure}"


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Free memory is too small for the KV of `tokens` tokens of a sequence. `victim`: the sequence that would be
    preempted, perhaps itself; None if there is none.
    """

    sequence: TokenSequence[Any]
    tokens: int
    victim: TokenSequence[Any] | None


OnShortage = Callable[[Shortage], Action | None]
"""Chooses the action; None if none is possible. After "remap" there is more free memory when it returns."""


def always_swap(shortage: Shortage) -> Action | None:
    """The policy of an engine that only swaps."""
    return "swap"
