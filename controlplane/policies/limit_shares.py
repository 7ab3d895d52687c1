"""Shares of a tenant's limit, where each region counts in a Redis of its own.

A region asks again and again, says how much its callers ask for, and is told the share that it may use. What regions
may use together never exceeds the limit, whatever is lost or late, because every share is counted at the most that its
region may still use (`held`):

- A larger share is counted from the moment it is granted, whether or not the answer arrives, and is granted only from
  what nobody holds. So a share grows after another one shrank, never at the same time.
- A smaller share is counted as before until the region says, by the version of the grant, that it applied it
  `REST_S` ago. Within that minute an emptied bucket would have filled anyway, so the part that moves is a full bucket
  rightly; for requests at once, the region says those that still run, if they are more.
- A share is a lease. A region that nobody hears keeps its share until the lease ends, by its own clock, counted from
  before it asked and `REST_S` shorter than by the database's: a clock that is wrong, or slow by less than `REST_S`
  within a lease, changes nothing. From then on it uses its floor only, which is lent to nobody else until the region
  has not been heard for `FLOOR_LEASE_S`. Requests that it admitted before its lease ended run to their end.

A region that asks for nothing keeps its floor, so one that begins to ask has a share at once. Where a limit is smaller
than the number of regions that ask, they take turns of `TURN_S`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

REST_S = 65.0
"""A bucket is full again after a minute; the rest is for gateways that read a region's share every second."""
FLOOR_LEASE_S = 86_400.0
TURN_S = 300.0
_FLOOR = 0.2
"""The part of a limit that is divided evenly, whoever asks for how much."""
_DEADBAND = 0.05
"""A share that is wrong by less than this part of the limit stays: every move leaves something unused for a minute."""
_SMOOTHING = 0.2
_DEMAND_MIN = 0.01


@dataclass(frozen=True, kw_only=True)
class LimitShare:
    """The share of a region. `granted`, `floor`: what it may use now, and after its lease ended at `ends_s`; `held`,
    `held_floor`: the most that it may still believe to have. `demand`: what its callers lately asked for a minute.
    """

    region: str
    granted: int = 0
    floor: int = 0
    held: int = 0
    held_floor: int = 0
    demand: float = 0.0
    ends_s: float = 0.0
    version: int = 0

    def counted(self, now_s: float) -> int:
        """The most that the region may use now."""
        if now_s < self.ends_s:
            return self.held
        return self.held_floor if now_s < self.ends_s + FLOOR_LEASE_S else 0


@dataclass(frozen=True, kw_only=True)
class ShareReport:
    """What a region says when it asks. `version`: of the grant that it applies; None: it knows none. `applied`: the
    most that it used since `REST_S` ago, or that still runs. `demand`: what its
    callers asked for since the last time, for a minute.
    """

    version: int | None
    applied: int
    demand: float


def choose_limit_share(
    limit: int, shares: Sequence[LimitShare], region: str, report: ShareReport, *, now_s: float, lease_s: float
) -> LimitShare:
    """The share of the region that asks; those of the others stay until they ask. `shares`: of all regions that have
    one; `now_s`: by the one clock of all grants.
    """
    own = next((share for share in shares if share.region == region), LimitShare(region=region))
    others = [share for share in shares if share.region != region and now_s < share.ends_s + FLOOR_LEASE_S]
    held, held_floor = own.counted(now_s), min(own.held_floor, own.counted(now_s))
    if report.version == own.version and now_s < own.ends_s:
        held, held_floor = min(held, max(own.granted, report.applied)), min(held_floor, own.floor)
    free = max(0, limit - sum(share.counted(now_s) for share in others))
    demands = {share.region: share.demand if now_s < share.ends_s else 0.0 for share in others}
    demands[region] = smoothed(own.demand, report.demand)
    targets = divide_limit(limit, demands, now_s=now_s)
    target = targets[region]
    floor = _floor(limit, len(demands))
    near = abs(target - own.granted) <= _DEADBAND * limit and own.granted >= floor and limit > len(demands)
    content = near and now_s < own.ends_s and all(share.granted >= max(1, floor) for share in others)
    granted = min(own.granted if content else target, free)
    floor = min(floor, granted)
    return replace(
        own,
        granted=granted,
        floor=floor,
        held=max(granted, held),
        held_floor=max(floor, held_floor),
        demand=demands[region],
        ends_s=now_s + lease_s,
        version=own.version + 1,
    )


def divide_limit(limit: int, demands: Mapping[str, float], *, now_s: float) -> dict[str, int]:
    """The whole limit divided: a floor for each region, the rest by demand; evenly where nobody asks for anything."""
    regions = sorted(demands)
    if limit < len(regions):
        return _take_turns(limit, demands, now_s=now_s)
    floor = max(1, _floor(limit, len(regions)))
    rest = limit - floor * len(regions)
    whole = sum(demands.values())
    parts = {name: rest * (demands[name] / whole if whole > 0 else 1 / len(regions)) for name in regions}
    shares = {name: floor + math.floor(part) for name, part in parts.items()}
    by_remainder = sorted(regions, key=lambda name: (math.floor(parts[name]) - parts[name], name))
    for name in by_remainder[: max(0, limit - sum(shares.values()))]:
        shares[name] += 1
    return shares


def _take_turns(limit: int, demands: Mapping[str, float], *, now_s: float) -> dict[str, int]:
    asking = sorted(name for name, demand in demands.items() if demand > 0) or sorted(demands)
    first = int(now_s // TURN_S) % len(asking)
    served = (asking[first:] + asking[:first])[:limit]
    return {name: int(name in served) for name in demands}


def _floor(limit: int, regions: int) -> int:
    return int(_FLOOR * limit / regions)


@dataclass(frozen=True, kw_only=True)
class AppliedShare:
    """A share as its region applies it, by the region's own clock. `peak`: the most that it used before its share
    became smaller at `since_s`. `demand`: as `LimitShare` had it.
    """

    version: int
    granted: int
    floor: int
    ends_s: float
    peak: int
    since_s: float
    demand: float = 0.0

    def is_settled(self, now_s: float) -> bool:
        """Whether its region has nothing to say: its callers ask for nothing, and what it gave up was released."""
        return self.demand == 0 and now_s >= self.since_s + 2 * REST_S

    def usable(self, now_s: float) -> int:
        """What the region may use now."""
        if now_s < self.ends_s:
            return self.granted
        return self.floor if now_s < self.ends_s + FLOOR_LEASE_S else 0

    def applied(self, now_s: float) -> int:
        """The most that it used since `REST_S` ago."""
        return self.granted if now_s >= self.since_s + REST_S else max(self.granted, self.peak)


def apply_share(
    before: AppliedShare | None, share: LimitShare, *, asked_s: float, now_s: float, lease_s: float
) -> AppliedShare:
    """The share that a region applies from now on, having asked for it at `asked_s`."""
    lowered = before is None or share.granted < before.granted
    return AppliedShare(
        version=share.version,
        granted=share.granted,
        floor=share.floor,
        ends_s=asked_s + lease_s - REST_S,
        peak=share.held if before is None else before.applied(now_s),
        since_s=now_s if before is None or lowered else before.since_s,
        demand=share.demand,
    )


def smoothed(before: float, now: float) -> float:
    """Demand as shares go by: a gust of a few seconds moves little, and one that ended is forgotten within minutes."""
    demand = before + _SMOOTHING * (now - before)
    return demand if demand >= _DEMAND_MIN else 0.0
