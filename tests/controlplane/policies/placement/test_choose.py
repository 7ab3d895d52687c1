import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from controlplane.policies.facts import Endpoint, ModelGpu, RegionGpu
from controlplane.policies.placement import choose
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Constraint, Placement, PlacementStatus
from controlplane.policies.placement.exact import solve
from controlplane.policies.placement.exact.solve import Solved
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    Profile,
    StartTimes,
)
from controlplane.policies.placement.grid import Answer
from dataplane.protocol.tiers import Tier
from tests.controlplane.policies.placement.problems import EAST, EXACT, WEST, after, cell, fleet, place, small_facts


def reasons(placement: Placement) -> dict[str, str]:
    return {entry.endpoint.region: entry.reason for entry in placement.entries}


def test_home_share_of_the_peak_is_served_at_home() -> None:
    placement = place(fleet(demand={WEST: (5210.0, 4000.0)}))  # 0.8 x 5,210 = 4,168 > 2 x 1,900; 3 x 1,900 = 5,700
    assert after(placement) == {("a", "us-west", "H800"): 3}
    assert reasons(placement) == {"us-west": "peak 5,210 tokens/s x 0.8 at home needs 3 instances of 1,900"}
    assert placement.status == PlacementStatus.OPTIMAL
    assert placement.gpu_cost_per_hour == 6.0
    assert placement.objective_per_hour == pytest.approx(6 + 3 * 2 / 6 + 3 * 0.002)  # GPUs, starts of 10 min, moves
    assert placement.bound_per_hour == pytest.approx(placement.objective_per_hour)
    assert (placement.at_s, placement.unserved, placement.below_minimum) == (7.0, (), ())


def test_the_global_row_counts_each_window_over_all_regions() -> None:
    """Peaks of 2,300 and 2,000 that do not meet need 1,840 and 1,600 at home: one instance each, 3,800 in all.

    If they meet, 4,300 must be served, and a third instance covers it.
    """
    apart = place(fleet(demand={WEST: (2300.0, 0.0), EAST: (0.0, 2000.0)}))
    together = place(fleet(demand={WEST: (2300.0, 0.0), EAST: (2000.0, 0.0)}))
    assert sum(after(apart).values()) == 2
    assert sum(after(together).values()) == 3


def test_one_region_covers_for_another() -> None:
    facts = fleet(demand={WEST: (2300.0,), EAST: (1800.0,)}, limits={WEST: (0, 1)}, present={cell("a", "us-west"): 1})
    placement = place(facts)
    assert after(placement) == {("a", "us-west", "H800"): 1, ("a", "us-east", "H800"): 2}
    assert reasons(placement) == {
        "us-west": "no change: peak 2,300 tokens/s x 0.8 at home needs 1 instance of 1,900",
        "us-east": "covers 400 tokens/s of us-west",
    }


def test_minimum_and_fallen_demand_say_so() -> None:
    facts = fleet(
        demand={WEST: (100.0,), EAST: (0.0,)},
        limits={EAST: (2, 9)},
        present={cell("a", "us-west"): 4, cell("a", "us-east"): 2},
    )
    placement = place(facts)
    assert after(placement) == {("a", "us-west", "H800"): 1, ("a", "us-east", "H800"): 2}
    assert reasons(placement)["us-east"] == "no change: minimum 2"
    assert reasons(placement)["us-west"].startswith("demand fell: 1 is enough, ")
    gone = place(fleet(present={cell("a", "us-west"): 4}))
    assert [(entry.before, entry.after, entry.reason) for entry in gone.entries] == [(4, 0, "demand fell: no demand")]


