"""The limits of every strategy's proposal.

- An endpoint below its minimum is scaled out at once. No step leads past the maximum or below the minimum.
- While utilization is unknown, no serving instance is removed; nor is the last one while others, which stay, start.
- Stuck instances are replaced, by at most one more instance at a time, and removed when all that is wanted serves; the
  other instances of the endpoint are scaled meanwhile.
- A replacement is not replaced in turn: the model itself may be broken. Where it is stuck too, or finds no slot, all
  stay, their nodes retry, and one is removed for another try once nothing was scaled for `retry_s`.
"""

from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep, step_of
from dataplane.protocol.tiers import InstanceKind


def below_minimum(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """A step up to the minimum; none if it is met. The GPU type is the plan's or the present one, else any."""
    missing = facts.min - facts.working
    if missing <= 0:
        return ()
    usual = {**facts.present, **(facts.planned or {})}
    gpu_type = max(usual, key=lambda name: (usual[name], name)) if any(usual.values()) else None
    return (step_of(facts, missing, f"minimum {facts.min}, {facts.working} present", gpu_type=gpu_type),)


def above_maximum(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """Steps down to the maximum, on the GPU types that the plan wants least."""
    excess = facts.total - facts.max
    planned = facts.planned or {}
    steps = []
    for gpu_type in sorted(facts.present, key=lambda name: (planned.get(name, 0), name)):
        count = min(excess, facts.present[gpu_type])
        if count > 0:
            steps.append(step_of(facts, -count, f"maximum {facts.max}, {facts.total} present", gpu_type=gpu_type))
            excess -= count
    return tuple(steps)


def keep_limits(facts: EndpointScaleFacts, steps: tuple[ScaleStep, ...], moment: Moment) -> tuple[ScaleStep, ...]:
    """The steps as far as the limits allow them."""
    wanted = [step for step in steps if step.delta > 0]
    outs = _outs(facts, wanted)
    if any(facts.stuck.values()) and not outs:
        if not wanted and not any(facts.starting.values()):
            return _without_stuck(facts)
        if wanted and moment.may_retry(facts):
            return tuple(_cut([*_without_stuck(facts)], 1))
    return (*outs, *_ins(facts, [step for step in steps if step.delta < 0]))


def _outs(facts: EndpointScaleFacts, steps: list[ScaleStep]) -> list[ScaleStep]:
    """Starts within the maximum; replacements of stuck instances one at a time."""
    wanted, stuck = sum(step.delta for step in steps), sum(facts.stuck.values())
    most = max(0, facts.max - facts.total)
    if stuck:
        most = min(most, max(0, wanted - stuck + 1))
    return _cut(steps, most)


def _ins(facts: EndpointScaleFacts, steps: list[ScaleStep]) -> list[ScaleStep]:
    """Drains down to the minimum, so that somebody serves while those that stay start. Instances started in the same
    call do not count: they may find no slot.
    """
    if facts.utilization is None:
        return []
    drains = _cut(steps, max(0, facts.working - facts.min))
    serving = [max(0, -step.delta - _unready(facts, step)) for step in drains]
    if not facts.ready or sum(serving) < facts.ready or facts.working + sum(step.delta for step in drains) <= 0:
        return drains
    last = max(number for number, count in enumerate(serving) if count)
    drains[last] = replace(drains[last], delta=drains[last].delta + 1)
    return [step for step in drains if step.delta]


def _unready(facts: EndpointScaleFacts, step: ScaleStep) -> int:
    """Instances that a drain takes before any that serves."""
    part = facts.of_kind(step.kind)
    return sum(
        count
        for counts in (part.starting, part.stuck)
        for gpu_type, count in counts.items()
        if step.gpu_type in {None, gpu_type}
    )


def _cut(steps: list[ScaleStep], most: int) -> list[ScaleStep]:
    """The first steps, up to `most` instances in total."""
    kept = []
    for step in steps:
        count = min(abs(step.delta), most)
        most -= count
        if count:
            kept.append(replace(step, delta=count if step.delta > 0 else -count))
    return kept


def _without_stuck(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """Remove stuck instances, unless some instance serves and its utilization is unknown."""
    if facts.utilization is None and facts.ready:
        return ()
    counts = [
        (kind, gpu_type, count)
        for kind in InstanceKind
        for gpu_type, count in sorted(facts.of_kind(kind).stuck.items())
        if count
    ]
    return tuple(
        step_of(facts, -count, f"{count} do not come up", gpu_type=gpu_type, kind=kind)
        for kind, gpu_type, count in counts
    )
