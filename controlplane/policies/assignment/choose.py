"""Assign instances to slots (part of SageServe 6.4).

A start takes, in this order: a draining instance of the same model (it still has its requests); a donated instance of
the same model (it still has its weights) without a lease, or whose lease has notice; the GPUs of donated instances of
other models without leases; free GPUs; and last, with notice, a leased instance of the same model, then the GPUs of
leased instances of others. New instances spread over nodes, so that a lost node takes few instances of an endpoint with
it. No GPU is assigned twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from controlplane.policies.assignment.facts import (
    InstanceChange,
    PlacedInstance,
    SlotAdd,
    SlotDecision,
    SlotFacts,
    SlotSettings,
    Unplaced,
)
from controlplane.policies.assignment.filling import Filling
from controlplane.policies.facts import Endpoint
from controlplane.policies.scaling.facts import Counts, KindStep, ScaleStep


def choose_slots(facts: SlotFacts, now_s: float, settings: SlotSettings) -> SlotDecision:
    """Assign each step to slots. Endpoints share scarce GPUs round robin, one instance at a time.

    Args:
        facts: steps, slots, instances. Their order does not matter.
        now_s: Unix time; ages are in the facts, so it changes nothing.
        settings: see SlotSettings.
    """
    filling = Filling(facts, settings)
    changed_kinds = [change for step in facts.kinds for change in _change_kind(filling, step)]
    starts = _Starts()
    for step in _one_by_one(facts.steps):
        starts.place(step, filling)
    drains: list[InstanceChange] = []
    donates: list[InstanceChange] = []
    for step in _ordered(facts.steps):
        for instance in filling.let_go(step):
            change = InstanceChange(instance_id=instance.instance_id, reason=step.reason, kind=instance.kind)
            (donates if filling.may_be_donated(instance) else drains).append(change)
    stops, notices = _end_donations(filling, settings)
    return SlotDecision(
        revives=tuple(starts.revives),
        reclaims=tuple(starts.reclaims),
        redeploys=tuple(starts.redeploys),
        adds=tuple(starts.adds),
        notices=(*starts.notices, *notices),
        drains=tuple(drains),
        donates=tuple(donates),
        stops=tuple(stops),
        changed_kinds=tuple(changed_kinds),
        unplaced=tuple(
            Unplaced(endpoint=step.endpoint, gpu_type=step.gpu_type, count=count, reason=filling.why_not(step))
            for step, count in starts.missing.items()
        ),
        stays=tuple(starts.stays),
    )


def moved_endpoints(steps: Iterable[ScaleStep], decision: SlotDecision) -> tuple[Endpoint, ...]:
    """Endpoints that were scaled, ordered. An endpoint none of whose instances found a slot or moved was not: it keeps
    the time at which it was last scaled, so that the replacement of a stuck instance is retried on another node in the
    end.
    """
    asked: Counter[Endpoint] = Counter()
    for step in steps:
        asked[step.endpoint] += abs(step.delta)
    for each in decision.unplaced:
        asked[each.endpoint] -= each.count
    asked.subtract(decision.stays)
    return tuple(sorted(endpoint for endpoint, moved in asked.items() if moved > 0))


def settled_endpoints(
    settled: Mapping[Endpoint, Counts | None], unplaced: Iterable[Unplaced]
) -> dict[Endpoint, Counts | None]:
    """The counts that endpoints are settled at, without the instances that found no slot."""
    missing: dict[Endpoint, Counter[str]] = {}
    for each in unplaced:
        missing.setdefault(each.endpoint, Counter())[each.gpu_type or ""] += each.count
    return {
        endpoint: counts if counts is None else Counter(counts) - missing.get(endpoint, Counter())
        for endpoint, counts in settled.items()
    }


class _Starts:
    """The starts that were assigned so far."""

    def __init__(self) -> None:
        self.revives: list[InstanceChange] = []
        self.reclaims: list[InstanceChange] = []
        self.redeploys: list[SlotAdd] = []
        self.adds: list[SlotAdd] = []
        self.notices: list[InstanceChange] = []
        self.missing: dict[ScaleStep, int] = {}
        self.stays: list[Endpoint] = []

    def place(self, step: ScaleStep, filling: Filling) -> None:
        """Assign one instance. What finds nothing on its GPU type is tried on others, if these will do; the successor
        of an instance that can stay is not, and no lease ends for it.
        """
        if revived := filling.take_draining(step):
            self.revives.append(_change(revived, step))
        elif reclaimed := filling.take_donated(step):
            self.reclaims.append(_change(reclaimed, step))
        elif filling.await_donated(step, noticed=True):
            return
        elif redeployed := filling.replace_donated(step):
            self.redeploys.append(redeployed)
        elif added := filling.add(step):
            self.adds.append(added)
        elif filling.can_stay(step):
            self.stays.append(step.endpoint)
        elif mine := filling.await_donated(step, noticed=False):
            self.notices.append(_change(mine, step))
        elif (leased := filling.wait_for_leases(step)) is not None:
            self.notices += [_change(each, step) for each in leased if each.leased and not each.noticed]
        elif step.other_types:
            self.place(replace(step, gpu_type=None, other_types=False), filling)
        else:
            self.missing[step] = self.missing.get(step, 0) + 1


def _change(instance: PlacedInstance, step: ScaleStep) -> InstanceChange:
    return InstanceChange(instance_id=instance.instance_id, reason=step.reason, kind=step.kind, succeeds=step.succeeds)


def _change_kind(filling: Filling, step: KindStep) -> list[InstanceChange]:
    words = f"{step.before.value} instances are to spare, {step.after.value} ones are missing"
    return [
        InstanceChange(instance_id=instance.instance_id, reason=words, kind=step.after)
        for instance in filling.change_kind(step)
    ]


def _end_donations(filling: Filling, settings: SlotSettings) -> tuple[list[InstanceChange], list[InstanceChange]]:
    """Donated instances that are donated no longer: those to stop, and those whose leases get notice first."""
    stops, notices = [], []
    for instance in filling.donated_left():
        assert instance.donation is not None, "these are the donated ones"
        reason = filling.why_not_donated(instance)
        too_old = settings.donation_max_age_s is not None and instance.donation.age_s > settings.donation_max_age_s
        if reason is None and too_old and not instance.leased:
            reason = f"it has no lease and was donated {instance.donation.age_s:.0f} s ago"
        if reason is None:
            continue
        change = InstanceChange(instance_id=instance.instance_id, reason=reason, kind=instance.kind)
        if not instance.leased:
            stops.append(change)
        elif not instance.noticed:
            notices.append(change)
    return stops, notices


def _ordered(steps: tuple[ScaleStep, ...]) -> list[ScaleStep]:
    return sorted(steps, key=lambda step: (step.endpoint, step.kind, step.gpu_type or "", step.delta))


def _one_by_one(steps: tuple[ScaleStep, ...]) -> Iterator[ScaleStep]:
    for number in range(max((step.delta for step in steps), default=0)):
        for step in _ordered(steps):
            if number < step.delta:
                yield step