def test_what_the_gpus_cannot_hold_is_listed_not_infeasible() -> None:
    """8 GPUs hold 15,200 of the 0.8 x 20,000 = 16,000 wanted at home; both regions hold 30,400 of 40,000."""
    placement = place(fleet(demand={WEST: (20_000.0,), EAST: (20_000.0,)}))
    assert placement.status == PlacementStatus.OPTIMAL
    assert after(placement) == {("a", "us-west", "H800"): 8, ("a", "us-east", "H800"): 8}
    listed = {each.region: (round(each.tokens_per_s), each.reason) for each in placement.unserved}
    west, east = "GPUs full in us-west: H800 8 of 8", "GPUs full in us-east: H800 8 of 8"
    assert listed[None] == (9600, f"{east}; {west}")
    assert listed["us-west"] == (800, f"not served at home; {west}")
    assert reasons(placement)["us-west"].endswith(west)


def test_minimums_beyond_capacity_are_listed_not_infeasible() -> None:
    placement = place(fleet(limits={WEST: (10, 12)}))
    assert after(placement) == {("a", "us-west", "H800"): 8}
    assert [(each.minimum, each.placed) for each in placement.below_minimum] == [(10, 8)]
    assert placement.below_minimum[0].reason == "GPUs full in us-west: H800 8 of 8"


def test_below_the_minimum_each_change_says_that_gpus_are_missing() -> None:
    """Demand comes before minimums: `a` has an instance for its demand, `b` none for its minimum."""
    b = Endpoint(model="b", region="us-west")
    facts = fleet(
        regions=("us-west",),
        models=(PlacementModel(name="a"), PlacementModel(name="b")),
        profiles={ModelGpu(model=name, gpu_type="H800"): Profile(tokens_per_s=1900, gpus=1) for name in "ab"},
        capacity={RegionGpu(region="us-west", gpu_type="H800"): 1},
        weights_present=frozenset(),
        demand={WEST: (100.0,)},
        limits={WEST: (3, 9), b: (2, 9)},
        present={cell("b", "us-west"): 1},
    )
    full = "GPUs full in us-west: H800 1 of 1"
    given, taken = place(facts).entries
    assert (given.after, given.reason) == (
        1,
        f"peak 100 tokens/s x 0.8 at home needs 1 instance of 1,900; fewer than the 3 wanted: {full}",
    )
    assert (taken.before, taken.after, taken.constraint) == (1, 0, Constraint.CAPACITY)
    assert taken.reason == f"none placed; fewer than the 2 wanted: {full}"


def test_the_stricter_tier_gets_the_last_gpus() -> None:
    profiles = {ModelGpu(model=name, gpu_type="H800"): Profile(tokens_per_s=1000, gpus=4) for name in "ab"}
    placement = place(
        fleet(
            regions=("us-west",),
            models=(PlacementModel(name="a", tier=Tier.IW_N), PlacementModel(name="b", tier=Tier.IW_F)),
            capacity={RegionGpu(region="us-west", gpu_type="H800"): 7},
            profiles=profiles,
            demand={WEST: (900.0,), Endpoint(model="b", region="us-west"): (900.0,)},
            weights_present=frozenset(),
        )
    )
    assert after(placement) == {("b", "us-west", "H800"): 1}
    assert {each.model for each in placement.unserved} == {"a"}


def test_lost_gpus_shrink_what_is_present() -> None:
    placement = place(
        fleet(
            capacity={RegionGpu(region="us-west", gpu_type="H800"): 2},
            present={cell("a", "us-west"): 4},
            demand={WEST: (3000.0,)},
        )
    )
    assert after(placement) == {("a", "us-west", "H800"): 2}
    assert reasons(placement)["us-west"].startswith("no more than 2 fit in us-west: H800 2 of 2; peak 3,000")


def test_a_model_without_demand_or_minimum_is_left_out() -> None:
    placement = place(fleet(demand={WEST: (0.0,)}))
    assert (placement.entries, placement.unserved, placement.objective_per_hour) == ((), (), 0.0)
    assert placement.solver == "none"


def test_demand_without_a_profile_is_listed() -> None:
    placement = place(fleet(profiles={}, demand={WEST: (10.0,)}))
    assert placement.entries == ()
    assert placement.unserved[0].reason.endswith("no GPU in us-west that a has a profile for")


