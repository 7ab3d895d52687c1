"""The facts and decisions of the assignment of instances to slots."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts, ModelGpu, PoolKey
from controlplane.policies.fit import UNKNOWN_MEMORY, ModelSize, WeightsMemory
from controlplane.policies.scaling.facts import KindStep, ScaleStep
from dataplane.protocol.tiers import InstanceKind

SlotRef = tuple[str, int]
"""A slot: its node's name and its number there."""


class SlotRoom(Struct, frozen=True, kw_only=True):
    """One slot of a node.

    Attributes:
        gpus_free: GPUs that no instance holds; draining and donated instances hold theirs.
        workers: worker processes that share its GPUs; an instance takes at most the GPUs of one worker.
        age_s: seconds since its node's last heartbeat.
        accepting: False while its node is drained or shuts down, or its GPUs are to be regrouped.
        pooled: it belongs to a pool, or will; only pooled instances start there, and none is donated there.
        weights: memory for weights of each of its workers.
        regroups: whether plans may regroup its GPUs: it is then for models of as many GPUs as it has, if others have
            slots of their own size.
        hosts: that its GPUs are of, see `NodeSlot`.
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
    weights: WeightsMemory = UNKNOWN_MEMORY
    regroups: bool = False
    hosts: int = 1

    @property
    def worker_gpus(self) -> int:
        """The most GPUs that an instance may take here."""
        return self.gpus // self.workers

    def suits(self, gpus: int) -> bool:
        """Whether an instance may take so many GPUs here, if they are free."""
        return gpus == self.gpus if self.hosts > 1 else gpus <= self.worker_gpus

    @property
    def pool(self) -> PoolKey:
        """The pool that it may be in."""
        return PoolKey(region=self.region, gpu_type=self.gpu_type, worker_gpus=self.worker_gpus)

    @property
    def ref(self) -> SlotRef:
        return (self.node_id, self.slot)


@dataclass(frozen=True, kw_only=True)
class Donation:
    """An idle instance that is lent out for `age_s` seconds now; whether it is leased, and its lease has notice."""

    age_s: float
    leased: bool = False
    noticed: bool = False


class PlacedInstance(Struct, frozen=True, kw_only=True):
    """An instance on a slot.

    Attributes:
        gpus: GPUs of its own; 0 for a pooled instance, which shares its slot.
        stuck: it should be ready and is not.
        remaining_tokens: tokens left of its requests, as last reported.
        donation: None: it is not lent out.
        leaving: why it must leave its slot; None: the slot stays.
        overdue: its slot waits for it to leave for so long that it has to, unless a successor is being started.
        succeeds: the instance on another node that it was started to replace.
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
    donation: Donation | None = None
    leaving: str | None = None
    overdue: bool = False
    succeeds: str | None = None
    pooled: bool = False
    report: InstanceFacts | None = None

    @property
    def serving(self) -> bool:
        """Whether it is wanted for our own requests."""
        return not self.draining and self.donation is None

    @property
    def leased(self) -> bool:
        return self.donation is not None and self.donation.leased

    @property
    def noticed(self) -> bool:
        """Whether its lease has notice."""
        return self.donation is not None and self.donation.noticed

    @property
    def ref(self) -> SlotRef:
        return (self.node_id, self.slot)

    @property
    def key(self) -> EndpointGpu:
        return EndpointGpu(model=self.endpoint.model, region=self.endpoint.region, gpu_type=self.gpu_type)


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """Steps to carry out, the fleet's slots and the instances on them. `gpus`: GPUs of one instance, for each profile;
    `sizes`: sizes of models' weights; a missing model fits on every slot.
    """

    steps: tuple[ScaleStep, ...]
    slots: tuple[SlotRoom, ...]
    instances: tuple[PlacedInstance, ...]
    gpus: Mapping[ModelGpu, int]
    kinds: tuple[KindStep, ...] = ()
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """How to assign instances to slots.

    Attributes:
        stale_s: no instance starts on a node that is silent for longer.
        donation_enabled: whether instances that are not needed are donated instead of stopped.
        donation_max_age_s: a donated instance without a lease is stopped after so long; None = never.
    """

    stale_s: float = 5.0
    donation_enabled: bool = True
    donation_max_age_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlotAdd:
    """An instance to start on this slot. `replaces`: donated instances to stop for it. `succeeds`: see ScaleStep."""

    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    gpus: int
    kind: InstanceKind = InstanceKind.MIXED
    replaces: tuple[str, ...] = ()
    succeeds: str | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceChange:
    """A change of what is wanted of an instance. `kind`: the requests that it serves from then on. `succeeds`: see
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
    """The slots of the steps, in the order in which starts are tried.

    Attributes:
        revives: draining instances that serve again.
        reclaims: donated instances of the same model that serve again.
        redeploys: starts on GPUs of donated instances of other models.
        adds: starts on free GPUs.
        notices: leases to be ended with notice, so that a later call can reclaim their instances.
        drains: instances to be stopped once they are empty.
        donates: instances to be donated once they are empty.
        stops: donated instances that are stopped.
        changed_kinds: serving instances that become another kind.
        unplaced: starts without a slot, and why. Starts that wait for a lease to end are not among them.
        stays: the endpoint of each start that is left out, because the instance that it was to succeed can stay.
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
    stays: tuple[Endpoint, ...] = ()
