"""The rules that hold for every strategy, whatever it proposes.

- Below the minimum is scaled out at once. No step leads past the maximum or below the minimum.
- Unknown utilization lets nothing go that serves.
- What does not come up (stuck) is replaced, at most one beside it at a time, and let go when what is wanted serves; the
  rest of the endpoint goes on meanwhile.
- What stands in for it is not replaced in turn: the model itself may be broken. Where that fails too, or has no room,
  all stay, their nodes try again, and one is let go for another try once nothing was scaled for `retry_s`.
"""

from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep, step_of
from dataplane.protocol.tiers import InstanceKind


def below_minimum(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """What is missing to the minimum; none if it is met. The GPU type is the plan's or the present one, else any."""
    missing = facts.min - facts.working
    if missing <= 0:
        return ()
    usual = {**facts.present, **(facts.planned or {})}
    gpu_type = max(usual, key=lambda name: (usual[name], name)) if any(usual.values()) else None
    return (step_of(facts, missing, f"minimum {facts.min}, {facts.working} present", gpu_type=gpu_type),)


def above_maximum(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """What is beyond the maximum, of the GPU types that the plan wants least."""
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
    """The steps as far as the rules above allow them."""
    wanted = [step for step in steps if step.delta > 0]
    outs = _outs(facts, wanted)
    if any(facts.stuck.values()) and not outs:
        if not wanted and not any(facts.starting.values()):
            return _without_stuck(facts)
        if wanted and moment.may_retry(facts):
            return tuple(_cut([*_without_stuck(facts)], 1))
    return (*outs, *_ins(facts, [step for step in steps if step.delta < 0]))


def _outs(facts: EndpointScaleFacts, steps: list[ScaleStep]) -> list[ScaleStep]:
    """Starts within the maximum; those that only stand in for stuck instances one at a time."""
    wanted, stuck = sum(step.delta for step in steps), sum(facts.stuck.values())
    room = max(0, facts.max - facts.total)
    if stuck:
        room = min(room, max(0, wanted - stuck + 1))
    return _cut(steps, room)


def _ins(facts: EndpointScaleFacts, steps: list[ScaleStep]) -> list[ScaleStep]:
    """Drains down to the minimum. What is started in the same call is not counted on: it may find no place."""
    return [] if facts.utilization is None else _cut(steps, max(0, facts.working - facts.min))


def _cut(steps: list[ScaleStep], most: int) -> list[ScaleStep]:
    """The first steps, up to `most` instances together."""
    kept = []
    for step in steps:
        count = min(abs(step.delta), most)
        most -= count
        if count:
            kept.append(replace(step, delta=count if step.delta > 0 else -count))
    return kept


def _without_stuck(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    """Let go what does not come up, unless something serves and nobody knows how it fares."""
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
