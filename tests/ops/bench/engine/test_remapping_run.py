import pytest
import torch

from dataplane.engines.torch.copies.base import Copy
from ops.bench.engine.remapping_run import VirtualTime, VirtualWire


def test_copies_take_the_time_of_the_wire_one_after_another() -> None:
    time = VirtualTime()
    wire = VirtualWire(time, 1000.0)
    source, target = torch.arange(250, dtype=torch.uint8), torch.zeros(250, dtype=torch.uint8)
    began_s = time.now_s()
    events = [wire.submit([Copy(source=source, target=target)]) for _ in range(2)]
    assert target.equal(source)
    assert not events[0].done()
    for event, due_s in ((events[0], 0.25), (events[1], 0.5), (events[0], 0.5)):
        event.wait()
        assert event.done()
        assert time.now_s() - began_s == pytest.approx(due_s, abs=0.1)
