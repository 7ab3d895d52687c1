"""Host copies of weights on their way out: unpinned and given back once no transfer reads them any more."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dataplane.engines.torch.copies.open import unpinned
from dataplane.memory.events import Event
from dataplane.memory.model_cache import CachedModel


@dataclass(frozen=True, kw_only=True)
class _Departure:
    host: torch.Tensor | None
    cached: CachedModel | None
    copies: tuple[Event, ...]

    def release(self) -> None:
        """Give the file back."""
        if self.cached is not None:
            self.cached.release()


class Departures:
    """Any thread may add; `settle` is for the engine's own, which submits the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waiting: list[_Departure] = []

    def add(self, host: torch.Tensor | None, cached: CachedModel | None, copies: Iterable[Event]) -> None:
        """Let a host copy go, pinned or not, and its file in the node's cache, once all of `copies` are over."""
        with self._lock:
            self._waiting.append(_Departure(host=host, cached=cached, copies=tuple(copies)))

    def settle(self, *, wait: bool = True) -> None:
        """Let go what nobody reads; without `wait`, everything: the device is past all copies. What is pinned is
        unpinned by another thread, and given back then.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for departure in waiting:
            if wait and not all(event.done() for event in departure.copies):
                with self._lock:
                    self._waiting.append(departure)
                continue
            if departure.host is None:
                departure.release()
            else:
                unpinned(departure.host, self._device, departure.release)
