"""How many instances each endpoint should have now (SageServe 4 and 6.4). Which slot takes them is `slots`' decision.

Two strategies under one signature: LT-I goes to the plan's count at once; reactive follows effective memory
utilization, one instance at a time. Both hold four rules: below the minimum always scales out; no step leads past the
maximum or below the minimum; unknown utilization never scales in; what serves is let go when its replacement is ready.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint


@dataclass(frozen=True, kw_only=True)
class EndpointScaleFacts:
    """One endpoint now.

    Attributes:
        present: instances wanted now for each GPU type, starting ones included, draining ones not.
        starting: how many of those are not ready yet, for each GPU type.
        utilization: effective memory utilization as a share of 1; None = unknown or stale.
        min: fewest instances over all GPU types. max: most.
        planned: the plan's instances for each GPU type; None = no plan.
        last_scaled_s: when this endpoint was last scaled; None = never.
    """

    endpoint: Endpoint
    present: Mapping[str, int]
    starting: Mapping[str, int]
    utilization: float | None
    min: int
    max: int
    planned: Mapping[str, int] | None = None
    last_scaled_s: float | None = None

    def __post_init__(self) -> None:
        """Check what the arithmetic relies on.

        Raises:
            ValueError: a negative count, min above max, or more starting than present.
        """
        where = f"{self.endpoint.model} in {self.endpoint.region}"
        if not 0 <= self.min <= self.max:
            raise ValueError(f"{where}: need 0 <= min <= max, got min {self.min}, max {self.max}")
        if any(count < 0 for counts in (self.present, self.planned or {}) for count in counts.values()):
            raise ValueError(f"{where}: present and planned must not be negative")
        for gpu_type, count in self.starting.items():
            if not 0 <= count <= self.present.get(gpu_type, 0):
                raise ValueError(f"{where}: starting[{gpu_type}] is {count} of {self.present.get(gpu_type, 0)} present")

    @property
    def total(self) -> int:
        """Instances over all GPU types."""
        return sum(self.present.values())

    @property
    def ready(self) -> int:
        """Instances that can serve now."""
        return self.total - sum(self.starting.values())


@dataclass(frozen=True, kw_only=True)
class ScalingFacts:
    """All endpoints at one moment."""

    endpoints: tuple[EndpointScaleFacts, ...]


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """How to scale. `strategy` is a key of STRATEGIES; utilizations are shares of 1."""

    strategy: str = "lt-i"
    out_above: float = 0.7
    in_below: float = 0.3
    cooldown_s: float = 15.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: an unknown strategy, or thresholds that would swing.
        """
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(sorted(STRATEGIES))}, got {self.strategy!r}")
        if not 0 <= self.in_below < self.out_above <= 1:
            raise ValueError(f"need 0 <= in_below < out_above <= 1, got {self.in_below} and {self.out_above}")
        if self.cooldown_s < 0:
            raise ValueError(f"cooldown_s must not be negative, got {self.cooldown_s}")


@dataclass(frozen=True, kw_only=True)
class ScaleStep:
    """Start (`delta` above 0) or drain (below) instances of an endpoint. `gpu_type` None: whichever suits."""

    endpoint: Endpoint
    gpu_type: str | None
    delta: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """Steps ordered by endpoint and GPU type, and when each endpoint was last scaled: facts of the next call."""

    steps: tuple[ScaleStep, ...]
    last_scaled_s: Mapping[Endpoint, float]


Strategy = Callable[[EndpointScaleFacts, float, ScalingSettings], tuple[ScaleStep, ...]]


def choose_scaling(facts: ScalingFacts, now_s: float, settings: ScalingSettings) -> ScalingDecision:
    """Decide for every endpoint by the configured strategy.

    Args:
        facts: the endpoints; their order does not matter.
        now_s: Unix time.
        settings: see ScalingSettings.
    """
    strategy = STRATEGIES[settings.strategy]
    steps: list[ScaleStep] = []
    last_scaled_s: dict[Endpoint, float] = {}
    for endpoint in sorted(facts.endpoints, key=lambda each: each.endpoint):
        taken = strategy(endpoint, now_s, settings)
        steps += taken
        scaled_s = now_s if taken else endpoint.last_scaled_s
        if scaled_s is not None:
            last_scaled_s[endpoint.endpoint] = scaled_s
    return ScalingDecision(steps=tuple(steps), last_scaled_s=last_scaled_s)


