"""Placement against every possible placement, on instances small enough to try them all."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey, RegionGpu
from controlplane.policies.placement.cost import grid_cost, violations_of
from controlplane.policies.placement.decision import Placement, PlacementStatus
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import Answer, grid_of
from tests.controlplane.policies.placement.problems import CAPACITY_MAX, EXACT, answer_of, place, small_facts, turned


def choices_of(facts: PlacementFacts) -> Iterator[Answer]:
    """Every placement that keeps to capacity, maximum and pin, with the fewest pool slots that hold what is pooled."""
    cells = list(facts.present)
    endpoints = list(facts.demand)
    homes: list[list[EndpointGpu | None]] = []
    for endpoint in endpoints:
        open_to_pools = endpoint not in facts.overrides and facts.limits[endpoint][1]
        keys = facts.pool.occupancy if facts.pool is not None and open_to_pools else {}
        homes.append([None, *(key for key in keys if key.endpoint == endpoint)])
    for pooling in itertools.product(*homes):
        pooled = frozenset(key for key in pooling if key is not None)
        pool_gpus = {key: _pool_gpus(facts, key, pooled) for key in _pools_of(facts)}
        away = {key.endpoint for key in pooled}
        ranges = [range(1 if c.endpoint in away or c in facts.unfit else CAPACITY_MAX + 1) for c in cells]
        for counts in itertools.product(*ranges):
            choice = Answer(counts=dict(zip(cells, counts, strict=True)), pooled=pooled, pool_gpus=pool_gpus)
            if _fits(facts, choice):
                yield choice


def _pools_of(facts: PlacementFacts) -> list[PoolKey]:
    """A pool for models of one GPU and one for models of two, everywhere."""
    return [
        PoolKey(region=at.region, gpu_type=at.gpu_type, worker_gpus=gpus) for at in facts.capacity for gpus in (1, 2)
    ]


def _pool_gpus(facts: PlacementFacts, place: PoolKey, pooled: frozenset[EndpointGpu]) -> int:
    here = [key for key in pooled if key.place == place.place and facts.profiles[key.pair].gpus == place.worker_gpus]
    if not here or facts.pool is None:
        return 0
    pool = facts.pool
    step = pool.slot_gpus.get(place, place.worker_gpus)
    for gpus in range(step, 99, step):
        fits = sum(pool.occupancy[key] for key in here) <= pool.fill * gpus + 1e-9
        if (
            fits
            and sum(pool.weights_bytes[key.model] for key in here) <= pool.host_bytes_per_gpu[place.gpu_type] * gpus
        ):
            return gpus
    return 99


def _fits(facts: PlacementFacts, choice: Answer) -> bool:
    for at, capacity in facts.capacity.items():
        used = sum(gpus for key, gpus in choice.pool_gpus.items() if key.place == at)
        for cell, count in choice.counts.items():
            if cell.place == at:
                used += facts.profiles[cell.pair].gpus * count
        if used > capacity:
            return False
    if any(gpus > _pool_most(facts, key) for key, gpus in choice.pool_gpus.items()):
        return False
    for endpoint in facts.demand:
        here = sum(n for cell, n in choice.counts.items() if cell.endpoint == endpoint)
        if here > facts.overrides.get(endpoint, facts.limits[endpoint][1]):
            return False
    return True


def _pool_most(facts: PlacementFacts, key: PoolKey) -> int:
    capacity = facts.capacity[key.place]
    return capacity if facts.pool is None else min(capacity, facts.pool.most.get(key, capacity))


class Oracle:
    """The objective once more, straight from the sums of the ILP: nothing of it is the code's own."""

    def __init__(self, facts: PlacementFacts, how: PlacementSettings = EXACT) -> None:
        self.facts, self.how = facts, how
        cells = self.cells = list(facts.present)
        self.price = {c: facts.profiles[c.pair].gpus * facts.gpu_cost_per_hour[c.gpu_type] for c in cells}
        near = {c: c.endpoint in facts.weights_present for c in cells}
        start = {c: facts.profiles[c.pair].start for c in cells}
        fresh = {c: start[c].local_s if near[c] else start[c].remote_s for c in cells}
        other = {c: min(fresh[c], start[c].donated_other_s if near[c] else start[c].remote_s) for c in cells}
        self.fresh = {c: self.price[c] * fresh[c] / 3600 for c in cells}
        self.other = {c: self.price[c] * other[c] / 3600 for c in cells}
        self.same = {c: self.price[c] * min(other[c], start[c].donated_same_s) / 3600 for c in cells}
        live = [c for c in cells if facts.present[c] or (self._wanted(c.model) and self._room(c))]
        whole = {c: self.price[c] + self.fresh[c] for c in live}
        speed = {c: facts.profiles[c.pair].tokens_per_s for c in live}
        self.token = max((whole[c] / speed[c] for c in live), default=1.0)
        self.instance = max(whole.values(), default=1.0)
        self.move = how.move_ratio * min((self.price[c] for c in live), default=1.0)
        self.tier = {model.name: how.unserved_ratios[model.tier] for model in facts.models}
        worth = [self.tier[c.model] * self.token * speed[c] / facts.profiles[c.pair].gpus for c in live]
        self.override_per_gpu = how.override_ratio * max(worth, default=1.0)
        self.live = live

    def _most(self, endpoint: Endpoint) -> int:
        return self.facts.overrides.get(endpoint, self.facts.limits[endpoint][1])

    def _fewest(self, endpoint: Endpoint) -> int:
        return self.facts.overrides.get(endpoint, self.facts.limits[endpoint][0])

    def _wanted(self, model: str) -> bool:
        return any(max(self.facts.demand[e]) > 0 or self._fewest(e) for e in self.facts.demand if e.model == model)

    def _room(self, cell: EndpointGpu) -> int:
        if cell in self.facts.unfit:
            return 0
        capacity = self.facts.capacity[cell.place]
        return min(capacity // self.facts.profiles[cell.pair].gpus, self._most(cell.endpoint))

    def cost(self, choice: Answer) -> float:
        total = sum(self._model(model.name, choice) for model in self.facts.models)
        total += sum(self._place(at, choice) for at in self.facts.capacity)
        return total

    def _model(self, model: str, choice: Answer) -> float:
        facts, counts = self.facts, choice.counts
        endpoints = [e for e in facts.demand if e.model == model]
        totals = [sum(window) for window in zip(*(facts.demand[e] for e in endpoints), strict=True)]
        peak, busiest = max(totals), totals.index(max(totals))
        pooled = {e: any(k.endpoint == e for k in choice.pooled) for e in endpoints}
        cost, served = 0.0, 0.0
        for e in endpoints:
            mine = [c for c in self.cells if c.endpoint == e]
            for c in mine:
                cost += self.price[c] * counts[c] + self.fresh[c] * max(0, counts[c] - facts.present[c])
                cost += self.move * abs(counts[c] - facts.present[c])
            if pooled[e]:
                served += facts.demand[e][busiest]
                continue
            here = sum(facts.profiles[c.pair].tokens_per_s * counts[c] for c in mine)
            served += here
            home = self.how.epsilon * max(facts.demand[e])
            cost += self._price(model, home) / 2 * max(0.0, home - here)
            gpus = max((facts.profiles[c.pair].gpus for c in self.live if c.model == model), default=1)
            few = self.override_per_gpu * gpus if e in facts.overrides else self.how.minimum_ratio * self.instance
            cost += few * max(0, self._fewest(e) - sum(counts[c] for c in mine))
        return cost + self._price(model, peak) * max(0.0, peak - served)

    def _price(self, model: str, wanted: float) -> float:
        floor = self.tier[model] / 50 * self.instance / wanted if wanted else 0.0
        return max(self.tier[model] * self.token, floor)

    def _place(self, place: RegionGpu, choice: Answer) -> float:
        """Pool GPUs, less what spot saves: GPU by GPU, to whichever start saves most by it."""
        facts = self.facts
        here = [c for c in self.cells if c.place == place]
        savings = []
        for c in here:
            started = max(0, choice.counts[c] - facts.present[c])
            gpus = facts.profiles[c.pair].gpus
            for nth in range(started):
                price = self.same[c] if nth < facts.donated.get(c, 0) else self.other[c]
                savings += [(self.fresh[c] - price) / gpus] * gpus
        donated_gpus = sum(facts.profiles[c.pair].gpus * facts.donated.get(c, 0) for c in here)
        pools = {key: gpus for key, gpus in choice.pool_gpus.items() if key.place == place}
        cost = sum(pools.values()) * facts.gpu_cost_per_hour[place.gpu_type]
        cost -= sum(sorted(savings, reverse=True)[:donated_gpus])
        if facts.pool is None:
            return cost
        able = [k for k in facts.pool.occupancy if k.place == place]
        able = [k for k in able if self._can_be_pooled(k)]
        cost += self.move * sum(abs(gpus - facts.pool.present.get(key, 0)) for key, gpus in pools.items())
        return cost + self.move * sum((k in choice.pooled) != (k in facts.pool.pooled) for k in able)

    def _can_be_pooled(self, key: EndpointGpu) -> bool:
        pool = key.pool(self.facts.profiles[key.pair].gpus)
        fits = _pool_gpus(self.facts, pool, frozenset({key})) <= _pool_most(self.facts, pool)
        return fits and key.endpoint not in self.facts.overrides and self._most(key.endpoint) > 0


def check(facts: PlacementFacts) -> None:
    """No placement is cheaper; it breaks nothing; what it does not do is listed; its cost is the cost function's."""
    placement = place(facts)
    assert placement.status == PlacementStatus.OPTIMAL, placement.reason
    choice, oracle = answer_of(placement), Oracle(facts)
    full = replace(
        choice,
        counts={cell: choice.counts.get(cell, 0) for cell in facts.present},
        pool_gpus={key: choice.pool_gpus.get(key, 0) for key in _pools_of(facts)},
    )
    assert _fits(facts, full), "over capacity, maximum or pin"
    assert violations_of(grid_of(facts, EXACT), full) == ()
    best = min(oracle.cost(each) for each in choices_of(facts))
    assert oracle.cost(full) == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert grid_cost(grid_of(facts, EXACT), full) == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert placement.objective_per_hour == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert placement.bound_per_hour is not None
    assert placement.bound_per_hour <= best * (1 + 1e-6) + 1e-6
    assert all(entry.reason and math.isfinite(entry.cost_if_not) for entry in placement.entries)
    assert all(entry.cost_if_not > -1e-6 for entry in placement.entries), "an optimal change does not pay when undone"
    assert all(each.cost_if_not > -1e-6 for each in placement.pooled)
    _check_lists(facts, placement, full)


def _check_lists(facts: PlacementFacts, placement: Placement, choice: Answer) -> None:
    """What is pinned is kept or listed, and so is what is not served."""
    below = {each.endpoint: each for each in placement.below_minimum}
    for endpoint, override in facts.overrides.items():
        here = sum(n for c, n in choice.counts.items() if c.endpoint == endpoint)
        assert here == override or (here < override and below[endpoint].placed == here)
        assert all(key.endpoint != endpoint for key in choice.pooled)
    nowhere = {each.model for each in placement.unserved if each.region is None}
    if choice.pooled:
        return
    for model in facts.models:
        windows = [facts.demand[e] for e in facts.demand if e.model == model.name]
        peak = max(map(sum, zip(*windows, strict=True)))
        served = sum(facts.profiles[c.pair].tokens_per_s * n for c, n in choice.counts.items() if c.model == model.name)
        assert (served < peak * (1 - 1e-6)) == (model.name in nowhere)


@settings(max_examples=60)
@given(facts=small_facts())
def test_no_placement_is_cheaper(facts: PlacementFacts) -> None:
    check(facts)


@settings(max_examples=60)
@given(facts=small_facts(pools=True))
def test_no_placement_with_pools_is_cheaper(facts: PlacementFacts) -> None:
    check(facts)


@settings(max_examples=25)
@given(facts=small_facts(pools=True))
def test_the_same_facts_give_the_same_plan_in_any_order(facts: PlacementFacts) -> None:
    assert place(facts) == place(turned(facts))


@settings(max_examples=25)
@given(facts=small_facts(pools=True))
def test_a_plan_that_is_in_force_stays(facts: PlacementFacts) -> None:
    """Once the fleet is as planned and no spot is left, the same demand asks for no move."""
    choice = answer_of(place(facts))
    assert facts.pool is not None
    pool = replace(facts.pool, present=dict(choice.pool_gpus), pooled=choice.pooled)
    present = {cell: choice.counts.get(cell, 0) for cell in facts.present}
    again = place(replace(facts, present=present, pool=pool, donated={}))
    assert all(entry.before == entry.after for entry in again.entries)
    assert all(pool.before == pool.after for pool in again.pools)
    assert all(each.before for each in again.pooled)
