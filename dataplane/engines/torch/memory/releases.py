"""Host copies of weights that are to be released: unpinned and freed once no transfer reads them any more."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dataplane.engines.torch.copies.open import unpinned
from dataplane.memory.events import Event
from dataplane.memory.model_cache import CachedModel


@dataclass(frozen=True, kw_only=True)
class _PendingRelease:
    host: torch.Tensor | None
    cached: CachedModel | None
    copies: tuple[Event, ...]

    def release(self) -> None:
        """Release the file."""
        if self.cached is not None:
            self.cached.release()


class PendingReleases:
    """Any thread may add; `settle` is called by the engine's thread, which submits the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waiting: list[_PendingRelease] = []

    def add(self, host: torch.Tensor | None, cached: CachedModel | None, copies: Iterable[Event]) -> None:
        """Release a host copy, pinned or not, and its file in the node's cache, once all of `copies` have ended."""
        with self._lock:
            self._waiting.append(_PendingRelease(host=host, cached=cached, copies=tuple(copies)))

    def settle(self, *, wait: bool = True) -> None:
        """Release what no transfer reads; without `wait`, everything, since no copy is under way. Pinned memory is
        unpinned by another thread, which releases it then.
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
