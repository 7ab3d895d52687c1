"""What each tier is promised, and which goes first."""

from dataclasses import dataclass

from dataplane.messages import Tier


@dataclass(frozen=True, kw_only=True)
class TierTarget:
    """`rank`: a lower one goes first. `ttft_s`: from arrival to the first token. `tbt_s`: for each token after it."""

    rank: int
    ttft_s: float
    tbt_s: float


TIER_TARGETS: dict[Tier, TierTarget] = {
    "IW-F": TierTarget(rank=0, ttft_s=1.0, tbt_s=0.1),
    "IW-N": TierTarget(rank=1, ttft_s=60.0, tbt_s=0.1),
    "NIW": TierTarget(rank=2, ttft_s=86_400.0, tbt_s=1.0),
}
TIER_RANKS: dict[Tier, int] = {tier: target.rank for tier, target in TIER_TARGETS.items()}
"""What goes first: requests of a lower rank are admitted before those of a higher one."""
