"""Counts become demand buckets: again without harm, a gap where nobody counted, zero where nobody asked."""

from controlplane.planner.measure import measure
from controlplane.policies.facts import Endpoint
from controlplane.store.demand import IW, NIW, read_demand
from tests.controlplane.store.test_adapters import model, put
from tests.controlplane.world import World

EAST, WEST = Endpoint(model="tide", region="us-east"), Endpoint(model="tide", region="us-west")
NOW_S = 1_000_000_020.0
MINUTE_S = 1_000_000_020 // 60 * 60


def series(world: World, kind: str, endpoint: Endpoint) -> list[tuple[float, float | None]]:
    with world.database.transaction() as session:
        found = read_demand(session, kind=kind, since_s=0, until_s=2**40, only=endpoint)
    return [((start_s - MINUTE_S) / 60, value) for start_s, value in found.get(endpoint, [])]


def run(world: World) -> int:
    with world.database.transaction() as session:
        return measure(session, world.live, now_s=NOW_S)


def test_gaps_zeros_and_counts(world: World) -> None:
    assert run(world) == 0
    world.live.count_demand("a", {(IW, EAST): 120.0, (NIW, EAST): 60.0}, minute_s=MINUTE_S - 60)
    world.live.count_demand("a", {}, minute_s=MINUTE_S - 180)
    world.live.count_demand("a", {(IW, EAST): 999.0}, minute_s=MINUTE_S)
    world.live.count_demand("a", {(IW, EAST): 999.0}, minute_s=MINUTE_S - 360)
    assert run(world) == 2, "zeros take no rows"
    assert series(world, IW, EAST) == [(-3, 0.0), (-1, 2.0)], "minute -2 is a gap; this minute is not over"
    assert series(world, IW, WEST) == [(-3, 0.0), (-1, 0.0)]
    assert series(world, NIW, EAST) == [(-1, 1.0)]


def test_again_rewrites_what_came_late(world: World) -> None:
    world.live.count_demand("a", {(IW, EAST): 60.0}, minute_s=MINUTE_S - 60)
    assert (run(world), run(world)) == (1, 0)
    world.live.count_demand("a", {(IW, EAST): 120.0}, minute_s=MINUTE_S - 60)
    assert run(world) == 1
    assert series(world, IW, EAST) == [(-1, 2.0)]


def test_an_adapter_with_its_base_counts_as_that(world: World) -> None:
    put(world, model("a", with_base=True))
    adapter = Endpoint(model="a", region="us-east")
    world.live.count_demand("a", {(IW, EAST): 120.0, (IW, adapter): 60.0, (NIW, adapter): 30.0}, minute_s=MINUTE_S - 60)
    run(world)
    assert series(world, IW, EAST) == [(-1, 3.0)]
    assert series(world, NIW, EAST) == [(-1, 0.5)]
    assert series(world, IW, adapter) == []
