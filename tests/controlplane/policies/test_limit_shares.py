"""Shares of a limit per region: never more than the limit together, whatever is lost, late or away."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from controlplane.policies.limit_shares import (
    REST_S,
    AppliedShare,
    LimitShare,
    ShareReport,
    apply_share,
    choose_limit_share,
    divide_limit,
)
from controlplane.policies.limits import MINUTE_S, Bucket

LEASE_S = 600.0


@dataclass
class Region:
    """A region with its own clock and its own count."""

    name: str
    clock_s: float = 0.0
    share: AppliedShare | None = None
    bucket: Bucket | None = None
    demand: float = 0.0
    away_until_s: float = 0.0
    late: list[tuple[float, float, LimitShare]] = field(default_factory=list)

    def usable(self, now_s: float) -> int:
        return 0 if self.share is None else self.share.usable(now_s + self.clock_s)

    def admit(self, amount: int, now_s: float) -> int:
        """As many of the requests as the region's count admits."""
        limit = self.usable(now_s)
        kept = self.bucket or Bucket(level=float(limit), at_s=now_s)
        left = kept.refilled(limit, now_s)
        admitted = min(amount, int(left.level))
        self.bucket = left.add(-admitted, limit)
        return admitted

    def report(self, now_s: float) -> ShareReport:
        if self.share is None:
            return ShareReport(version=None, applied=0, demand=self.demand)
        applied = self.share.applied(now_s + self.clock_s)
        return ShareReport(version=self.share.version, applied=applied, demand=self.demand)

    def hear(self, share: LimitShare, asked_s: float, now_s: float) -> None:
        if self.share is None or self.share.version < share.version:
            at_s = now_s + self.clock_s
            asked_s += self.clock_s
            self.share = apply_share(self.share, share, asked_s=asked_s, now_s=at_s, lease_s=LEASE_S)


@dataclass
class Walk:
    """Regions that ask for shares of one limit over messages that are lost or late."""

    limit: int
    chance: random.Random
    regions: list[Region]
    kept: dict[str, LimitShare] = field(default_factory=dict)
    now_s: float = 0.0
    debt: float = 0.0

    def ask(self, region: Region, *, lost: bool = False, late_s: float = 0.0) -> None:
        chosen = choose_limit_share(
            self.limit,
            list(self.kept.values()),
            region.name,
            region.report(self.now_s),
            now_s=self.now_s,
            lease_s=LEASE_S,
        )
        self.kept[region.name] = chosen
        if not lost:
            region.late.append((self.now_s + late_s, self.now_s, chosen))

    def step(self, seconds: float) -> None:
        """Let time pass, then let every region admit what it is asked for; no more than one bucket would have."""
        self.now_s += seconds
        self.debt = max(0.0, self.debt - self.limit * seconds / MINUTE_S)
        for region in self.regions:
            for due in [one for one in region.late if one[0] <= self.now_s]:
                region.late.remove(due)
                region.hear(due[2], due[1], self.now_s)
        assert sum(region.usable(self.now_s) for region in self.regions) <= self.limit
        for region in self.regions:
            self.debt += region.admit(self.chance.choice((0, 1, int(region.demand / 6), self.limit)), self.now_s)
        assert self.debt <= self.limit + 1e-6, "regions admitted more than one bucket of the limit would have"


@hypothesis(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 500), count=st.integers(1, 5))
def test_regions_never_admit_more_than_the_limit(seed: int, limit: int, count: int) -> None:
    chance = random.Random(seed)
    regions = [Region(f"r{n}", clock_s=chance.uniform(-5, 5)) for n in range(count)]
    walk = Walk(limit, chance, regions)
    for _ in range(400):
        for region in regions:
            if chance.random() < 0.02:
                region.demand = chance.choice((0.0, 10.0, 1000.0))
            if chance.random() < 0.005:
                region.away_until_s = walk.now_s + chance.choice((30.0, 400.0, 900.0, 20_000.0, 100_000.0))
            if chance.random() < 0.005:
                region.share = None  # its Redis lost its memory
            if walk.now_s >= region.away_until_s and chance.random() < 0.7:
                walk.ask(region, lost=chance.random() < 0.2, late_s=chance.choice((0.0, 0.0, 3.0, 90.0)))
        walk.step(chance.choice((1.0, 5.0, 5.0, 5.0, 20.0, 61.0, 700.0 if chance.random() < 0.1 else 5.0)))


