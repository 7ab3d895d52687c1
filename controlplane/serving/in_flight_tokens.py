"""In-flight tokens: what was sent to each instance since its last heartbeat (unreported load), by this process and, as
they tell it, by others.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from controlplane.store.redis.live import Sums


class Sending(NamedTuple):
    """What was sent at a moment, on this process's monotonic clock."""

    sent_s: float
    sums: Sums


@dataclass
class _Instance:
    """What was sent to one instance, by this process or by others, and its sums. What others take back counts as less
    than nothing.
    """

    log: list[Sending] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)

    def add(self, sending: Sending) -> None:
        self.log.append(sending)
        self.sums = _sum((self.sums, sending.sums))

    def drop_until(self, until_s: float) -> None:
        """Drop what was sent until then."""
        kept = [sending for sending in self.log if sending.sent_s > until_s]
        if len(kept) < len(self.log):
            self.log, self.sums = kept, _sum(sending.sums for sending in kept)


class SentTokens:
    """Sums by instance. The cost of a request does not grow with the requests before it."""

    def __init__(self) -> None:
        self._own: dict[str, _Instance] = {}
        self._elsewhere: dict[str, _Instance] = {}
        self._untold: dict[str, Sums] = {}
        self._added_s = -math.inf

    def add(self, instance_id: str, tokens: int, input_tokens: int) -> Sending:
        """Count a request of `tokens`, of which `input_tokens` are its prompt's."""
        sending = Sending(time.monotonic(), Sums(tokens, input_tokens, 1))
        self._added_s = sending.sent_s
        self._own.setdefault(instance_id, _Instance()).add(sending)
        self._tell(instance_id, sending.sums)
        return sending

    def add_elsewhere(self, instance_id: str, sending: Sending) -> None:
        """Count what another process has sent."""
        self._elsewhere.setdefault(instance_id, _Instance()).add(sending)

    def take_back(self, instance_id: str, sending: Sending) -> None:
        """Uncount a request that the instance refused, unless it was dropped by `forget`."""
        sent = self._own.get(instance_id)
        if sent is not None and sending in sent.log:
            sent.log.remove(sending)
            less = Sums(*(-count for count in sending.sums))
            sent.sums = _sum((sent.sums, less))
            self._tell(instance_id, less)

    def of(self, instance_id: str) -> Sums:
        """What counts. Others may take back what an instance has reported since, or what was not heard of here: they
        take nothing from what this process sent.
        """
        own, elsewhere = self._own.get(instance_id), self._elsewhere.get(instance_id)
        sums = Sums() if own is None else own.sums
        return sums if elsewhere is None else _sum((sums, Sums(*(max(0, count) for count in elsewhere.sums))))

    def untold(self) -> dict[str, Sums]:
        """By instance, what this process has sent since it was asked last, less what it took back."""
        untold, self._untold = self._untold, {}
        return untold

    def is_busy(self, within_s: float) -> bool:
        """Whether this process has sent a request within so many seconds."""
        return time.monotonic() - self._added_s <= within_s

    def forget(self, reported_at_s: Mapping[str, float]) -> None:
        """Drop what was sent before an instance's last report, and all of instances without one."""
        self._untold = {name: sums for name, sums in self._untold.items() if name in reported_at_s}
        for instances in (self._own, self._elsewhere):
            for instance_id, sent in list(instances.items()):
                sent.drop_until(reported_at_s.get(instance_id, math.inf))
                if not sent.log:
                    del instances[instance_id]

    def _tell(self, instance_id: str, sums: Sums) -> None:
        self._untold[instance_id] = _sum((self._untold.get(instance_id, Sums()), sums))


def _sum(each: Iterable[Sums]) -> Sums:
    return Sums(*map(sum, zip(Sums(), *each, strict=True)))
