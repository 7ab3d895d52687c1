"""A dedicated instance as a server: when it is advanced by events, and when only where it is read."""

import pytest
from msgspec import structs

from dataplane.protocol.tiers import InstanceKind, Objective
from ops.simulator.kernel.answers import TrueAnswers
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.servers import DedicatedServer
from tests.ops.simulator.replayed import LATENCY

REQUEST = Request(number=0, arrived_s=0.0, model="m", origin="r", tier="IW-N", prompt_tokens=100, output_tokens=50)


@pytest.mark.parametrize("drained", [True, False])
def test_an_instance_that_drained_and_serves_again_is_advanced_where_it_is_read(*, drained: bool) -> None:
    """Or one that was taken back before its last request had ended."""
    events, ended, emptied = Events(), list[Served](), list[float]()
    server = DedicatedServer(
        "a",
        "r",
        ModelCosts(name="m", latency=LATENCY, weights_bytes=1, kv_bytes_per_token=1, bytes_per_s=1.0),
        InstanceSettings(kv_bytes=10_000),
        gpu_type="H800",
        events=events,
        answers=TrueAnswers(),
        ended=ended.append,
    )
    target = Objective(ttft_s=1.0, tbt_s=0.05)
    server.open(InstanceKind.MIXED)
    server.submit(Served(request=REQUEST, target=target))
    server.close(lambda: emptied.append(events.now_s))
    if drained:
        while events.run(1):
            pass
        assert len(ended) == len(emptied) == 1
    server.open(InstanceKind.MIXED)
    for number in range(1, 4):
        server.submit(Served(request=structs.replace(REQUEST, number=number), target=target))
    while events.run(1):
        pass
    assert len(ended) == drained, "no event has advanced it"
    server.advance(1000.0)
    assert len(ended) == 4
    assert len(emptied) == drained
