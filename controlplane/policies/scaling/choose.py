"""Run the configured scaling strategy, then clamp its proposal to the limits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from controlplane.policies.facts import Endpoint
from controlplane.policies.scaling.chiron import scale_on_backpressure
from controlplane.policies.scaling.demand_led import scale_within_plan
from controlplane.policies.scaling.facts import (
    Counts,
    EndpointScaleFacts,
    KindStep,
    Moment,
    ScaleStep,
    ScalingDecision,
    ScalingFacts,
    ScalingSettings,
    Strategy,
    StrategyName,
)
from controlplane.policies.scaling.limits import keep_limits
from controlplane.policies.scaling.plan_led import (
    scale_beyond_plan,
    scale_to_plan,
    scale_to_plan_on_utilization,
)
from controlplane.policies.scaling.reactive import scale_on_utilization, scale_silos
from dataplane.protocol.tiers import InstanceKind

STRATEGIES: Mapping[str, Strategy] = {
    StrategyName.LT_I: scale_to_plan,
    StrategyName.LT_U: scale_to_plan_on_utilization,
    StrategyName.LT_UA: scale_beyond_plan,
    StrategyName.LT_D: scale_within_plan,
    StrategyName.REACTIVE: scale_on_utilization,
    StrategyName.SILOED: scale_silos,
    StrategyName.CHIRON: scale_on_backpressure,
}

_I = InstanceKind
_MEANT: Mapping[str, Mapping[InstanceKind, InstanceKind]] = {
    StrategyName.SILOED: {_I.MIXED: _I.IW, _I.IW: _I.IW, _I.NIW: _I.NIW},
    StrategyName.CHIRON: {kind: kind for kind in _I},
}


def choose_scaling(facts: ScalingFacts, now_s: float, settings: ScalingSettings) -> ScalingDecision:
    """Decide for every endpoint by the configured strategy.

    Args:
        facts: the endpoints; their order does not matter.
        now_s: Unix time.
        settings: see ScalingSettings.
    """
    strategy = STRATEGIES[settings.strategy]
    moment = Moment(now_s=now_s, window_start_s=facts.window_start_s, settings=settings)
    steps: list[ScaleStep] = []
    kinds: list[KindStep] = []
    settled: dict[Endpoint, Counts | None] = {}
    for endpoint in sorted(facts.endpoints, key=lambda each: each.endpoint):
        proposed, changed = _exchanged(strategy(endpoint, moment))
        taken = keep_limits(endpoint, proposed, moment)
        kinds += changed
        steps += sorted(taken, key=lambda step: (step.kind, step.gpu_type or ""))
        settled[endpoint.endpoint] = _settled(endpoint, taken)
    return ScalingDecision(steps=tuple(steps), settled=settled, kinds=tuple(kinds))


def _settled(facts: EndpointScaleFacts, steps: Sequence[ScaleStep]) -> Counts | None:
    """The endpoint's counts after the steps; None where the steps leave the GPU type open. While an instance is stuck,
    the counts that it was settled at before.
    """
    if any(facts.stuck.values()):
        return facts.present if facts.settled is None else facts.settled
    if any(step.gpu_type is None for step in steps):
        return None
    counts = Counter(facts.present)
    for step in steps:
        counts[step.gpu_type or ""] += step.delta
    return +counts


def _exchanged(steps: tuple[ScaleStep, ...]) -> tuple[tuple[ScaleStep, ...], list[KindStep]]:
    """Replace steps that start one kind and remove another, on any GPU type, by changes of kind."""
    left = {step.kind: step for step in steps if step.gpu_type is None}
    changes: list[KindStep] = []
    for kind, gone in list(left.items()):
        for other, wanted in list(left.items()):
            count = min(-left[kind].delta, left[other].delta)
            if count > 0:
                changes.append(KindStep(endpoint=gone.endpoint, before=kind, after=other, count=count))
                left[kind] = replace(left[kind], delta=left[kind].delta + count)
                left[other] = replace(wanted, delta=left[other].delta - count)
    rest = tuple(step for step in steps if step.gpu_type is not None)
    return rest + tuple(step for step in left.values() if step.delta), changes


def kind_for(strategy: str, kind: InstanceKind, *, instances_max: int) -> InstanceKind:
    """The kind that an instance of `kind` has after a change to this strategy: mixed where instances are shared; Siloed
    has no mixed instances, except where an endpoint can have only one instance.
    """
    if strategy == StrategyName.SILOED and instances_max < 2:
        return InstanceKind.MIXED
    return _MEANT.get(strategy, {}).get(kind, InstanceKind.MIXED)
