"""Reactive scaling on effective memory utilization (SageServe 4): one pool of instances for all requests, or siloed."""

from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, KindFacts, Moment, ScaleStep, step_of
from dataplane.protocol.tiers import InstanceKind


def scale_on_utilization(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """Reactive, unified: out by one above a threshold, in by one below another. Starting instances count as if they
    served, so a second one is started only if the first does not suffice; none is removed while one starts, nor the
    last while requests arrive, which would start it again.
    """
    return _scale(facts, moment, InstanceKind.MIXED)


def scale_silos(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """Siloed: the same rule for interactive and for deferred requests, each with instances and limits of its own.

    Mixed instances count as interactive; scaling changes their kind. An endpoint that may have only one instance is not
    divided.
    """
    if facts.max < 2:
        return _scale(facts, moment, InstanceKind.MIXED)
    deferred_max = min(facts.max - 1, max(1, round(moment.settings.silo_niw_share * facts.max)))
    silos = {InstanceKind.IW: facts.max - deferred_max, InstanceKind.NIW: deferred_max}
    steps: list[ScaleStep] = []
    for kind, most in silos.items():
        steps += _scale(_silo(facts, kind, most), moment, kind)
    return tuple(steps)


def _silo(facts: EndpointScaleFacts, kind: InstanceKind, most: int) -> EndpointScaleFacts:
    """The endpoint's facts with only the instances and requests of this kind."""
    part = facts.of_kind(kind)
    interactive = kind == InstanceKind.IW
    if interactive and (mixed := facts.of_kind(InstanceKind.MIXED)).present:
        part = _joined(part, mixed)
    waiting = facts.backlog_tokens if facts.backlog_tokens else None
    return replace(
        facts,
        present=part.present,
        starting=part.starting,
        stuck=part.stuck,
        utilization=part.utilization,
        min=min(facts.min, most),
        max=most,
        kinds={},
        observed_tokens_per_s=facts.observed_tokens_per_s if interactive else waiting,
    )


def _joined(one: KindFacts, other: KindFacts) -> KindFacts:
    """Two kinds as one, with the higher utilization."""

    def added(name: str) -> dict[str, int]:
        counts, more = getattr(one, name), getattr(other, name)
        return {gpu_type: counts.get(gpu_type, 0) + more.get(gpu_type, 0) for gpu_type in {*counts, *more}}

    known = [part.utilization for part in (one, other) if part.utilization is not None]
    return KindFacts(
        present=added("present"),
        starting=added("starting"),
        stuck=added("stuck"),
        utilization=max(known, default=None),
    )


def _scale(facts: EndpointScaleFacts, moment: Moment, kind: InstanceKind) -> tuple[ScaleStep, ...]:
    settings, pressure, working = moment.settings, facts.pressure, facts.working
    silo = "" if kind == InstanceKind.MIXED else f" of {kind.value}"
    if working < facts.min:
        words = f"minimum {facts.min}{silo}, {working} present"
        return (step_of(facts, facts.min - working, words, kind=kind),)
    if facts.total > facts.max:
        words = f"maximum {facts.max}{silo}, {facts.total} present"
        return (step_of(facts, facts.max - facts.total, words, kind=kind),)
    if pressure is None or moment.is_cooling(facts):
        return ()
    percent = f"utilization{silo} {100 * pressure:.0f} %"
    if pressure > settings.out_above and working < facts.max:
        return (step_of(facts, 1, f"{percent} is above {100 * settings.out_above:.0f} %", kind=kind),)
    fewest = max(facts.min, 1 if facts.observed_tokens_per_s else 0)
    if pressure < settings.in_below and facts.ready == working > fewest:
        return (step_of(facts, -1, f"{percent} is below {100 * settings.in_below:.0f} %", kind=kind),)
    return ()
