"""Chiron (reference [34] of SageServe, its strongest baseline): scaling by backpressure and offline profiles.

There are three kinds of instances: interactive, mixed and batch. The *interactive backpressure* is the share of
interactive and mixed instances that interactive requests keep busy, by the profile and not by measured utilization; it
is held at `theta`, so that the others can take bursts and, meanwhile, deferred requests. The *batch backpressure* is
the share of the deferred queue that would miss its deadline on the capacity left; batch instances are added until it is
zero, and removed when the queue is empty. This follows SageServe's account (7.1, 7.2.3) and Chiron's abstract; how
mixed and interactive instances are divided, and one cooldown for both, are ours, since neither source gives them.
"""

import math

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep, step_of
from dataplane.protocol.tiers import InstanceKind

_DUE_S_MIN = 60.0
"""Deadlines that are nearer, or past, count as this far away: no number of instances helps at once."""


def scale_on_backpressure(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """Scale each kind to the count that its backpressure requires; batch instances never reduce the other kinds."""
    per_instance = _tokens_per_s(facts)
    if facts.observed_tokens_per_s is None or per_instance is None or moment.is_cooling(facts):
        return _to_minimum(facts)
    settings = moment.settings
    busy = math.ceil(facts.observed_tokens_per_s / per_instance)
    front = min(facts.max, max(facts.min, math.ceil(busy / settings.chiron_theta)))
    mixed = math.floor(front * settings.chiron_mixed_share)
    batch = min(facts.max - front, _batch_instances(facts, moment, per_instance, spare=mixed))
    pressure = f"{busy} of {front} interactive instances busy, theta {settings.chiron_theta:g}"
    waiting = f"{facts.backlog_tokens:.0f} deferred tokens wait"
    wanted = (
        (InstanceKind.IW, front - mixed, pressure),
        (InstanceKind.MIXED, mixed, pressure),
        (InstanceKind.NIW, batch, waiting),
    )
    return tuple(
        step_of(facts, count - _working(facts, kind), words, kind=kind)
        for kind, count, words in wanted
        if count != _working(facts, kind)
    )


def _tokens_per_s(facts: EndpointScaleFacts) -> float | None:
    """Tokens/s of one instance by its profile: the mean of the GPU types present, else the slowest profiled type."""
    present = {name: count for name, count in facts.present.items() if count and name in facts.tokens_per_s}
    if present:
        return sum(facts.tokens_per_s[name] * count for name, count in present.items()) / sum(present.values())
    return min(facts.tokens_per_s.values(), default=None)


def _batch_instances(facts: EndpointScaleFacts, moment: Moment, per_instance: float, *, spare: int) -> int:
    """Batch instances that the deferred queue needs to meet its deadline, besides `spare` mixed ones."""
    if not facts.backlog_tokens:
        return 0
    left_s = max(_DUE_S_MIN, (facts.backlog_due_s or 0.0) - moment.now_s)
    needed = facts.backlog_tokens / (left_s * per_instance)
    return max(0, math.ceil(needed - spare))


def _working(facts: EndpointScaleFacts, kind: InstanceKind) -> int:
    part = facts.of_kind(kind)
    return sum(part.present.values()) - sum(part.stuck.values())


def _to_minimum(facts: EndpointScaleFacts) -> tuple[ScaleStep, ...]:
    missing = facts.min - facts.working
    words = f"minimum {facts.min}, {facts.working} present"
    return (step_of(facts, missing, words),) if missing > 0 else ()