def _settle(walk: Walk, asking: list[Region], seconds: float) -> None:
    end_s = walk.now_s + seconds
    while walk.now_s < end_s:
        for region in asking:
            walk.ask(region)
        walk.step(5.0)


@pytest.mark.parametrize(("limit", "count"), [(100, 2), (100, 5), (60_000, 3), (7, 5), (100, 20)])
def test_a_region_that_begins_to_ask_has_its_floor_within_two_rests(limit: int, count: int) -> None:
    regions = [Region(f"r{n}", demand=1000.0 if n == 0 else 0.0) for n in range(count)]
    walk = Walk(limit, random.Random(1), regions)
    _settle(walk, regions[:1], 60)
    assert regions[0].usable(walk.now_s) == limit, "a region alone has all of it"
    _settle(walk, regions, 2 * REST_S + 30)
    for region in regions:
        assert region.usable(walk.now_s) >= max(1, int(0.2 * limit / count))
    regions[-1].demand = 100_000.0
    _settle(walk, regions, 2 * REST_S + 30)
    assert regions[-1].usable(walk.now_s) >= int(0.7 * (limit - count))


def test_a_limit_smaller_than_the_regions_goes_round() -> None:
    regions = [Region(f"r{n}", demand=10.0) for n in range(3)]
    walk, served = Walk(1, random.Random(1), regions), set()
    for _ in range(40):
        _settle(walk, regions, 60)
        served |= {region.name for region in regions if region.usable(walk.now_s)}
    assert served == {"r0", "r1", "r2"}


def test_the_share_of_a_lost_region_goes_to_the_others_when_its_lease_ended_and_its_floor_stays() -> None:
    lost, left = Region("a", demand=900.0), Region("b", demand=100.0)
    walk = Walk(1000, random.Random(1), [lost, left])
    _settle(walk, [lost, left], 600)
    before = left.usable(walk.now_s)
    kept = lost.usable(walk.now_s)
    assert kept > 700
    _settle(walk, [left], LEASE_S - REST_S - 60)
    assert (lost.usable(walk.now_s), left.usable(walk.now_s)) == (kept, before), "it keeps its share so long"
    _settle(walk, [left], 2 * REST_S)
    assert lost.usable(walk.now_s) == 100
    assert left.usable(walk.now_s) == 900
    _settle(walk, [lost, left], 4 * REST_S)
    assert lost.usable(walk.now_s) > 700


def test_all_keep_their_shares_while_nobody_can_ask_and_then_their_floors() -> None:
    regions = [Region(f"r{n}", demand=100.0 * n) for n in range(3)]
    walk = Walk(300, random.Random(1), regions)
    _settle(walk, regions, 600)
    shares = [region.usable(walk.now_s) for region in regions]
    assert sum(shares) == 300
    _settle(walk, [], LEASE_S - REST_S - 60)
    assert [region.usable(walk.now_s) for region in regions] == shares
    _settle(walk, [], 3600)
    assert [region.usable(walk.now_s) for region in regions] == [20, 20, 20]


@given(limit=st.integers(1, 10_000), demands=st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_the_whole_limit_is_divided(limit: int, demands: list[float]) -> None:
    divided = divide_limit(limit, {str(n): demand for n, demand in enumerate(demands)}, now_s=0.0)
    asking = len([demand for demand in demands if demand > 0]) or len(demands)
    assert sum(divided.values()) == (limit if limit >= len(demands) else min(limit, asking))
    assert min(divided.values()) >= 0


def test_a_floor_that_its_region_may_still_believe_in_is_lent_to_nobody() -> None:
    known, lost, new = Region("a"), Region("b"), Region("c", demand=1000.0)
    walk = Walk(300, random.Random(1), [known, lost, new])
    _settle(walk, [known, lost], 600)
    assert lost.usable(walk.now_s) == 150
    walk.ask(new)
    walk.ask(lost, lost=True)  # its floor is a third of the fifth now, and it never hears of it
    assert walk.kept["b"].floor == 20
    _settle(walk, [known, new], LEASE_S + 4 * REST_S)
    assert lost.usable(walk.now_s) == 30
    assert walk.kept["a"].held + walk.kept["c"].held == 270
