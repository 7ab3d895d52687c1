"""When batches will end, and why: said long before a deadline is missed.

The lines of a model finish at the speed that was measured of all batches together. Within a tenant the batch with the
nearest deadline is released first, and tenants in rotation. So when `lines` of a tenant have been released, each other
tenant has had as many, or all that it has:

    tenant   waits                  before the last of its lines
    a        100, then 50           100 + 50 of b + 50 of c; 150 + 50 of b + 80 of c
    b        50                     50 of each
    c        80                     80 of a, 50 of b, its own 80

Urgent requests precede others; how soon they become urgent is not predicted.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec import Struct

_FAR_S = 366 * 86_400.0
"""Where lines have all but stopped finishing, no later end than in a year is predicted."""


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """A speed follows what is measured with the time constant `follow_s`. It is forgotten when nothing has waited for
    `keep_s`. Measurements over less than `least_s` do not count.
    """

    follow_s: float = 120.0
    keep_s: float = 3600.0
    least_s: float = 1.0


class SpeedSample(Struct, frozen=True, kw_only=True):
    """What was known of a model at the Unix time `at_s`: `finished`: its completed lines since ever; `busy`: whether
    lines were left; `per_s`: lines completed a second, None: not known; `measured_s`: when that was last measured.
    """

    finished: int
    at_s: float
    busy: bool
    per_s: float | None = None
    measured_s: float | None = None


def choose_speed(
    before: SpeedSample | None, *, finished: int, busy: bool, now_s: float, settings: SpeedSettings
) -> SpeedSample:
    """The sample after `before`. Time without lines to run measures nothing, nor does the time before a first line has
    completed.
    """
    if before is None:
        return SpeedSample(finished=finished, at_s=now_s, busy=busy)
    passed_s = now_s - before.at_s
    if passed_s < settings.least_s:
        return before
    per_s, measured_s = before.per_s, before.measured_s
    if not before.busy and measured_s is not None and now_s - measured_s > settings.keep_s:
        per_s = measured_s = None
    completed = max(0, finished - before.finished)
    if before.busy and (completed or per_s is not None):
        latest_per_s, measured_s = completed / passed_s, now_s
        share = 1.0 if per_s is None else 1 - math.exp(-passed_s / settings.follow_s)
        per_s = latest_per_s if per_s is None else per_s + share * (latest_per_s - per_s)
    return SpeedSample(finished=finished, at_s=now_s, busy=busy, per_s=per_s, measured_s=measured_s)


class GroupProgress(Struct, frozen=True, kw_only=True):
    """The lines of one model in one batch that have no result yet, `left` of them, due in `due_s` seconds."""

    batch: int
    tenant: str
    model: str
    left: int
    due_s: float


class ModelSpeed(Struct, frozen=True, kw_only=True):
    """How fast a model's lines finish. `per_s`: as measured; `most_per_s`: what its instances would make without any
    interactive request; None: not known. `taking`: instances that take batch requests; `starting`: those that will.
    """

    per_s: float | None = None
    most_per_s: float | None = None
    taking: int = 0
    starting: int = 0


class BatchEnd(Struct, frozen=True, kw_only=True):
    """A prediction: the batch ends in `in_s` seconds, None: not known. `at_risk`: by what is known now, it does not
    end within its window.
    """

    in_s: float | None
    at_risk: bool
    reason: str


def predict_ends(groups: Iterable[GroupProgress], speeds: Mapping[str, ModelSpeed]) -> dict[int, BatchEnd]:
    """The predicted end of every batch, by its number: that of the model whose lines end last."""
    by_model: defaultdict[str, list[GroupProgress]] = defaultdict(list)
    for group in groups:
        by_model[group.model].append(group)
    ends: dict[int, BatchEnd] = {}
    for model, waiting in by_model.items():
        speed = speeds.get(model, ModelSpeed())
        for group, lines in _in_order(waiting):
            end = _end(group, lines, speed)
            ends[group.batch] = max(ends.get(group.batch, end), end, key=_lateness)
    return ends


def _lateness(end: BatchEnd) -> tuple[bool, float]:
    return end.at_risk, math.inf if end.in_s is None else end.in_s


def _in_order(groups: Sequence[GroupProgress]) -> Iterable[tuple[GroupProgress, int]]:
    """Each group of a model, with the lines that have finished when its last one does."""
    by_tenant: defaultdict[str, list[GroupProgress]] = defaultdict(list)
    for group in sorted(groups, key=lambda group: (group.due_s, group.batch)):
        by_tenant[group.tenant].append(group)
    totals = sorted(sum(group.left for group in mine) for mine in by_tenant.values())
    sums = [0, *accumulate(totals)]
    for mine in by_tenant.values():
        lines = 0
        for group in mine:
            lines += group.left
            smaller = bisect_left(totals, lines)
            yield group, sums[smaller] + lines * (len(totals) - smaller)


def _end(group: GroupProgress, lines: int, speed: ModelSpeed) -> BatchEnd:
    """`lines`: those that have finished when the group's last one does."""
    if not speed.taking:
        if speed.starting:
            return BatchEnd(in_s=None, at_risk=False, reason=f"an instance of '{group.model}' is starting")
        return BatchEnd(in_s=None, at_risk=True, reason=f"no instance of '{group.model}' takes batch requests")
    per_s = speed.per_s or speed.most_per_s
    if per_s is None:
        reason = f"no line of '{group.model}' has finished recently, and what its instances make is not known"
        return BatchEnd(in_s=None, at_risk=False, reason=reason)
    needs_s, others = min(lines / per_s, _FAR_S), lines - group.left
    behind = f" and wait behind {others} of other batches" if others else ""
    rate = (
        f"{per_s:.3g} finish a second"
        if speed.per_s
        else f"none has finished recently, and its instances make at most {per_s:.3g} a second"
    )
    reason = f"{group.left} lines of '{group.model}' are left{behind}; {rate}"
    if needs_s > group.due_s:
        reason += f": that takes {_span(needs_s)}, and the window ends in {_span(max(0.0, group.due_s))}"
    return BatchEnd(in_s=needs_s, at_risk=needs_s > group.due_s, reason=reason)


def _span(seconds: float) -> str:
    for unit, size_s in (("days", 172_800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= size_s:
            per_unit_s = {"days": 86_400.0, "h": 3600.0, "min": 60.0}[unit]
            return f"{seconds / per_unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
