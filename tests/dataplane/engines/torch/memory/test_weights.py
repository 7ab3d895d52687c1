"""What loads cost: measured on memory as models have it, and corrected by every whole load."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.memory import transfer_rates
from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.memory.transfer_rates import RATE_SHARE, TransferRate
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.events import Event, TransferError
from dataplane.memory.slabs import SlabArena

SLAB_BYTES = 1000
PARTS = 4


@dataclass
class Arrival:
    """A copy that ends when the test finishes it."""

    ended_s: float | None = None
    error: BaseException | None = None

    def done(self) -> bool:
        return self.ended_s is not None

    def wait(self) -> None:
        if self.error is not None:
            raise TransferError("it was lost")


class HandStream:
    """Copies that end by hand."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        self.arrivals.append(Arrival())
        return self.arrivals[-1]

    def close(self) -> None:
        """Nothing to end."""


def model(name: str, size_bytes: int = PARTS * SLAB_BYTES) -> HostModel:
    each = size_bytes // PARTS
    shards = [SimpleNamespace(size_bytes=each, of=lambda host: host[:each]) for _ in range(PARTS)]
    skeleton: Any = SimpleNamespace(
        shards=shards,
        size_bytes=size_bytes,
        slabs=lambda slab_bytes: PARTS * -(-each // slab_bytes),
        bind=lambda buffers: None,
        unbind=lambda: None,
        await_shard=None,
    )
    folder: Any = None
    host = torch.zeros(size_bytes, dtype=torch.uint8)
    return HostModel(name=name, folder=folder, skeleton=skeleton, pairs=(), key=name, host=host)


class Store:
    """A store whose clock is set by hand, and who counts loads of any size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(transfer_rates, "RATE_BYTES_MIN", PARTS * SLAB_BYTES)
        monkeypatch.setattr(transfer_rates.time, "monotonic", lambda: self.now_s)
        self.stream = HandStream()
        buffer = torch.zeros(4 * PARTS * SLAB_BYTES, dtype=torch.uint8)
        arena = SlabArena(4 * PARTS, weights_slabs=4 * PARTS)
        self.weights = WeightStore(arena, buffer, SLAB_BYTES, self.stream, TransferRate(1000.0))

    def load(self, wanted: HostModel, took_s: Sequence[float]) -> None:
        """Bring a model whose parts take so long each; it is noticed late."""
        assert self.weights.load(wanted, now_s=self.now_s)
        arrivals, self.stream.arrivals = self.stream.arrivals, []
        for arrival, part_took_s in zip(arrivals, took_s, strict=True):
            arrival.ended_s = self.now_s + part_took_s
        self.now_s += 1000.0
        self.weights.settle()


def test_the_rate_follows_whole_loads_from_their_begin_to_their_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    one = model("one")
    assert store.weights.whole_s(one) == pytest.approx(4.0)
    store.load(one, [1.0, 8.0, 2.0, 3.0])
    assert store.weights.whole_s(one) == pytest.approx(4.0 + RATE_SHARE * (8.0 - 4.0))
    for _ in range(40):
        store.weights.evict("one")
        store.load(one, [1.0, 2.0, 3.0, 8.0])
    assert store.weights.whole_s(one) == pytest.approx(8.0, rel=1e-3)
    assert store.weights.bytes_per_s == pytest.approx(500.0, rel=1e-3)


def test_loads_that_say_little_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.load(model("small", PARTS * SLAB_BYTES // 2), [9.0] * PARTS)
    retried = model("retried")
    assert store.weights.load(retried, now_s=0.0)
    for arrival in store.stream.arrivals:
        arrival.ended_s = store.now_s + 9.0
    store.stream.arrivals[1].error = TransferError("it was lost")
    assert store.weights.try_again(retried)
    store.stream.arrivals[-1].ended_s = store.now_s + 9.0
    store.weights.settle()
    assert store.weights.resident_models == ("retried", "small")
    assert store.weights.bytes_per_s == pytest.approx(1000.0)


def test_copies_of_an_evicted_model_stay_known_until_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    one = model("one")
    assert store.weights.load(one, now_s=0.0)
    store.weights.evict("one")
    assert len(one.copies) == PARTS
    store.stream.arrivals[0].ended_s = store.now_s
    assert store.weights.load(one, now_s=0.0)
    assert [event.done() for event in one.copies] == [False] * (PARTS - 1 + PARTS)
