"""The latency objectives of each tier, for models without their own, and the order of the tiers."""

from dataplane.protocol.tiers import Objective, Tier

TIER_OBJECTIVES: dict[Tier, Objective] = {
    Tier.IW_F: Objective(ttft_s=1.0, tbt_s=0.1),
    Tier.IW_N: Objective(ttft_s=60.0, tbt_s=0.1),
    Tier.NIW: Objective(ttft_s=86_400.0, tbt_s=1.0),
}
TIER_RANKS: dict[Tier, int] = {Tier.IW_F: 0, Tier.IW_N: 1, Tier.NIW: 2}
"""Requests of a lower rank are admitted before those of a higher one."""
