"""The rate of the host link in each direction: measured at first, updated by transfers of KV, or configured."""

import pytest
import torch

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.torch.memory import transfer_rates as rates_module
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.transfer_rates import (
    RATE_SHARE,
    TransferRate,
    TransferRates,
    measured_rates,
    transfer_rates,
)
from dataplane.memory.events import FlagEvent
from dataplane.memory.kv_cache import KvShape
from dataplane.memory.slabs import SlabArena
from tests.dataplane.engines.torch.memory.test_weights import HandStream

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=4, block_tokens=2, itemsize=4)
SLAB_BYTES = 4 * SHAPE.block_bytes


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that transfers are sent at, one number."""
    now = [100.0]
    monkeypatch.setattr(rates_module, "RATE_BYTES_MIN", 1)
    monkeypatch.setattr("dataplane.engines.torch.memory.kv.time.monotonic", lambda: now[0])
    return now


def over(ended_s: float) -> FlagEvent:
    event = FlagEvent()
    event.ended_s = ended_s
    return event


def test_kv_out_and_kv_in_are_learned_apart(now_s: list[float]) -> None:
    rates = TransferRates(weights=TransferRate(100.0), kv_in=TransferRate(100.0), kv_out=TransferRate(100.0))
    stream = HandStream()
    arena = SlabArena(2, weights_slabs=0)
    buffer = torch.zeros(2 * SLAB_BYTES, dtype=torch.uint8)
    store = KvStore(
        arena, buffer, SLAB_BYTES, host_bytes=SLAB_BYTES, host_file=None, make_stream=lambda _: stream, rates=rates
    )
    kv = SequenceKv(shape=SHAPE)
    assert store.grow(kv, tokens=8)
    size_bytes = kv.size_bytes
    assert store.swap_out(kv, tokens=8)
    assert store.swap_out_wait_s == pytest.approx(size_bytes / 100.0)
    stream.arrivals[0].ended_s = now_s[0] + size_bytes / 50.0
    store.settle()
    assert kv.location is KvLocation.HOST
    expected_bytes_per_s = 1 / (0.01 + RATE_SHARE * (0.02 - 0.01))
    assert store.rates.kv_out.bytes_per_s == pytest.approx(expected_bytes_per_s)
    assert store.rates.kv_in.bytes_per_s == pytest.approx(100.0)
    now_s[0] = 1000.0
    assert store.swap_in(kv)
    stream.arrivals[1].ended_s = now_s[0] + size_bytes / 200.0
    store.settle()
    assert store.rates.kv_out.bytes_per_s == pytest.approx(expected_bytes_per_s)
    assert store.rates.kv_in.bytes_per_s == pytest.approx(1 / (0.01 + RATE_SHARE * (0.005 - 0.01)))


def test_what_a_transfer_waits_for_the_one_before_it_does_not_count(now_s: list[float]) -> None:
    """Both are submitted at 100; the link takes 1 s for each."""
    rate = TransferRate(1000.0)
    rate.learn(1000, 100.0, [over(101.0)])
    rate.learn(1000, 100.0, [over(102.0)])
    assert rate.bytes_per_s == pytest.approx(1000.0)


def test_a_rate_that_is_known_stays(now_s: list[float]) -> None:
    rates = transfer_rates(torch.zeros(10, dtype=torch.uint8), 1000.0)
    for rate in (rates.weights, rates.kv_in, rates.kv_out):
        rate.learn(1000, 100.0, [over(300.0)])
        assert rate.bytes_per_s == 1000.0


def test_the_first_rates_are_those_of_written_memory_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[torch.Tensor] = []

    def note(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert host.min() == 1, "pages that nobody wrote are one page of zeros, which the cache holds"
        sources.append(host)
        return host

    monkeypatch.setattr(rates_module, "pinned", note)
    assert min(measured_rates(torch.zeros(5000, dtype=torch.uint8))) > 0
    assert len(sources) == 1
    monkeypatch.setattr(rates_module, "measured_rates", lambda buffer: (200.0, 100.0))
    rates = transfer_rates(torch.zeros(10, dtype=torch.uint8))
    assert [rate.bytes_per_s for rate in (rates.weights, rates.kv_in, rates.kv_out)] == pytest.approx([200, 200, 100])
