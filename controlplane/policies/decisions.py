"""What policies answer: frozen records. Applying them is somebody else's work."""

from dataclasses import dataclass

from msgspec import Struct

from controlplane.policies.facts import Endpoint, SlotId


class Route(Struct, frozen=True, kw_only=True):
    """Where a request goes. `utilization` is the chosen endpoint's, as a share of 1."""

    instance_id: str
    node_id: str
    region: str
    utilization: float


@dataclass(frozen=True, kw_only=True)
class NoRoute:
    """Why a request cannot be placed now."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Let a request in."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Let it wait for room."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Why a request is refused, and after how many seconds another try makes sense."""

    reason: str
    retry_after_s: int


class Release(Struct, frozen=True, kw_only=True):
    """Let `count` NIW requests of a batch of this tenant go to an endpoint. `slot`: whose room they take; None: they
    take what there is.
    """

    endpoint: Endpoint
    batch: int
    tenant: str
    count: int
    slot: SlotId | None = None
