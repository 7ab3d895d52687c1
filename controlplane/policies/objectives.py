"""What a tier promises of a model, and how much of an answer kept it. Pure."""

import math
from collections.abc import Mapping

from dataplane.protocol.tiers import Objective, Tier


def choose_objective(
    tier: Tier, own: Mapping[str, Mapping[str, float]] | None, defaults: Mapping[Tier, Objective]
) -> Objective | None:
    """The objective of a model and tier: its own (`Model.slo`), else the default. Deferred requests have none."""
    found = (own or {}).get(tier.value)
    return defaults.get(tier) if found is None else Objective(ttft_s=found["ttft_s"], tbt_s=found["tbt_s"])


def tokens_in_time(objective: Objective, *, first: int, count: int, elapsed_s: float) -> int:
    """How many of `count` tokens, from that of index `first` on, are not late `elapsed_s` after the request came."""
    late = max(0, math.ceil((elapsed_s - objective.ttft_s) / objective.tbt_s - 1e-9))
    return max(0, min(count, first + count - late))
