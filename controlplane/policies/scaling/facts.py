"""The facts and decisions of scaling. Counts are of instances, by GPU type where they are mappings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.policies.facts import Endpoint
from dataplane.protocol.tiers import InstanceKind

Counts = Mapping[str, int]


class StrategyName(StrEnum):
    """The strategies of SageServe 6.4 (LT-*), its baselines (4 and 7.1), Chiron, which it compares itself with, and
    LT-D, which is ours.
    """

    LT_I = "lt-i"
    LT_U = "lt-u"
    LT_UA = "lt-ua"
    LT_D = "lt-d"
    REACTIVE = "reactive"
    SILOED = "siloed"
    CHIRON = "chiron"


@dataclass(frozen=True, kw_only=True)
class KindFacts:
    """The instances of one kind.

    Attributes:
        present: instances wanted now, ready or not; draining and donated instances are not counted.
        starting: instances of those that are starting.
        stuck: instances of those that should be ready and are not: they failed, or take too long.
        utilization: effective memory utilization of the ready ones, as a share of 1; None = unknown or stale.
    """

    present: Counts = field(default_factory=dict)
    starting: Counts = field(default_factory=dict)
    stuck: Counts = field(default_factory=dict)
    utilization: float | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointScaleFacts:
    """The facts of one endpoint now.

    Attributes:
        present, starting, stuck, utilization: as in KindFacts, over all kinds.
        min: fewest instances over all GPU types. max: most.
        planned: the plan's instances for each GPU type; None = no plan.
        last_scaled_s: when this endpoint was last scaled; None = never.
        settled: instances that it was to have when none was stuck last; None = not known. Without a plan it keeps
            these: replacements of stuck instances are present too, and would be taken for wanted.
        kinds: the same instances by kind; empty = all are mixed.
        tokens_per_s: input tokens/s of one instance at its SLO, by GPU type (theta of SageServe 5).
        observed_tokens_per_s: interactive input tokens that arrive now; None = unknown.
        forecast_tokens_per_s: what was forecast for this moment; None = no forecast.
        backlog_tokens: input tokens of deferred requests that wait for this endpoint.
        backlog_due_s: Unix time by which the most urgent of them is due; None = none waits.
        donated_same, donated_other: donated instances that could be reclaimed, of this model and of others.
        reserve: GPU type of the reserve that holds the endpoint: its instances there count for `min`, which is what is
            left of it. None = no reserve does. Only then the following are known:
        in_reserve: its instances that are ready there.
        reclaimable: its instances on that GPU type that come back in a minute: lent out without a lease, or draining.
        in_flight: its requests on instances of its own and in the reserve. waiting: those of them without KV memory.
            batch_max: how many one instance runs at once; None = not reported.
        wait_s: until one of these instances would begin an IW-F request that arrives now, infinite if all run as many
            as they can; None = not reported.
    """

    endpoint: Endpoint
    present: Counts
    starting: Counts
    utilization: float | None
    min: int
    max: int
    stuck: Counts = field(default_factory=dict)
    planned: Counts | None = None
    last_scaled_s: float | None = None
    settled: Counts | None = None
    kinds: Mapping[InstanceKind, KindFacts] = field(default_factory=dict)
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    observed_tokens_per_s: float | None = None
    forecast_tokens_per_s: float | None = None
    backlog_tokens: float = 0.0
    backlog_due_s: float | None = None
    donated_same: Counts = field(default_factory=dict)
    donated_other: Counts = field(default_factory=dict)
    reserve: str | None = None
    in_reserve: int = 0
    reclaimable: int = 0
    in_flight: int = 0
    waiting: int = 0
    batch_max: int | None = None
    wait_s: float | None = None

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: a negative count, min above max, or more starting and stuck than present.
        """
        where = f"{self.endpoint.model} in {self.endpoint.region}"
        if not 0 <= self.min <= self.max:
            raise ValueError(f"{where}: need 0 <= min <= max, got min {self.min}, max {self.max}")
        counted = (self.present, self.starting, self.stuck, self.planned or {})
        if any(count < 0 for counts in counted for count in counts.values()):
            raise ValueError(f"{where}: present, starting, stuck and planned must not be negative")
        for gpu_type in {*self.starting, *self.stuck}:
            unready, present = self.unready(gpu_type), self.present.get(gpu_type, 0)
            if unready > present:
                raise ValueError(f"{where}: starting and stuck[{gpu_type}] are {unready} of {present} present")

    def unready(self, gpu_type: str) -> int:
        """Instances of a GPU type that do not serve yet."""
        return self.starting.get(gpu_type, 0) + self.stuck.get(gpu_type, 0)

    @property
    def total(self) -> int:
        """Instances over all GPU types."""
        return sum(self.present.values())

    @property
    def working(self) -> int:
        """Instances that serve or soon will: all but the stuck ones."""
        return self.total - sum(self.stuck.values())

    @property
    def ready(self) -> int:
        """Instances that can serve now."""
        return self.working - sum(self.starting.values())

    @property
    def pressure(self) -> float | None:
        """Utilization once the starting instances serve, so that they are not started twice. Without any instance it
        is 1 while requests arrive.
        """
        if not self.working:
            return 1.0 if self.observed_tokens_per_s else None
        return None if self.utilization is None else self.utilization * self.ready / self.working

    def of_kind(self, kind: InstanceKind) -> KindFacts:
        """The instances of one kind."""
        if self.kinds:
            return self.kinds.get(kind, KindFacts())
        if kind != InstanceKind.MIXED:
            return KindFacts()
        return KindFacts(present=self.present, starting=self.starting, stuck=self.stuck, utilization=self.utilization)

    def capacity(self, counts: Counts) -> float | None:
        """Tokens/s that these instances serve at their SLO; None where a profile is missing."""
        if any(gpu_type not in self.tokens_per_s for gpu_type, count in counts.items() if count):
            return None
        return sum(count * self.tokens_per_s.get(gpu_type, 0.0) for gpu_type, count in counts.items())


