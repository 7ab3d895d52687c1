"""No policy looks ahead: where all that comes after a moment is altered, what was decided before it stays as it was.

Altered are the requests that arrive from then on, three times as many, and the lengths of answers: one that is then
being made becomes longer, one that is not begun longer or a single token. Compared are the event log (arrivals, routes,
releases, ends), first tokens, and what each decision about the scale was made of and came to, forecasts and plans
included.

Some know the future by their definition, and these tests see that they do: the strategy `oracle`, `policy.clairvoyant`,
and of request-level serving the order "shortest-first". Whether a request fits into KV memory is asked of its true
length everywhere, also where it is routed (recordings have no `max_tokens`), and request-level serving keeps so much KV
for it; the requests of these tests fit.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from controlplane.policies.scale import choose_scale
from ops.simulator import run
from ops.simulator.kernel.events import EventLog
from ops.simulator.kernel.requests import BLOCK_TOKENS, Request, Served
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.planning import Strategy
from ops.simulator.scenario.scenario import PolicyPart, Scenario
from ops.simulator.world import loops, operations
from ops.simulator.world.world import ENDED, World
from tests.ops.simulator.fixed import scenario_of
from tests.ops.simulator.pooling import pooled
from tests.ops.simulator.scaled import scaled

BLIND = [strategy for strategy in get_args(Strategy) if strategy != "oracle"]
LONGER_TOKENS = 200
FIRST_TOKEN, SCALED = -1, -2
"""Codes of records, beside those of the event log."""
ALTERED_S = 615.5
"""Just after a decision about the scale."""
BUSY = {"rate_per_s": 4.0, "duration_s": 700.0, "output_tokens": {"median": 200, "most": 400}}
"""Traffic under which routes hang on queues, and instances are started."""
PRESSED = scenario_of("pooled", rate_per_s=16.0, kv_bytes=200_000 * 2500)
"""A pool that runs out of KV memory."""
WAITING = scenario_of("request-level", rate_per_s=8.0, gpus=1, weights_bytes=40 * 10**9)
"""More models than GPUs, which have room for two."""
Record = tuple[float, Any, Any, Any]
Change = Callable[[Request], Request]


def unchanged(request: Request) -> Request:
    return request


def with_blocks(request: Request) -> Request:
    """As if a third of the prompts began alike."""
    alike = request.number % 3
    return replace(request, blocks=tuple(10 * alike + place for place in range(request.prompt_tokens // BLOCK_TOKENS)))


def records_of(scenario: Scenario, requests: Sequence[Request]) -> list[Record]:
    """What happened to requests and what was decided, by time, kind and request; `requests` replace the scenario's."""
    records: list[Record] = []
    note, ended = EventLog.note, World.ended

    def traffic(scenario: Scenario, seed: int) -> Iterator[Request]:
        return iter(requests)

    def noted(log: EventLog, at_s: float, what: int, request: int, value: int = 0) -> None:
        records.append((at_s, what, request, value))
        note(log, at_s, what, request, value)

    def count(world: World, served: Served) -> None:
        records.append((served.first_s, FIRST_TOKEN, served.request.number, 0))
        ended(world, served)

    def scale(snapshot: Any, now_s: float, *settings: Any) -> Any:
        decision = choose_scale(snapshot, now_s, *settings)
        records.append((now_s, SCALED, repr(snapshot), repr(decision)))
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "traffic_of", traffic)
        patch.setattr(operations, "traffic_of", traffic)
        patch.setattr(EventLog, "note", noted)
        patch.setattr(World, "ended", count)
        patch.setattr(loops, "choose_scale", scale)
        run.simulate(scenario)
    return sorted(records, key=lambda record: record[:3])  # what ends is noted when it is read


def with_policy(scenario: Scenario, **policy: Any) -> Scenario:
    return scenario.model_copy(update={"policy": scenario.policy.model_copy(update=policy)})


def first_difference(scenario: Scenario, at_s: float, change: Change = unchanged) -> tuple[Any, Any] | None:
    """The first record before a moment that differs where all from then on is altered; None if all are the same."""
    requests = [change(request) for request in traffic_of(scenario, scenario.seed)]
    seeds = range(scenario.seed + 1, scenario.seed + 4)
    others = [change(request) for seed in seeds for request in traffic_of(scenario, seed)]
    records = records_of(scenario, requests)
    kept = altered([one for one in requests if one.arrived_s < at_s], [one for one in records if one[0] < at_s])
    following = sorted([one for one in others if one.arrived_s >= at_s], key=attrgetter("arrived_s"))
    numbered = [replace(one, number=number) for number, one in enumerate([*kept, *following])]
    before = [[one for one in each if one[0] < at_s] for each in (records, records_of(scenario, numbered))]
    return next((pair for pair in zip_longest(*before) if pair[0] != pair[1]), None)