TWO_TYPES: dict[str, Any] = {
    "capacity": {RegionGpu(region="us-west", gpu_type=gpu_type): 8 for gpu_type in ("H800", "L40")},
    "profiles": {
        ModelGpu(model="a", gpu_type=gpu_type): Profile(tokens_per_s=1900, gpus=1) for gpu_type in ("H800", "L40")
    },
    "demand": {WEST: (3000.0,)},
}


@pytest.mark.parametrize("present", [{"H800": 2}, {"L40": 2}, {"H800": 1, "L40": 1}])
def test_equal_costs_keep_the_present_placement(present: Mapping[str, int]) -> None:
    """Even where a start costs nothing: a move is then the only difference."""
    profiles = {key: replace(profile, start=StartTimes.of_load(0.0)) for key, profile in TWO_TYPES["profiles"].items()}
    facts = fleet(
        **{**TWO_TYPES, "profiles": profiles},
        gpu_cost_per_hour={"H800": 2.0, "L40": 2.0},
        present={cell("a", "us-west", gpu_type): count for gpu_type, count in present.items()},
    )
    assert after(place(facts)) == {("a", "us-west", gpu_type): count for gpu_type, count in present.items()}


@pytest.mark.parametrize(
    ("l40_cost", "weights", "moved"),
    [
        (1.75, True, False),  # saves 0.25 an hour, the start costs 1.75 / 6 = 0.292
        (1.6, True, True),  # saves 0.4, costs 0.267
        (1.0, False, False),  # saves 1.0, but fetching the weights takes 2 h: 2.0
        (0.6, False, True),  # saves 1.4, costs 1.2
    ],
)
def test_a_cheaper_gpu_must_pay_for_its_start(l40_cost: float, *, weights: bool, moved: bool) -> None:
    facts = fleet(
        **{**TWO_TYPES, "demand": {WEST: (1800.0,)}},
        gpu_cost_per_hour={"H800": 2.0, "L40": l40_cost},
        present={cell("a", "us-west"): 1},
        weights_present=frozenset({WEST}) if weights else frozenset(),
    )
    assert after(place(facts)) == {("a", "us-west", "L40" if moved else "H800"): 1}


def _answers(answer: Answer | None, status: PlacementStatus) -> Callable[..., tuple[Answer | None, Solved]]:
    """An integer program that ends so, and has proven nothing."""
    return lambda grid, how: (answer, Solved(status=status, solver="highs", bound=-math.inf, message="HiGHS ended"))


def test_an_answer_that_does_not_fit_keeps_the_present_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    too_many = Answer(counts={cell("a", "us-west"): 9})
    monkeypatch.setattr(choose, "solve_exactly", _answers(too_many, PlacementStatus.OPTIMAL))
    facts = fleet(demand={WEST: (5000.0,)}, present={cell("a", "us-west"): 1})
    placement = place(facts)
    assert placement.status == PlacementStatus.FAILED
    assert placement.reason.startswith("highs answered what does not fit: ")
    assert [(entry.before, entry.after) for entry in placement.entries] == [(1, 1)]
    assert placement.gpu_cost_per_hour == 2.0


@pytest.mark.parametrize("ended", [PlacementStatus.BOUNDED, PlacementStatus.TIME_LIMIT, PlacementStatus.FAILED])
@pytest.mark.parametrize("found", [None, Answer(counts={cell("a", "us-west"): 9})])
def test_where_the_program_found_nothing_that_fits_prices_answer(
    monkeypatch: pytest.MonkeyPatch, ended: PlacementStatus, found: Answer | None
) -> None:
    facts = fleet(demand={WEST: (2300.0,), EAST: (1800.0,)}, limits={WEST: (0, 1)})
    exact = place(facts)
    monkeypatch.setattr(choose, "solve_exactly", _answers(found, ended))
    placement = place(facts)
    assert placement.solver == "prices"
    assert placement.reason.startswith("HiGHS ended; better by prices: ")
    assert after(placement) == after(exact)


