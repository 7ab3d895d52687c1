"""What the choice of places is told and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts, ModelGpu
from controlplane.policies.fit import UNKNOWN_ROOM, ModelSize, WeightsRoom
from controlplane.policies.scaling.facts import KindStep, ScaleStep
from dataplane.protocol.tiers import InstanceKind


@dataclass(frozen=True, kw_only=True)
class SlotRoom:
    """One slot of a node. `gpus_free` are not held by any instance, draining and spot ones included.

    Attributes:
        workers: worker processes that share its GPUs; an instance takes no more than those of one.
        age_s: seconds since its node's last heartbeat.
        accepting: False for a node that is being drained.
        pooled: it is in the pool, or shall be; nothing but pooled instances starts there or is lent out there.
        weights: what each of its workers has for weights.
    """

    node_id: str
    slot: int
    region: str
    gpu_type: str
    gpus: int
    gpus_free: int
    age_s: float
    accepting: bool = True
    pooled: bool = False
    workers: int = 1
    weights: WeightsRoom = UNKNOWN_ROOM

    @property
    def worker_gpus(self) -> int:
        """The most GPUs that an instance may take here."""
        return self.gpus // self.workers

    @property
    def place(self) -> tuple[str, int]:
        """What tells it from all others: its node and its index there."""
        return (self.node_id, self.slot)


@dataclass(frozen=True, kw_only=True)
class SpotFacts:
    """That an instance is lent out: for how long, whether somebody leases it, and whether that lease has notice."""

    age_s: float
    leased: bool = False
    noticed: bool = False


@dataclass(frozen=True, kw_only=True)
class PlacedInstance:
    """An instance on a slot.

    Attributes:
        gpus: GPUs of its own. `pooled`: it has none and shares its slot.
        stuck: it should be ready and is not.
        remaining_tokens: of its requests, as last reported.
        spot: None: it is not lent out.
        leaving: why it must leave its node; None: the node stays.
        succeeds: the instance on another node that it was started to succeed.
        report: its last report; None: there is none.
    """

    instance_id: str
    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    gpus: int = 1
    draining: bool = False
    ready: bool = True
    stuck: bool = False
    remaining_tokens: int = 0
    kind: InstanceKind = InstanceKind.MIXED
    spot: SpotFacts | None = None
    leaving: str | None = None
    succeeds: str | None = None
    pooled: bool = False
    report: InstanceFacts | None = None

    @property
    def serving(self) -> bool:
        """Whether it is wanted for our own requests."""
        return not self.draining and self.spot is None

    @property
    def place(self) -> tuple[str, int]:
        return (self.node_id, self.slot)

    @property
    def key(self) -> EndpointGpu:
        return EndpointGpu(model=self.endpoint.model, region=self.endpoint.region, gpu_type=self.gpu_type)


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """Steps to carry out, the fleet's slots and what is on them. `gpus`: GPUs of one instance, for each profile;
    `sizes`: of models' weights, as far as they matter.
    """

    steps: tuple[ScaleStep, ...]
    slots: tuple[SlotRoom, ...]
    instances: tuple[PlacedInstance, ...]
    gpus: Mapping[ModelGpu, int]
    kinds: tuple[KindStep, ...] = ()
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """How to place.

    Attributes:
        stale_s: a node silent for longer gets nothing new.
        spot_enabled: whether what is let go is lent out instead of stopped.
        spot_max_age_s: a spot instance that nobody leases is stopped after so long; None = never.
    """

    stale_s: float = 5.0
    spot_enabled: bool = True
    spot_max_age_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlotAdd:
    """Start an instance here, in the place of the spot instances `replaces`, which are stopped. `succeeds`: see
    ScaleStep.
    """

    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    gpus: int
    reason: str
    kind: InstanceKind = InstanceKind.MIXED
    replaces: tuple[str, ...] = ()
    succeeds: str | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceChange:
    """Something else is wanted of this instance. `kind`: what it shall be for when it serves. `succeeds`: see
    ScaleStep.
    """

    instance_id: str
    reason: str
    kind: InstanceKind = InstanceKind.MIXED
    succeeds: str | None = None


@dataclass(frozen=True, kw_only=True)
class Unplaced:
    """Instances of a step that found no slot."""

    endpoint: Endpoint
    gpu_type: str | None
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlotDecision:
    """Where the steps go, in the order in which starts are tried.

    Attributes:
        revives: draining instances taken back.
        reclaims: spot instances of the same model taken back.
        redeploys: starts in the place of spot instances of other models.
        adds: starts on free GPUs.
        notices: leases to be ended with notice, so that a later call can take their instances.
        drains: instances to be stopped once they are empty.
        donates: instances to be lent out once they are empty.
        stops: spot instances that are stopped.
        changed_kinds: instances that serve on as another kind.
        unplaced: what could not be placed, and why. What waits for a lease to end is not among it.
    """

    revives: tuple[InstanceChange, ...] = ()
    reclaims: tuple[InstanceChange, ...] = ()
    redeploys: tuple[SlotAdd, ...] = ()
    adds: tuple[SlotAdd, ...] = ()
    notices: tuple[InstanceChange, ...] = ()
    drains: tuple[InstanceChange, ...] = ()
    donates: tuple[InstanceChange, ...] = ()
    stops: tuple[InstanceChange, ...] = ()
    changed_kinds: tuple[InstanceChange, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
