"""Nodes whose slots are regrouped: nothing is lost, no two slots have a GPU at once, and slots go where demand is."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from dataplane.protocol.layouts import Layout
from ops.simulator.kernel.events import TICK
from ops.simulator.kernel.requests import Request
from ops.simulator.run import build_world
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.servers.pool import PoolServer
from ops.simulator.world.regrouping import opened_slots
from tests.ops.simulator.fixed import scenario_of

QUICK = {"every_s": 5.0, "window_s": 20.0, "hold_s": 20.0, "start_s": 3.0, "output_tokens": 200.0}
SIZES = {"a": 1, "b": 1, "c": 4}


def grouped(layouts: Sequence[Layout], regroup: dict[str, float] | None) -> Scenario:
    """Models a and b on one GPU, c on four, in one region."""
    document = scenario_of("both").model_dump(exclude_unset=True)
    fleet = {"both_slots": 0 if layouts else 2, "layouts": [list(layout) for layout in layouts], "regroup": regroup}
    models = [model | {"gpus": SIZES[model["name"]]} for model in document["models"]]
    single = {"regions": ["east"], "latencies_ms": {}, "models": models, "fleet": document["fleet"] | fleet}
    single["traffic"] = document["traffic"] | {"origins": {"east": 1.0}}
    return Scenario.model_validate(document | single)


def day_and_night(half_s: float, day_per_s: float, night_per_s: float) -> Iterator[Request]:
    """Requests for the small models, then for the large one; a few for the others."""
    by_day = int(half_s * day_per_s)
    for number in range(by_day + int(half_s * night_per_s)):
        at_s = number / day_per_s if number < by_day else half_s + (number - by_day) / night_per_s
        busy = "ab"[number % 2] if at_s < half_s else "c"
        model = ("c" if busy != "c" else "a") if number % 40 == 0 else busy
        yield Request(
            number=number,
            arrived_s=at_s,
            model=model,
            origin="east",
            tier="IW-N",
            prompt_tokens=200,
            output_tokens=150,
        )


def slots_in_use(pool: PoolServer) -> int:
    """Those that are open or not empty yet."""
    return sum(process.open for process in pool._processes) + len(pool._closing)


def test_slots_follow_the_demand_and_every_request_is_served() -> None:
    scenario = grouped([(4,), (4,), (1, 1, 1, 1)], QUICK)
    requests = list(day_and_night(80.0, 40.0, 16.0))
    world, _, _ = build_world(scenario, 1, given=iter(requests))
    pools = {server.gpus: server for server in world.present.servers if isinstance(server, PoolServer)}
    opened: list[tuple[float, int, int]] = []

    def look() -> None:
        counts = {gpus: slots_in_use(pool) for gpus, pool in pools.items()}
        assert sum(gpus * count for gpus, count in counts.items()) <= 12, "a GPU is in one slot at most"
        opened.append((world.events.now_s, counts[1], counts[4]))
        world.events.at(world.events.now_s + 0.5, TICK, look)

    world.events.at(0.0, TICK, look)
    for _ in world.run():
        pass
    assert world.over
    assert not world.failures
    assert sum(tally.ended for tally in world.tallies.values()) == len(requests)
    by_day = max(ones for now_s, ones, _ in opened if now_s < 80)
    by_night = max(fours for now_s, _, fours in opened if now_s > 80)
    assert by_day == 8, "a slot of four became four for the small models"
    assert by_night == 2, "and one for the large one again"


def test_without_regrouping_slots_stay_and_both_sizes_are_served() -> None:
    requests = list(day_and_night(20.0, 3.0, 3.0))
    world, _, _ = build_world(grouped([(4, 1, 1, 2)], None), 1, given=iter(requests))
    for _ in world.run():
        pass
    assert sum(tally.ended for tally in world.tallies.values()) == len(requests)


@pytest.mark.parametrize("clairvoyant", [False, True])
def test_the_work_of_a_slot_is_what_its_answers_are_expected_to_take(clairvoyant: bool) -> None:
    """Not how long they will be, unless the policies know that."""
    scenario = grouped([(4,), (1, 1, 1, 1)], QUICK)
    scenario = scenario.model_copy(update={"policy": scenario.policy.model_copy(update={"clairvoyant": clairvoyant})})
    works: list[int] = []

    def look(pools: Sequence[PoolServer]) -> None:
        works.extend(pool.remaining_tokens(slot.index) for pool in pools for slot in pool._processes)

    for output_tokens in (400, 1000):
        requests = [replace(one, output_tokens=output_tokens) for one in day_and_night(1.0, 10.0, 0.0)]
        world, _, _ = build_world(scenario, 1, given=iter(requests))
        pools = [server for server in world.present.servers if isinstance(server, PoolServer)]
        world.events.at(1.5, TICK, partial(look, pools))
        for _ in world.run():
            pass
    half = len(works) // 2
    assert sum(works[:half]) > 0
    assert (works[:half] == works[half:]) is not clairvoyant


def test_the_same_seed_gives_the_same_events() -> None:
    digests = []
    for _ in range(2):
        requests = [replace(request) for request in day_and_night(60.0, 4.0, 12.0)]
        world, _, _ = build_world(grouped([(4,), (1, 1, 1, 1)], QUICK), 1, given=iter(requests))
        for _ in world.run():
            pass
        digests.append(world.log.digest)
    assert digests[0] == digests[1]


def test_slots_are_numbered_by_size() -> None:
    layouts: list[Layout] = [(4, 1, 1, 2), (2, 2, 4)]
    assert [sorted(opened_slots(layouts, size)) for size in (1, 2, 4, 8)] == [[4, 5], [3, 4, 5], [0, 3], []]


@pytest.mark.parametrize(
    ("layouts", "regroup", "named"),
    [
        ([(4, 2)], None, r"models.0.gpus: no node has slots of 1 GPUs"),
        ([(1, 1)], QUICK, "nor may it get some"),
        ([(4,), (1, 1)], None, "layouts.1: the slots have 2 GPUs, the node has 4"),
        ([(1, 4)], None, "layouts.0: a slot of 4 GPUs begins at a multiple of 4"),
        ([], QUICK, "regroup: needs layouts"),
    ],
)
def test_layouts_that_serve_not_all_models_are_refused(layouts: list[Layout], regroup: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        grouped(layouts, regroup)
