"""Tiers of requests, the instances that serve them, and the objective of an answer."""

from enum import StrEnum

from msgspec import Struct

OBJECTIVE_TTFT_MAX_S = 86_400.0
OBJECTIVE_TBT_MAX_S = 3600.0


class Tier(StrEnum):
    """Tiers of requests (SageServe 2). IW-F: TTFT under 1 s; IW-N: under 60 s; NIW: a deadline, 24 h by default."""

    IW_F = "IW-F"
    IW_N = "IW-N"
    NIW = "NIW"


IW_F, IW_N, NIW = Tier
"""Names of their own: looking up a member of an enumeration takes longer than most of what is done with it."""


class InstanceKind(StrEnum):
    """Which requests an instance is for: both kinds, or interactive or deferred ones only (siloed, SageServe 4)."""

    MIXED = "mixed"
    IW = "IW"
    NIW = "NIW"

    def serves(self, tier: Tier) -> bool:
        """Whether requests of the tier may be sent to such an instance."""
        return self == _MIXED or (self == _NIW) == (tier == NIW)


_MIXED, _, _NIW = InstanceKind


class Objective(Struct, frozen=True, kw_only=True):
    """Token k of an answer, from 0, is due `ttft_s` + k * `tbt_s` after its request arrived (Aegaeon 4.1)."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        """Check the times.

        Raises:
            ValueError: a time is not over 0, not finite, or beyond its limit; the message names it.
        """
        for name, limit_s in (("ttft_s", OBJECTIVE_TTFT_MAX_S), ("tbt_s", OBJECTIVE_TBT_MAX_S)):
            value = getattr(self, name)
            if not 0 < value <= limit_s:
                raise ValueError(f"{name} must be over 0 and at most {limit_s:g}, not {value}")
