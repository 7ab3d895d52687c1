"""Deferred requests of the simulator: the order in which they wait, and when they expire."""

from controlplane.policies.release import ReleaseSettings
from dataplane.protocol.tiers import NIW
from ops.simulator.kernel.requests import Request
from ops.simulator.traffic.deferred import Deferred

WINDOW_S = 100.0


def request(number: int) -> Request:
    """It arrives `number` seconds after the first one."""
    return Request(
        number=number, arrived_s=float(number), model="m", origin="r", tier=NIW, prompt_tokens=1, output_tokens=1
    )


def test_requests_that_lost_their_node_wait_in_the_order_of_arrival() -> None:
    """So that the first of the queue is the oldest, and none that is due waits behind one that is not."""
    deferred = Deferred(ReleaseSettings(), WINDOW_S)
    deferred.add(request(0))
    assert [one.number for one in deferred.expire(WINDOW_S)] == [0]
    deferred.add(request(7))
    for number in (2, 5, 3):
        deferred.put_back(request(number))
    assert deferred.waiting(50.0) == {"m": (4, 48.0)}
    assert [one.number for one in deferred.expire(WINDOW_S + 3)] == [2, 3]
    assert [one.number for one in deferred.expire(WINDOW_S + 7)] == [5, 7]