def _hard() -> PlacementFacts:
    """Twelve models in twelve regions on four GPU types, tight capacity: without a gap not provable in a moment."""
    regions, models, gpu_types = (
        [f"{kind}{place}" for place in range(count)] for kind, count in zip("rmk", (12, 12, 4), strict=True)
    )
    pairs = list(itertools.product(range(12), range(12)))
    return PlacementFacts(
        regions=tuple(regions),
        models=tuple(PlacementModel(name=name) for name in models),
        capacity={RegionGpu(region=region, gpu_type=gpu_type): 14 for region in regions for gpu_type in gpu_types},
        profiles={
            ModelGpu(model=model, gpu_type=gpu_type): Profile(
                tokens_per_s=700 + 137.0 * ((5 * m + 3 * k) % 11), gpus=1 + (m + k) % 3
            )
            for m, model in enumerate(models)
            for k, gpu_type in enumerate(gpu_types)
        },
        present={},
        demand={
            Endpoint(model=models[m], region=regions[r]): (
                1000 + 331.0 * ((7 * m + 4 * r) % 13),
                900 + 97.0 * ((m + r) % 7),
            )
            for m, r in pairs
        },
        limits={},
        gpu_cost_per_hour={gpu_type: 2.0 + 0.37 * k for k, gpu_type in enumerate(gpu_types)},
    )


def test_a_time_limit_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "WORK_PER_S", 10**12)
    how = PlacementSettings(gap=0.0, time_limit_s=1.0, exact_cells_max=10_000)
    placement = choose_placement(_hard(), 0.0, how, should_stop=lambda: True)
    assert placement.status == PlacementStatus.TIME_LIMIT
    assert placement.reason.startswith("HiGHS used up its share of the time limit")
    assert placement.gap is not None
    assert placement.gap > 0
    assert placement.bound_per_hour is not None
    assert placement.objective_per_hour is not None
    assert placement.bound_per_hour < placement.objective_per_hour


def test_a_program_that_is_not_proven_ends_alike_at_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS, slowed down at each of its questions, ends at the same point: no clock ends it but the time limit."""
    asked: list[int] = []
    real, most = solve.run_program, 200

    def run(slow_s: float) -> Callable[..., None]:
        def slowed(problem: Any, should_stop: Callable[[], bool], **options: Any) -> None:
            def stop() -> bool:
                asked[-1] += 1
                time.sleep(slow_s)
                return should_stop() or asked[-1] == most

            real(problem, stop, **options)

        return slowed

    monkeypatch.setattr(solve, "WORK_PER_S", 100)
    how = PlacementSettings(gap=0.0, time_limit_s=2000.0, exact_cells_max=10_000)
    answers = []
    for slow_s in (0.0, 0.01):
        asked.append(0)
        monkeypatch.setattr(solve, "run_program", run(slow_s))
        answers.append(choose_placement(_hard(), 0.0, how, should_stop=lambda: True))
    assert answers[0] == answers[1]
    assert 0 < asked[0] == asked[1] < most
    assert answers[0].reason.startswith("HiGHS did all the work allowed")


def test_prices_have_time_left_where_the_program_took_all_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this clock HiGHS takes all the time that it is given, and it proves nothing."""
    limit_s, now_s, late = 10.0, 0.0, []

    def run(problem: Any, should_stop: Callable[[], bool], *, time_limit: float, **options: Any) -> None:
        nonlocal now_s
        now_s += time_limit

    def should_stop() -> bool:
        late.append(now_s >= limit_s)
        return late[-1]

    monkeypatch.setattr(solve, "run_program", run)
    facts = fleet(demand={WEST: (2300.0,), EAST: (1800.0,)}, limits={WEST: (0, 1)})
    placement = choose_placement(facts, 0.0, replace(EXACT, time_limit_s=limit_s), should_stop=should_stop)
    assert late
    assert not any(late)
    monkeypatch.undo()
    assert after(placement) == after(place(facts))


