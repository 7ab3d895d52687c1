"""A copy stream with faults: what is submitted through it is late, out of order, or fails half done."""

import time
from collections.abc import Sequence
from random import Random

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.memory.events import Event, TransferError


class InjectedError(Exception):
    """A fault that a test asked for."""


class FaultyStream:
    """Spreads submissions over `inners` by chance, so that those without a common event finish in any order.

    Each is late by up to `delay_s`, and a share of `fail_share` fails after half of its copies are made, but never more
    than `fails_in_a_row_max` one after the other. Which ones is up to `rng` and the order of submission alone.
    """

    def __init__(
        self,
        inners: Sequence[CopyStream],
        rng: Random,
        *,
        delay_s: float = 0.0,
        fail_share: float = 0.0,
        fails_in_a_row_max: int = 2,
    ) -> None:
        self._inners = tuple(inners)
        self._rng = rng
        self._delay_s = delay_s
        self.fail_share = fail_share
        self.fails_in_a_row_max = fails_in_a_row_max
        self._fails_in_a_row = 0
        self.submitted = 0
        self.failed = 0

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """Submit to one of the inner streams, behind a fault."""
        inner = self._rng.choice(self._inners)
        delay_s = self._rng.uniform(0, self._delay_s)
        fails = self._rng.random() < self.fail_share and self._fails_in_a_row < self.fails_in_a_row_max
        self._fails_in_a_row = self._fails_in_a_row + 1 if fails else 0
        self.submitted += 1
        self.failed += fails
        if fails:
            half = inner.submit(copies[: (len(copies) + 1) // 2], after)
            return inner.submit((), [half, _Fault(delay_s, InjectedError(f"submission {self.submitted}"))])
        return inner.submit(copies, [*after, _Fault(delay_s, None)])

    def close(self) -> None:
        """Close the inner streams."""
        for inner in self._inners:
            inner.close()


class _Fault:
    """An event that takes its time, and may fail. Only a stream's thread waits for it."""

    def __init__(self, delay_s: float, error: InjectedError | None) -> None:
        self._delay_s = delay_s
        self.error: BaseException | None = error

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        time.sleep(self._delay_s)
        if self.error is not None:
            raise TransferError(str(self.error)) from self.error
