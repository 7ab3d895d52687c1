"""The result of a world, as the document of `results`."""

from collections.abc import Mapping

from controlplane.policies.facts import PoolKey
from ops.simulator.results.results import GpuTotals, Quantiles, Result, Row, Start, State, Totals, held_hours
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.measures import Histogram, Tally
from ops.simulator.world.world import World

HOUR_S = 3600.0


def result_of(
    world: World,
    fleet: Fleet | None,
    *,
    scenario: str,
    seed: int,
    strategy: str | None,
    seconds: float,
    prices: Mapping[str, float],
) -> Result:
    """The document. `seconds` it took; `prices`: of a GPU hour, by GPU type. `fleet` None: the servers stood all the
    time.
    """
    simulated_s = world.events.now_s - world.settings.learn_s
    slots = sum(server.slots for server in world.present.servers)
    if fleet is not None:
        slots = fleet.layouts.count
    slot_s = slots * simulated_s
    busy_s = sum(server.busy_s for server in world.present.servers)
    whole = Tally.of(world.tallies.values())
    tiers = sorted({tier for _, tier in world.tallies})
    return Result(
        scenario=scenario,
        seed=seed,
        strategy=strategy,
        event_log_hash=world.log.digest,
        events=world.events.count,
        requests=world.arrived,
        failures=dict(sorted(world.failures.items())),
        simulated_s=simulated_s,
        seconds=seconds,
        requests_per_s=world.arrived / seconds if seconds else 0.0,
        requests_in_system_mean=world.request_seconds / simulated_s if simulated_s else 0.0,
        slots=slots,
        slot_hours=slot_s / HOUR_S,
        busy_share=busy_s / slot_s if slot_s else 0.0,
        service_attainment=whole.service_attainment,
        token_attainment=whole.token_attainment,
        rows=[_row(model, tier, tally) for (model, tier), tally in sorted(world.tallies.items())],
        tiers=[
            _row(None, tier, Tally.of(tally for (_, other), tally in world.tallies.items() if other == tier))
            for tier in tiers
        ],
        totals=_totals(world, fleet, slot_s, prices),
        series=world.recorder.series(),
    )


def _row(model: str | None, tier: str, tally: Tally) -> Row:
    return Row(
        model=model,
        tier=tier,
        requests=tally.requests,
        failed=tally.failed,
        service_attainment=tally.service_attainment,
        token_attainment=tally.token_attainment,
        ttft_violations=tally.ttft_violations / tally.ended if tally.ended else 0.0,
        input_tokens=tally.input_tokens,
        output_tokens=tally.tokens,
        ttft_s=_quantiles(tally.ttft),
        tbt_mean_s=_quantiles(tally.token_gap),
        service_s=_quantiles(tally.service),
    )


def _quantiles(histogram: Histogram) -> Quantiles | None:
    if not histogram.count:
        return None
    return Quantiles(p50=histogram.quantile(0.5), p95=histogram.quantile(0.95), p99=histogram.quantile(0.99))


def _totals(world: World, fleet: Fleet | None, slot_s: float, prices: Mapping[str, float]) -> Totals:
    seconds = world.usage.seconds(world.events.now_s)
    hours: dict[str, dict[State, float]] = {gpu_type: {} for gpu_type in prices}
    if fleet is None:
        [gpu_type] = prices
        hours[gpu_type]["serving"] = slot_s / HOUR_S
    else:
        for use, total_s in seconds.items():
            _add(hours[use.gpu_type], use.state, use.gpus * total_s / HOUR_S)
    gpu_hours: dict[State, float] = {}
    for states in hours.values():
        for state, held in states.items():
            _add(gpu_hours, state, held)
    costs = {gpu_type: prices[gpu_type] * held_hours(states) for gpu_type, states in hours.items()}
    instance_hours: dict[str, dict[State, float]] = {}
    for use, total_s in seconds.items():
        if not isinstance(use.endpoint, PoolKey):
            _add(instance_hours.setdefault(use.endpoint.model, {}), use.state, total_s / HOUR_S)
    starts: dict[Start, int] = {} if fleet is None else dict(fleet.starts)
    return Totals(
        gpu_hours=gpu_hours,
        instance_hours=instance_hours,
        cost=sum(costs.values()),
        gpu_types={name: GpuTotals(gpu_hours=states, cost=costs[name]) for name, states in hours.items()},
        starts=starts,
        scale_outs=fleet.scale_outs if fleet else 0,
        scale_ins=fleet.scale_ins if fleet else 0,
        switches=sum(server.switches for server in world.present.servers),
        node_failures=fleet.failures if fleet else 0,
        interrupted=fleet.interrupted if fleet else 0,
        unplaced=fleet.unplaced if fleet else 0,
    )


def _add(hours: dict[State, float], state: State, more: float) -> None:
    hours[state] = hours.get(state, 0.0) + more