def test_large_problems_are_solved_by_prices() -> None:
    """The same answer as the integer program's, in the same words; its bound is proven, and further away perhaps."""
    facts = fleet(demand={WEST: (2300.0,), EAST: (1800.0,)}, limits={WEST: (0, 1)}, present={cell("a", "us-west"): 1})
    exact = place(facts)
    priced = place(facts, replace(EXACT, exact_cells_max=0))
    assert (exact.solver, priced.solver) == ("highs", "prices")
    assert (priced.entries, priced.unserved) == (exact.entries, exact.unserved)
    assert priced.status in {PlacementStatus.OPTIMAL, PlacementStatus.BOUNDED}
    assert priced.gap is not None
    assert (priced.gap == 0) == (priced.status == PlacementStatus.OPTIMAL)


@settings(max_examples=15)
@given(facts=small_facts(pools=True))
def test_both_ways_agree_within_what_they_prove(facts: PlacementFacts) -> None:
    exact, priced = place(facts), place(facts, replace(EXACT, exact_cells_max=0))
    for one, other in ((exact, priced), (priced, exact)):
        assert one.bound_per_hour is not None
        assert other.objective_per_hour is not None
        assert one.bound_per_hour <= other.objective_per_hour * (1 + 1e-6) + 1e-6
    assert all(entry.reason for entry in priced.entries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"demand": {WEST: (-1.0,)}}, r"demand\[a in us-west\] must be finite and not negative"),
        ({"demand": {WEST: (math.nan,)}}, r"demand\[a in us-west\] must be finite"),
        ({"demand": {WEST: (1.0,), EAST: (1.0, 2.0)}}, "same number of windows"),
        ({"demand": {Endpoint(model="z", region="us-west"): (1.0,)}}, "demand model 'z' is unknown; known: a"),
        ({"limits": {Endpoint(model="a", region="mars"): (0, 1)}}, "limits region 'mars' is unknown"),
        ({"limits": {WEST: (3, 2)}}, r"limits\[a in us-west\]: need 0 <= min <= max, got min 3, max 2"),
        ({"capacity": {RegionGpu(region="us-west", gpu_type="B200"): 1}}, "capacity gpu_type .* 'B200' is unknown"),
        ({"capacity": {RegionGpu(region="us-west", gpu_type="H800"): -1}}, "capacity must not be negative, got -1"),
        ({"present": {cell("a", "us-west", "B200"): 1}}, "present gpu_type .* .B200. is unknown"),
        ({"profiles": {ModelGpu(model="a", gpu_type="H800"): Profile(tokens_per_s=0, gpus=1)}}, "tokens_per_s > 0"),
        ({"gpu_cost_per_hour": {"H800": -2.0}}, "gpu_cost_per_hour"),
        ({"models": (PlacementModel(name="a"), PlacementModel(name="a"))}, "models must not name anything twice"),
    ],
)
def test_bad_facts_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fleet(**changes)


@pytest.mark.parametrize("change", [{"epsilon": 1.1}, {"time_limit_s": 0.0}, {"gap": 1.0}, {"unserved_ratios": {}}])
def test_bad_settings_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        PlacementSettings(**change)


def test_where_the_weights_fit_on_no_slot_nothing_is_placed_and_the_shortage_says_so() -> None:
    unfit = {cell("a", "us-west"): "514 MiB do not fit"}
    placement = place(fleet(demand={WEST: (3000.0,)}, limits={WEST: (1, 4), EAST: (0, 4)}, unfit=unfit))
    assert after(placement) == {("a", "us-east", "H800"): 2}, "the rest is served elsewhere"
    [short] = [each for each in placement.unserved if each.region == "us-west"]
    assert short.reason == "not served at home; 514 MiB do not fit"
    [below] = placement.below_minimum
    assert below.reason == "514 MiB do not fit"