def altered(requests: Sequence[Request], records: Sequence[Record]) -> list[Request]:
    """Requests with other answers from the end of these records on."""
    begun = {record[2] for record in records if record[1] == FIRST_TOKEN}
    ended = {record[2] for record in records if record[1] == ENDED}
    assert 0 < len(ended) < len(begun), "some answers have ended, and some have not"

    def one(request: Request) -> Request:
        if request.number in ended:
            return request
        single = request.number not in begun and request.number % 2
        return replace(request, output_tokens=1 if single else request.output_tokens + LONGER_TOKENS)

    return [one(request) for request in requests]


@pytest.mark.parametrize("strategy", BLIND)
def test_a_strategy_does_not_look_ahead(strategy: str) -> None:
    assert first_difference(scaled(strategy, traffic=BUSY), ALTERED_S) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"planning": {"correct_profiles": True}},
        {"policy": {"admission": True, "tries_max": 2}},
        {"failures": [{"region": "east", "node": 0, "at_s": 500.0, "down_s": 60.0}]},
    ],
)
def test_what_goes_with_a_strategy_does_not_look_ahead(changes: dict[str, Any]) -> None:
    assert first_difference(scaled("lt-d", traffic=BUSY, **changes), ALTERED_S) is None


@pytest.mark.parametrize("planning", [{"pools": True}, {"pools": False, "reserve": True}])
def test_plans_that_share_gpus_do_not_look_ahead(planning: dict[str, Any]) -> None:
    scenario = pooled(planning={"forecasters": ["last hour's maximum"], "learn_s": 120, **planning})
    assert first_difference(scenario, 400.0) is None


def test_routing_by_prefix_does_not_look_ahead() -> None:
    assert first_difference(scaled("reactive", traffic=BUSY, policy={"gateways": 2}), ALTERED_S, with_blocks) is None


def test_rerouting_does_not_look_ahead() -> None:
    queues = BUSY | {"rate_per_s": 40.0, "duration_s": 390.0, "prompt_tokens": {"median": 1000, "most": 3000}}
    scenario = scaled("reactive", traffic=queues, policy={"rerouting": True})
    world, _, _ = run.build_world(scenario, scenario.seed)
    next(now_s for now_s in world.run() if now_s >= 380.0)
    assert world.rerouter.moved
    assert first_difference(scenario, 385.5) is None


@pytest.mark.parametrize("order", ["fcfs", "edf", "pf", "dpa"])
@pytest.mark.parametrize("serving", ["dedicated", "pooled", "both", "request-level", "split", "static"])
def test_scheduling_does_not_look_ahead(serving: str, order: str) -> None:
    assert first_difference(with_policy(scenario_of(serving), order=order), 14.0) is None


@pytest.mark.parametrize("serving", ["pooled", "both"])
def test_time_slices_in_rounds_do_not_look_ahead(serving: str) -> None:
    """By deadlines, as pools are by default, they are in the test above."""
    assert PolicyPart().time_slices == "deadlines"
    assert first_difference(with_policy(scenario_of(serving), time_slices="rounds"), 14.0) is None


@pytest.mark.parametrize("serving", ["dedicated", "both"])
def test_mixed_batches_do_not_look_ahead(serving: str) -> None:
    assert first_difference(with_policy(scenario_of(serving), mixed_batches=True), 14.0) is None


@pytest.mark.parametrize("kv_pressure", ["swap", "recompute", "auto"])
def test_pools_under_kv_pressure_do_not_look_ahead(kv_pressure: str) -> None:
    assert first_difference(with_policy(PRESSED, kv_pressure=kv_pressure), 14.0) is None


@pytest.mark.parametrize("switching", ["first-come", "line-per-gpu"])
def test_request_level_serving_with_a_prefetch_does_not_look_ahead(switching: str) -> None:
    assert first_difference(with_policy(WAITING, switching=switching), 14.0) is None


def test_shortest_first_is_seen_to_look_ahead() -> None:
    scenario = with_policy(WAITING, switching="shortest-first", prefetch=False)
    assert first_difference(scenario, 14.0) is not None


def test_the_oracle_is_seen_to_look_ahead() -> None:
    assert first_difference(scaled("oracle"), 620.0) is not None


def test_clairvoyance_is_seen_to_look_ahead() -> None:
    """By strategies, which see the queues, and by pools under KV pressure."""
    assert first_difference(scaled("reactive", traffic=BUSY, policy={"clairvoyant": True}), ALTERED_S) is not None
    assert first_difference(with_policy(PRESSED, kv_pressure="auto", clairvoyant=True), 14.0) is not None
