"""Fences: of several runs of one deferred request a node keeps to the newest claim, whoever asks.

A dispatcher that was paused or cut off may wake up after its lease was given to another. The epoch of its claim is then
older than one this node has seen, and it is refused; a newer epoch ends the run of an older one.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

from dataplane.errors import StaleEpochError
from dataplane.flights import Flight


@dataclass(kw_only=True)
class _Run:
    epoch: int
    flight: "ref[Flight] | None" = None


class Fences:
    """The newest epoch of each fence, of the last `keys_max` fences; `cancel` frees what a run holds."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._runs: OrderedDict[str, tuple[_Run, Callable[[Flight], None] | None]] = OrderedDict()

    def enter(self, fence: str | None, epoch: int) -> None:
        """Let a command in, and remember its epoch. The run of an older one ends.

        Raises:
            dataplane.errors.StaleEpochError: a newer epoch was here before.
        """
        if fence is None:
            return
        self._check(fence, epoch)
        run, cancel = self._runs.get(fence, (_Run(epoch=epoch), None))
        if run.epoch < epoch:
            _end(run, cancel)
            run, cancel = _Run(epoch=epoch), None
        self._keep(fence, run, cancel)

    def run(self, fence: str | None, epoch: int, flight: Flight, cancel: Callable[[Flight], None]) -> None:
        """What a command that was let in became. The run of an older one, or an earlier one of the same epoch, ends.

        Raises:
            dataplane.errors.StaleEpochError: a newer epoch came meanwhile; the flight must end.
        """
        if fence is None:
            return
        self._check(fence, epoch)
        if (before := self._runs.get(fence)) is not None:
            _end(*before)
        self._keep(fence, _Run(epoch=epoch, flight=ref(flight)), cancel)

    def _check(self, fence: str, epoch: int) -> None:
        before = self._runs.get(fence)
        if before is not None and epoch < before[0].epoch:
            raise StaleEpochError(
                f"epoch {epoch} of {fence} is older than {before[0].epoch}, which was here before", param="epoch"
            )

    def _keep(self, fence: str, run: _Run, cancel: Callable[[Flight], None] | None) -> None:
        self._runs[fence] = (run, cancel)
        self._runs.move_to_end(fence)
        if len(self._runs) > self._keys_max:
            self._runs.popitem(last=False)


def _end(run: _Run, cancel: Callable[[Flight], None] | None) -> None:
    flight = run.flight() if run.flight is not None else None
    if flight is not None and cancel is not None:
        cancel(flight)
        flight.outputs.put(StaleEpochError("a newer claim of this request has come", param="epoch"))
