"""A copy stream without threads: what a slot does depends on its seed alone, not on the machine."""

from collections.abc import Sequence
from random import Random

import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.memory.events import PASSED, Event, TransferError


class PolledStream:
    """A submission has passed once its event was asked up to `polls_max` times, or waited for. A share of `fail_share`
    of the submissions fails.
    """

    def __init__(self, rng: Random, *, polls_max: int, fail_share: float = 0.0) -> None:
        self._rng, self._polls_max, self._fail_share = rng, polls_max, fail_share
        self._last: Event = PASSED

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        fails = self._rng.random() < self._fail_share
        event = _Polled(self._last, copies, after, polls=self._rng.randint(0, self._polls_max), fails=fails)
        self._last = event
        return event

    def close(self) -> None:
        """There is nothing to end."""


class _Polled:
    """The end of a submission, which runs when the event is done."""

    def __init__(
        self, before: Event, copies: Sequence[Copy], after: Sequence[Event], *, polls: int, fails: bool
    ) -> None:
        self._before, self._copies, self._after = before, copies, after
        self._polls, self._fails = polls, fails
        self._is_done = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        if not self._is_done:
            self._polls -= 1
            waits = [event for event in (self._before, *self._after) if not event.done()]
            if self._polls < 0 and not waits:
                self._run()
        return self._is_done

    def wait(self) -> None:
        """Run it, after all that it waits for.

        Raises:
            TransferError: it failed.
        """
        while not self.done():
            pass
        if self.error is not None:
            raise TransferError("a copy failed") from self.error

    def _run(self) -> None:
        self._is_done = True
        self.error = next((event.error for event in self._after if event.error is not None), None)
        if self.error is None and self._fails:
            self.error = TransferError("a test asked for it")
        if self.error is None:
            for copy in self._copies:
                copy.target.view(-1).view(torch.uint8).copy_(copy.source.view(-1).view(torch.uint8))
        self._before, self._copies, self._after = PASSED, (), ()