def scale_to_plan(facts: EndpointScaleFacts, now_s: float, settings: ScalingSettings) -> tuple[ScaleStep, ...]:
    """LT-I: go to the plan's count at once, on each GPU type; without a plan keep what is there, within the limits.

    Exchanging GPU types at the maximum goes one instance at a time; where minimum and maximum are the same there is no
    room to exchange, and what is there stays.
    """
    wanted = _within_limits(facts)
    changes = {gpu_type: wanted[gpu_type] - facts.present.get(gpu_type, 0) for gpu_type in sorted(wanted)}
    outs = _outs(facts, changes)
    deltas = {**_ins(facts, changes, outs), **outs}
    steps = [
        ScaleStep(
            endpoint=facts.endpoint,
            gpu_type=gpu_type,
            delta=deltas[gpu_type],
            reason=_plan_words(facts, gpu_type, wanted[gpu_type]),
        )
        for gpu_type in changes
        if deltas.get(gpu_type)
    ]
    planned = sum(wanted.values())
    if planned < facts.min:
        steps.append(_any_type(facts, facts.min - planned, f"minimum {facts.min}, nothing planned or present"))
    return tuple(steps)


def _outs(facts: EndpointScaleFacts, changes: Mapping[str, int]) -> dict[str, int]:
    """Starts for each GPU type, as far as the maximum leaves room."""
    room, outs = max(0, facts.max - facts.total), {}
    for gpu_type, change in changes.items():
        if change > 0:
            outs[gpu_type] = min(change, room)
            room -= outs[gpu_type]
    return outs


def _ins(facts: EndpointScaleFacts, changes: Mapping[str, int], outs: Mapping[str, int]) -> dict[str, int]:
    """Drains for each GPU type, below zero: first what is not ready, then what is ready beyond the plan's count."""
    if facts.utilization is None:
        return {}
    left = max(0, facts.total + sum(outs.values()) - facts.min)
    spare = max(0, facts.ready - facts.total - sum(changes.values()))
    blocked = any(outs) and not any(outs.values())
    if blocked and facts.ready == facts.total:
        spare = max(spare, 1)
    ins = {}
    for gpu_type, change in changes.items():
        if change < 0:
            unready = min(-change, facts.starting.get(gpu_type, 0), left)
            ready = min(-change - unready, spare, left - unready)
            ins[gpu_type] = -(unready + ready)
            spare, left = spare - ready, left - unready - ready
    return ins


def scale_on_utilization(facts: EndpointScaleFacts, now_s: float, settings: ScalingSettings) -> tuple[ScaleStep, ...]:
    """Reactive: out by one above a threshold, in by one below another, nothing while a change is under way."""
    total, utilization = facts.total, facts.utilization
    if total < facts.min:
        return (_any_type(facts, facts.min - total, f"minimum {facts.min}, {total} present"),)
    if utilization is None:
        return ()
    if total > facts.max:
        return (_any_type(facts, facts.max - total, f"maximum {facts.max}, {total} present"),)
    cooling = facts.last_scaled_s is not None and now_s - facts.last_scaled_s < settings.cooldown_s
    if cooling or facts.ready < total:
        return ()
    percent = f"utilization {100 * utilization:.0f} %"
    if utilization > settings.out_above and total < facts.max:
        return (_any_type(facts, 1, f"{percent} is above {100 * settings.out_above:.0f} %"),)
    if utilization < settings.in_below and total > facts.min:
        return (_any_type(facts, -1, f"{percent} is below {100 * settings.in_below:.0f} %"),)
    return ()


STRATEGIES: Mapping[str, Strategy] = {"lt-i": scale_to_plan, "reactive": scale_on_utilization}


def _within_limits(facts: EndpointScaleFacts) -> dict[str, int]:
    """Wanted instances for each GPU type, the most numerous cut or raised to meet the limits.

    With nothing planned or present no GPU type can be named; the caller then asks for any.
    """
    source = facts.present if facts.planned is None else facts.planned
    wanted = {gpu_type: source.get(gpu_type, 0) for gpu_type in {*source, *facts.present}}
    while sum(wanted.values()) > facts.max:
        wanted[max(wanted, key=lambda gpu_type: (wanted[gpu_type], gpu_type))] -= 1
    missing = facts.min - sum(wanted.values())
    usual = [gpu_type for gpu_type in wanted if source.get(gpu_type, 0) or facts.present.get(gpu_type, 0)]
    if missing > 0 and usual:
        wanted[max(usual, key=lambda gpu_type: (wanted[gpu_type], facts.present.get(gpu_type, 0), gpu_type))] += missing
    return wanted


def _plan_words(facts: EndpointScaleFacts, gpu_type: str, wanted: int) -> str:
    if facts.planned is None:
        return f"no plan; limits {facts.min} to {facts.max} need {wanted}, {facts.present.get(gpu_type, 0)} present"
    words = f"plan says {facts.planned.get(gpu_type, 0)}, {facts.present.get(gpu_type, 0)} present"
    if wanted == facts.planned.get(gpu_type, 0):
        return words
    return f"{words}; limits {facts.min} to {facts.max} make it {wanted}"


def _any_type(facts: EndpointScaleFacts, delta: int, reason: str) -> ScaleStep:
    return ScaleStep(endpoint=facts.endpoint, gpu_type=None, delta=delta, reason=reason)
