"""The inputs of policies: frozen records with units in their names, made only by the gathering code."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from controlplane.policies.fit import UNKNOWN_MEMORY, WeightsMemory
from dataplane.protocol.layouts import Layout, memory_like
from dataplane.protocol.tiers import InstanceKind, Tier


class Endpoint(Struct, frozen=True, kw_only=True, order=True):
    """A model in a region: the target of traffic, and the subject of placement."""

    model: str
    region: str


class SlotId(Struct, frozen=True, kw_only=True, order=True):
    """A slot of a node. Instances in one slot share its GPUs."""

    node_id: str
    number: int


class RegionGpu(Struct, frozen=True, kw_only=True, order=True):
    """A GPU type in a region."""

    region: str
    gpu_type: str


class PoolKey(Struct, frozen=True, kw_only=True, order=True):
    """A pool: a GPU type in a region, and the GPUs of each worker of its slots, as many as each of its models needs."""

    region: str
    gpu_type: str
    worker_gpus: int = 1

    @property
    def place(self) -> RegionGpu:
        return RegionGpu(region=self.region, gpu_type=self.gpu_type)


class ModelGpu(Struct, frozen=True, kw_only=True, order=True):
    """A model on a GPU type."""

    model: str
    gpu_type: str


class EndpointGpu(Struct, frozen=True, kw_only=True, order=True):
    """A model in a region on one GPU type."""

    model: str
    region: str
    gpu_type: str

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(model=self.model, region=self.region)

    @property
    def place(self) -> RegionGpu:
        return RegionGpu(region=self.region, gpu_type=self.gpu_type)

    @property
    def pair(self) -> ModelGpu:
        return ModelGpu(model=self.model, gpu_type=self.gpu_type)

    def pool(self, gpus: int) -> PoolKey:
        """The pool for an endpoint whose model needs so many GPUs."""
        return PoolKey(region=self.region, gpu_type=self.gpu_type, worker_gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class NodeSlot:
    """A slot of a node: its GPUs, the worker processes that share them, and each worker's memory for weights. A worker
    holds a model; a request runs on any of them. `going`: its GPUs will be regrouped once it is empty. `hosts`: that
    the GPUs are of; a model takes all GPUs of a slot of several, which is neither pooled nor regrouped.
    """

    gpus: int
    number: int = 0
    workers: int = 1
    weights: WeightsMemory = UNKNOWN_MEMORY
    going: bool = False
    hosts: int = 1

    @property
    def worker_gpus(self) -> int:
        return self.gpus // self.workers


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node with its slots.

    Attributes:
        host_bytes: host memory for the models of all its slots; None: the node does not report it.
        age_s: seconds since its last heartbeat.
        accepting: False while it is drained or shuts down.
        regroups: whether plans may group its GPUs into other slots.
        layout: the slots that are wanted of it; None: those that it has.
        layout_age_s: for how long these have been wanted.
    """

    name: str
    region: str
    gpu_type: str
    slots: tuple[NodeSlot, ...]
    host_bytes: int | None = None
    age_s: float = 0.0
    accepting: bool = True
    regroups: bool = False
    layout: Layout | None = None
    layout_age_s: float = math.inf

    @property
    def place(self) -> RegionGpu:
        return RegionGpu(region=self.region, gpu_type=self.gpu_type)

    @property
    def gpus(self) -> int:
        return sum(slot.gpus for slot in self.slots)

    @property
    def wanted_layout(self) -> Layout:
        """The sizes of its workers, as they are or are to be."""
        if self.layout is not None:
            return self.layout
        return tuple(slot.worker_gpus for slot in self.slots for _ in range(slot.workers))

    @property
    def possible_slots(self) -> tuple[NodeSlot, ...]:
        """Its slots, and one of each other size that plans may group its GPUs into."""
        slot = max(self.slots, key=lambda each: each.gpus, default=None)
        if slot is None or not self.regroups:
            return self.slots
        present = {each.worker_gpus for each in self.slots}
        sizes = (1 << power for power in range(self.gpus.bit_length()))
        return (*self.slots, *(_slot_like(slot, size) for size in sizes if size not in present))

    def gpus_for(self, worker_gpus: int) -> int:
        """GPUs that its slots with workers of so many GPUs have, or would have if plans made as many as possible."""
        now = sum(slot.gpus for slot in self.slots if slot.worker_gpus == worker_gpus)
        possible = any(slot.worker_gpus == worker_gpus for slot in self.possible_slots)
        return max(now, self.gpus - self.gpus % worker_gpus if self.regroups and possible else 0)


