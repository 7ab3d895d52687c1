"""What policies are told: frozen records with units in their names. Nobody but the gathering code makes them."""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Tiers of requests (SageServe 2). IW-F: TTFT under 1 s; IW-N: under 60 s; NIW: a deadline, 24 h by default."""

    IW_F = "IW-F"
    IW_N = "IW-N"
    NIW = "NIW"


class InstanceKind(StrEnum):
    """Which requests an instance is for: both kinds, or interactive or deferred ones only (siloed, SageServe 4)."""

    MIXED = "mixed"
    IW = "IW"
    NIW = "NIW"

    def serves(self, tier: Tier) -> bool:
        """Whether requests of the tier may be sent to such an instance."""
        return self == InstanceKind.MIXED or (self == InstanceKind.NIW) == (tier == Tier.NIW)


@dataclass(frozen=True, kw_only=True, order=True)
class Endpoint:
    """A model in a region: what traffic is routed to and what placement decides about."""

    model: str
    region: str


@dataclass(frozen=True, kw_only=True, order=True)
class EndpointGpu:
    """A model in a region on one GPU type."""

    model: str
    region: str
    gpu_type: str


@dataclass(frozen=True, kw_only=True, order=True)
class RegionGpu:
    """A GPU type in a region."""

    region: str
    gpu_type: str


@dataclass(frozen=True, kw_only=True, order=True)
class ModelGpu:
    """A model on a GPU type."""

    model: str
    gpu_type: str


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """One instance as the live view knows it. `age_s`: seconds since its node's last heartbeat.

    `sent_tokens` is what this very process sent there since that heartbeat; the heartbeat does not show it yet.
    """

    instance_id: str
    node_id: str
    endpoint: Endpoint
    gpu_type: str
    accepting: bool
    age_s: float
    kv_used_bytes: int
    kv_capacity_bytes: int
    remaining_tokens: int
    sent_tokens: int = 0
    kv_bytes_per_token: int = 0
    kind: InstanceKind = InstanceKind.MIXED


@dataclass(frozen=True, kw_only=True)
class RoutingFacts:
    """A request to place. `preference`: regions in the order this origin prefers them, its own first."""

    model: str
    tier: Tier
    tokens: int
    preference: tuple[str, ...]
    instances: tuple[InstanceFacts, ...]
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """The NIW queue of one model: requests waiting, and how many of them are old enough to count as interactive."""

    model: str
    waiting: int
    aged: int


@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """All queues and all instances at one moment."""

    queues: tuple[QueueFacts, ...]
    instances: tuple[InstanceFacts, ...]
