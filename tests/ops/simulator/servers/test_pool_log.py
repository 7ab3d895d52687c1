"""A pool's log: it changes nothing, and its parts add up to what requests and slots had."""

import pytest

from ops.simulator.run import Outcome, simulate
from ops.simulator.servers.pool_log import PoolLog
from tests.ops.simulator.fixed import scenario_of


def logged(serving: str, **fleet: int) -> tuple[Outcome, PoolLog]:
    log = PoolLog()
    return simulate(scenario_of(serving, **fleet), log=log), log


@pytest.mark.parametrize(("serving", "fleet"), [("pooled", {}), ("both", {}), ("both", {"kv_bytes": 400_000_000})])
def test_a_log_changes_nothing_and_its_parts_add_up(serving: str, fleet: dict[str, int]) -> None:
    outcome, log = logged(serving, **fleet)
    plain = simulate(scenario_of(serving, **fleet))
    assert outcome.result.event_log_hash == plain.result.event_log_hash
    servers = outcome.world.present.servers
    assert len(log.slots) == sum(server.slots for server in servers)
    assert len(log.switches) == sum(server.switches for server in servers) > 0
    busy_s = sum(sum(slot.values()) for slot in log.slots)
    assert busy_s == pytest.approx(sum(server.busy_s for server in servers))
    assert sum(switch.waited_s for switch in log.switches) == pytest.approx(sum(slot["weights"] for slot in log.slots))
    ended = [times for times in log.requests.values() if times.ended]
    assert len(ended) == outcome.result.requests - sum(outcome.result.failures.values())
    for times in ended:
        parts = (times.prefill_wait_s, times.prefill_s, times.kv_s, times.decode_s, times.decode_wait_s)
        assert min(parts) >= -1e-6
        assert sum(parts) == pytest.approx(times.last_s - times.arrived_s)
        assert times.prefill_s > 0
    assert sum(slot["decode"] for slot in log.slots) <= sum(times.decode_s for times in ended) + 1e-6


def test_kv_is_transferred_where_prefill_and_decode_are_apart_or_memory_is_short() -> None:
    apart, here, short = (
        sum(times.kv_s for times in logged(serving, **fleet)[1].requests.values())
        for serving, fleet in (("pooled", {}), ("both", {}), ("both", {"kv_bytes": 400_000_000}))
    )
    assert apart > 0
    assert here == 0
    assert short > 0


def test_without_a_prefetch_every_switch_waits_for_the_whole_transfer() -> None:
    _, log = logged("both", weights_bytes=16 * 10**9)
    waits = [switch.waited_s for switch in log.switches]
    assert min(waits) == pytest.approx(max(waits)) != 0