def _slot_like(slot: NodeSlot, gpus: int) -> NodeSlot:
    """A slot of so many of the same GPUs."""
    weights_bytes = slot.weights.weights_bytes
    if weights_bytes is not None:
        weights_bytes = memory_like(gpus, of_bytes=weights_bytes, of_gpus=slot.gpus)
    return NodeSlot(gpus=gpus, weights=WeightsMemory(weights_bytes=weights_bytes, dtype=slot.weights.dtype))


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The deferred requests that wait for a model: about so many input tokens, the first due at the Unix time `due_s`.
    `at_least`: the count stopped at its limit in some batch, so there may be more.
    """

    tokens: float
    due_s: float
    at_least: bool = False


class InstanceFacts(Struct, frozen=True, kw_only=True):
    """One instance in the live view. `age_s`: seconds since its node's last heartbeat.

    `sent_tokens`: what was sent to it since that heartbeat, as far as this process knows, `sent_input_tokens`: the
    prompts of these, less what it likely had cached; `sent_requests`: how many they are. `requests`: those that ran or
    waited at that heartbeat, `waiting`: those of them without KV. `prefill_wait_s`: seconds until its slot would begin
    a request that arrives now, at `prefill_token_s` a token; `prefill_urgent_wait_s`: the same for IW-F; None: its node
    has not measured them. `slot`: of its node; instances of several models in one slot are multiplexed. `load`: of the
    node's busiest slot; above 1 it cannot keep up with its decodes. `batch_max`: sequences that run at once;
    `input_tokens_per_s`: of the prompts that it received in the last minute; None: its node does not report it.
    `prefill_s`, `decode_s`: of the steps of `reference_steps`, as observed there; None: not known. `pooled`: it shares
    its slot, in a pool or a reserve. `context_tokens`: of prompt and answer together, the most that it takes; None: its
    node does not report it.

    A dispatcher tells its own requests apart: `deferred_requests` of them are in flight there, and take
    `deferred_tokens` of KV memory in the end; `requests` and `kv_used_bytes` are then those of others.
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
    sent_input_tokens: int = 0
    requests: int = 0
    waiting: int = 0
    sent_requests: int = 0
    kv_bytes_per_token: int = 0
    kind: InstanceKind = InstanceKind.MIXED
    prefill_wait_s: float | None = None
    prefill_urgent_wait_s: float | None = None
    prefill_token_s: float | None = None
    slot: int = 0
    load: float = 0.0
    batch_max: int | None = None
    input_tokens_per_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    pooled: bool = False
    context_tokens: int | None = None
    deferred_requests: int = 0
    deferred_tokens: float = 0.0


class RoutingFacts(Struct, frozen=True, kw_only=True):
    """A request to route. `preference`: regions in the order in which its origin prefers them, its own first.
    `only_region`: the one that a deferred request was released to. `excluded`: instances that failed it; `avoided`:
    instances and nodes that keep failing, chosen only if there are no others. `ttft_s`: when its first token is due;
    instances that would begin later are chosen last.

    `input_tokens`: of its prompt; `output_tokens_max`: of its answer, as it asks for; 0: what there is room for.
    `cached_tokens`: how many of the first of the prompt's each instance has likely cached, by instance. `home_key`: the
    same for all requests of a conversation, and from it all processes compute the same home instance; empty: it has
    none. `draw`: a random number, where other processes send to the same instances; None: there are none.
    """

    model: str
    tier: Tier
    preference: tuple[str, ...]
    instances: tuple[InstanceFacts, ...]
    only_region: str | None = None
    excluded: frozenset[str] = frozenset()
    avoided: frozenset[str] = frozenset()
    ttft_s: float | None = None
    input_tokens: int = 0
    output_tokens_max: int = 0
    cached_tokens: Mapping[str, int] = {}
    home_key: bytes = b""
    draw: int | None = None

    @property
    def tokens(self) -> int:
        """Of prompt and answer together, as it asks for."""
        return self.input_tokens + self.output_tokens_max


class GroupFacts(Struct, frozen=True, kw_only=True):
    """A batch-model group: the waiting requests of one model in one batch. They share its tenant, its age and its
    deadline, `left_s` from now. `waiting`: counted up to a limit; `left`: all requests without a result. `tokens`: of
    prompt and completion together, the mean of the group's completed requests; None: none has completed.
    `input_tokens`: of a prompt, the mean of the group's estimates; None: not known.
    """

    batch: int
    tenant: str
    model: str
    age_s: float
    left_s: float
    waiting: int
    left: int
    tokens: float | None = None
    input_tokens: float | None = None


class Window(Struct, frozen=True, kw_only=True):
    """The most deferred requests in flight at an endpoint, of all dispatchers together. `stepped_s`: when it was last
    looked at; `cut_s`: when it was last cut. `utilization`: of the endpoint by all other requests, at the last step.
    `begun_s`: when requests last began beside interactive ones.
    """

    requests: float = 0.0
    stepped_s: float = 0.0
    cut_s: float = -3600.0
    utilization: float = 1.0
    begun_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """What waits and all instances at one moment. `last_tenants`: the tenant released last, by model. `in_flight`:
    deferred requests at each endpoint, of all dispatchers. `interactive`: endpoints that were asked for interactive
    answers in the last minute or two. `count_max`: how many requests the caller can send now; None: any number.
    """

    groups: tuple[GroupFacts, ...]
    instances: tuple[InstanceFacts, ...]
    last_tenants: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[Endpoint, Window] = field(default_factory=dict)
    in_flight: Mapping[Endpoint, int] = field(default_factory=dict)
    interactive: frozenset[Endpoint] = frozenset()
    count_max: int | None = None
