"""The strategies that follow the hourly plan (SageServe 6.4): LT-I at once, LT-U when utilization crosses a threshold,
LT-UA like LT-U, and beyond or below the plan where the forecast proves wrong.
"""

from collections.abc import Mapping
from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep, step_of
from controlplane.policies.scaling.limits import above_maximum, below_minimum
from controlplane.policies.scaling.reserve_led import beyond_reserve


def scale_to_plan(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """LT-I: scale to the plan's count at once, on each GPU type; without a plan keep the present count, within the
    limits.

    A serving instance is removed when its replacement is ready. At the maximum, GPU types are exchanged one instance at
    a time; where minimum and maximum are equal no exchange is possible, and the present instances stay. An endpoint
    that a reserve holds goes beyond the plan while the reserve does not keep up.
    """
    facts, plan = beyond_reserve(facts, moment), facts.planned
    wanted = _within_limits(facts)
    changes = _changes(facts, wanted)
    outs = _outs(facts, changes)
    deltas = {**_ins(facts, changes, outs), **outs}
    steps = [
        step_of(facts, deltas[gpu_type], _plan_reason(facts, gpu_type, wanted[gpu_type]), gpu_type=gpu_type)
        for gpu_type in changes
        if deltas.get(gpu_type)
    ]
    if facts.planned != plan:
        words = f"{facts.in_flight} requests in flight are more than the plan and the reserve begin in time"
        steps = [replace(step, reason=words) for step in steps]
    planned = sum(wanted.values())
    if planned < facts.min:
        words = f"minimum {facts.min}, nothing planned or present"
        steps.append(step_of(facts, facts.min - planned, words))
    return tuple(steps)


def scale_to_plan_on_utilization(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """LT-U: one instance towards the plan while utilization is above one threshold, or below the other."""
    settings = moment.settings
    if steps := below_minimum(facts) or above_maximum(facts):
        return steps
    pressure = facts.pressure
    if pressure is None or moment.is_cooling(facts):
        return ()
    changes = _changes(facts, _within_limits(facts))
    percent = f"utilization {100 * pressure:.0f} %"
    if pressure > settings.out_above and (gpu_type := _most_missing(facts, changes)):
        words = f"{percent} is above {100 * settings.out_above:.0f} %; {_plan_count(facts, gpu_type)}"
        return (step_of(facts, 1, words, gpu_type=gpu_type),)
    if _is_idle(facts, moment) and (gpu_type := _most_spare(changes)):
        words = f"{percent} is below {100 * settings.in_below:.0f} %; {_plan_count(facts, gpu_type)}"
        return (step_of(facts, -1, words, gpu_type=gpu_type),)
    return ()


def scale_beyond_plan(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """LT-UA: as LT-U. In the window's last minutes, once the plan is reached, one instance more where demand is a
    multiple of the forecast, and one less where it is a fraction of the forecast.
    """
    steps = scale_to_plan_on_utilization(facts, moment)
    ratio = _observed_over_forecast(facts)
    if steps or ratio is None or not moment.is_late() or moment.is_cooling(facts):
        return steps
    changes = _changes(facts, _within_limits(facts))
    reached_out, reached_in = not _most_missing(facts, changes), not _most_spare(changes)
    words = f"{ratio:.1f} times the forecast arrives"
    if ratio >= moment.settings.beyond_at and reached_out and not _suffices(facts, facts.observed_tokens_per_s):
        gpu_type = _preferred(facts, [name for name, count in _usual(facts).items() if count])
        return (step_of(facts, 1, f"{words}, beyond the plan", gpu_type=gpu_type),)
    if ratio <= moment.settings.below_at and reached_in and (gpu_type := _dispensable(facts, moment)):
        return (step_of(facts, -1, f"{words}, below the plan", gpu_type=gpu_type),)
    return ()


def _changes(facts: EndpointScaleFacts, wanted: Mapping[str, int]) -> dict[str, int]:
    """Instances missing (above 0) or to spare on each GPU type; stuck instances do not count."""
    return {
        gpu_type: wanted[gpu_type] - facts.present.get(gpu_type, 0) + facts.stuck.get(gpu_type, 0)
        for gpu_type in sorted(wanted)
    }


def _outs(facts: EndpointScaleFacts, changes: Mapping[str, int]) -> dict[str, int]:
    """Starts for each GPU type, up to the maximum."""
    left, outs = max(0, facts.max - facts.total + sum(facts.stuck.values())), {}
    for gpu_type, change in changes.items():
        if change > 0:
            outs[gpu_type] = min(change, left)
            left -= outs[gpu_type]
    return outs


def _ins(facts: EndpointScaleFacts, changes: Mapping[str, int], outs: Mapping[str, int]) -> dict[str, int]:
    """Drains for each GPU type, below zero: starting instances first, then ready ones beyond the plan's count."""
    left = max(0, facts.working + sum(outs.values()) - facts.min)
    spare = max(0, facts.ready - facts.working - sum(changes.values()))
    blocked = any(outs) and not any(outs.values())
    if blocked and facts.ready == facts.working:
        spare = max(spare, 1)
    ins = {}
    for gpu_type, change in changes.items():
        if change < 0:
            unready = min(-change, facts.starting.get(gpu_type, 0), left)
            ready = min(-change - unready, spare, left - unready)
            ins[gpu_type] = -(unready + ready)
            spare, left = spare - ready, left - unready - ready
    return ins


def _usual(facts: EndpointScaleFacts) -> Mapping[str, int]:
    """The counts that the endpoint is to have: the plan's, without a plan those that it was settled at."""
    if facts.planned is not None:
        return facts.planned
    return facts.present if facts.settled is None else facts.settled


def _within_limits(facts: EndpointScaleFacts) -> dict[str, int]:
    """Wanted instances for each GPU type, the most numerous cut or raised to meet the limits.

    With nothing planned or present no GPU type can be named; the caller then asks for any.
    """
    source = _usual(facts)
    wanted = {gpu_type: source.get(gpu_type, 0) for gpu_type in {*source, *facts.present}}
    while sum(wanted.values()) > facts.max:
        wanted[max(wanted, key=lambda gpu_type: (wanted[gpu_type], gpu_type))] -= 1
    missing = facts.min - sum(wanted.values())
    usual = [gpu_type for gpu_type in wanted if source.get(gpu_type, 0) or facts.present.get(gpu_type, 0)]
    if missing > 0 and usual:
        wanted[max(usual, key=lambda gpu_type: (wanted[gpu_type], facts.present.get(gpu_type, 0), gpu_type))] += missing
    return wanted


def _preferred(facts: EndpointScaleFacts, gpu_types: list[str]) -> str | None:
    """The GPU type on which an instance starts soonest: with donated instances of the same model, then of others."""
    if not gpu_types:
        return None
    return min(gpu_types, key=lambda name: (not facts.donated_same.get(name), not facts.donated_other.get(name), name))


def _most_missing(facts: EndpointScaleFacts, changes: Mapping[str, int]) -> str | None:
    return _preferred(facts, [gpu_type for gpu_type, change in changes.items() if change > 0])


def _most_spare(changes: Mapping[str, int]) -> str | None:
    spare = {gpu_type: change for gpu_type, change in changes.items() if change < 0}
    return min(spare, key=lambda gpu_type: (spare[gpu_type], gpu_type)) if spare else None


def _is_idle(facts: EndpointScaleFacts, moment: Moment) -> bool:
    """Whether utilization is low and nothing starts."""
    return (
        facts.utilization is not None and facts.ready == facts.working and facts.utilization < moment.settings.in_below
    )


def _observed_over_forecast(facts: EndpointScaleFacts) -> float | None:
    if facts.observed_tokens_per_s is None or not facts.forecast_tokens_per_s or facts.planned is None:
        return None
    return facts.observed_tokens_per_s / facts.forecast_tokens_per_s


def _suffices(facts: EndpointScaleFacts, tokens_per_s: float | None) -> bool:
    """Whether the serving and starting instances suffice by their profiles. Without profiles: whether one starts."""
    working = {name: count - facts.stuck.get(name, 0) for name, count in facts.present.items()}
    capacity = facts.capacity(working)
    if capacity is None:
        return facts.ready < facts.working
    return capacity >= (tokens_per_s or 0.0)


def _dispensable(facts: EndpointScaleFacts, moment: Moment) -> str | None:
    """A GPU type of which one instance can be removed: nothing starts, and the others stay below the upper threshold
    and, by their profiles, serve the observed demand.
    """
    if facts.utilization is None or facts.ready < facts.working or facts.ready < 2:
        return None
    if facts.utilization * facts.ready / (facts.ready - 1) > moment.settings.out_above:
        return None
    serving = {name: count - facts.stuck.get(name, 0) for name, count in facts.present.items()}
    for gpu_type in sorted(serving, key=lambda name: (-serving[name], name)):
        fewer = replace(facts, present={**serving, gpu_type: serving[gpu_type] - 1}, starting={}, stuck={})
        if serving[gpu_type] and _suffices(fewer, facts.observed_tokens_per_s):
            return gpu_type
    return None


def _plan_count(facts: EndpointScaleFacts, gpu_type: str) -> str:
    return f"plan says {(facts.planned or {}).get(gpu_type, 0)}, {facts.present.get(gpu_type, 0)} present"


def _plan_reason(facts: EndpointScaleFacts, gpu_type: str, wanted: int) -> str:
    if facts.planned is None:
        return f"no plan; limits {facts.min} to {facts.max} need {wanted}, {facts.present.get(gpu_type, 0)} present"
    words = _plan_count(facts, gpu_type)
    if wanted == facts.planned.get(gpu_type, 0):
        return words
    return f"{words}; limits {facts.min} to {facts.max} make it {wanted}"