@dataclass(frozen=True, kw_only=True)
class ScalingFacts:
    """All endpoints at one moment. `window_start_s`: when the hour of the plan in force began; None = no plan."""

    endpoints: tuple[EndpointScaleFacts, ...]
    window_start_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """How to scale. Utilizations and Chiron's theta are shares of 1.

    Attributes:
        strategy: one of StrategyName.
        out_above, in_below: utilizations between which the utilization-led strategies change nothing.
        cooldown_s: an endpoint is not scaled again for so long, except to its minimum or by LT-I.
        retry_s: an endpoint whose replacement instance is stuck too gets another one so long after it was scaled.
        window_s, last_s: LT-UA may leave the plan in the last `last_s` seconds of a window of `window_s`.
        beyond_at, below_at: observed over forecast tokens/s from which LT-UA goes beyond the plan, and below it.
        late_s: an endpoint of a reserve leaves its plan when all its instances, the reserve's too, would begin a
            request later than this. hold_s: and returns to it so long after it was scaled last.
        room_out, room_in: multiples of the observed demand up to which LT-D scales out, and above which it scales in.
        silo_niw_share: share of an endpoint's maximum that Siloed keeps for deferred requests (paper: 4 of 20).
        chiron_theta: share of the interactive instances that may be busy (paper: 0.6).
        chiron_mixed_share: share of Chiron's interactive instances that also take deferred requests (paper: 5 of 15).
    """

    strategy: str = StrategyName.LT_I
    out_above: float = 0.7
    in_below: float = 0.3
    cooldown_s: float = 15.0
    retry_s: float = 600.0
    window_s: float = 3600.0
    last_s: float = 1200.0
    beyond_at: float = 5.0
    below_at: float = 0.5
    late_s: float = 1.0
    hold_s: float = 120.0
    room_out: float = 1.1
    room_in: float = 1.4
    silo_niw_share: float = 0.2
    chiron_theta: float = 0.6
    chiron_mixed_share: float = 1 / 3

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: an unknown strategy, or thresholds that would swing.
        """
        if self.strategy not in set(StrategyName):
            raise ValueError(f"strategy must be one of {', '.join(sorted(StrategyName))}, got {self.strategy!r}")
        if not 0 <= self.in_below < self.out_above <= 1:
            raise ValueError(f"need 0 <= in_below < out_above <= 1, got {self.in_below} and {self.out_above}")
        if self.cooldown_s < 0:
            raise ValueError(f"cooldown_s must not be negative, got {self.cooldown_s}")
        if not 0 < self.last_s <= self.window_s:
            raise ValueError(f"need 0 < last_s <= window_s, got {self.last_s} and {self.window_s}")
        if not 0 <= self.below_at < 1 < self.beyond_at:
            raise ValueError(f"need 0 <= below_at < 1 < beyond_at, got {self.below_at} and {self.beyond_at}")
        if not 1 <= self.room_out < self.room_in:
            raise ValueError(f"need 1 <= room_out < room_in, got {self.room_out} and {self.room_in}")
        for name in ("silo_niw_share", "chiron_theta", "chiron_mixed_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ScaleStep:
    """Start (`delta` above 0) or remove (below) instances of an endpoint. `gpu_type` None: any profiled one.
    `succeeds`: the instance on an evacuated node that the started one replaces. `other_types`: any profiled GPU type
    will do where this one has no slot.
    """

    endpoint: Endpoint
    gpu_type: str | None
    delta: int
    reason: str
    kind: InstanceKind = InstanceKind.MIXED
    succeeds: str | None = None
    other_types: bool = False


@dataclass(frozen=True, kw_only=True)
class KindStep:
    """Change the kind of `count` instances of an endpoint, which go on serving."""

    endpoint: Endpoint
    before: InstanceKind
    after: InstanceKind
    count: int


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """Steps ordered by endpoint, kind and GPU type. `settled`: a fact of the next call. `kinds`: changes of kind, to
    be applied before the steps.
    """

    steps: tuple[ScaleStep, ...]
    settled: Mapping[Endpoint, Counts | None]
    kinds: tuple[KindStep, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The facts of a strategy that are the same for all endpoints."""

    now_s: float
    window_start_s: float | None
    settings: ScalingSettings

    def is_cooling(self, facts: EndpointScaleFacts) -> bool:
        """Whether the endpoint was scaled less than the cooldown ago."""
        return facts.last_scaled_s is not None and self.now_s - facts.last_scaled_s < self.settings.cooldown_s

    def may_retry(self, facts: EndpointScaleFacts) -> bool:
        """Whether the last scaling is so long ago that a stuck instance may be retried elsewhere."""
        return facts.last_scaled_s is None or self.now_s - facts.last_scaled_s >= self.settings.retry_s

    def is_late(self) -> bool:
        """Whether this is in the last minutes of the plan's window."""
        if self.window_start_s is None:
            return False
        elapsed_s = self.now_s - self.window_start_s
        return self.settings.window_s - self.settings.last_s <= elapsed_s < self.settings.window_s


Strategy = Callable[[EndpointScaleFacts, Moment], tuple[ScaleStep, ...]]


def step_of(
    facts: EndpointScaleFacts,
    delta: int,
    reason: str,
    *,
    gpu_type: str | None = None,
    kind: InstanceKind = InstanceKind.MIXED,
) -> ScaleStep:
    """A step of this endpoint."""
    return ScaleStep(endpoint=facts.endpoint, gpu_type=gpu_type, delta=delta, reason=reason, kind=kind)
