"""Fencing tokens: of several claims of one batch request, a node runs the newest.

A dispatcher that was paused or cut off may continue after another has its lease. The epoch of its claim is then older
than one that this node has seen, and the node refuses it; a newer epoch ends the run of an older one.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

from dataplane.dispatch.requests import InflightRequest
from dataplane.protocol.errors import StaleEpochError


@dataclass(frozen=True, kw_only=True)
class _Run:
    """`cancel` frees what the request holds."""

    epoch: int
    inflight: "ref[InflightRequest]"
    cancel: Callable[[InflightRequest], None]

    def end(self) -> None:
        inflight = self.inflight()
        if inflight is not None:
            self.cancel(inflight)
            inflight.outputs.put(StaleEpochError("a newer claim of this request has arrived", param="epoch"))


class Fences:
    """The newest epoch of each fence whose request is in flight, and of the last `keys_max` others."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._runs: dict[str, _Run] = {}
        self._over: deque[str] = deque()
        """Fences whose request has ended. The garbage collector adds to it, on any thread."""
        self._epochs: OrderedDict[str, int] = OrderedDict()
        """The newest epoch of each fence without a request in flight."""

    def enter(self, fence: str | None, epoch: int) -> None:
        """Accept a command, and remember its epoch. The run of an older epoch ends.

        Raises:
            StaleEpochError: this node has seen a newer epoch.
        """
        if fence is None:
            return
        self._check(fence, epoch)
        run = self._runs.get(fence)
        if run is not None and run.epoch == epoch:
            return
        if run is not None:
            del self._runs[fence]
            run.end()
        self._remember(fence, epoch)

    def run(
        self, fence: str | None, epoch: int, inflight: InflightRequest, cancel: Callable[[InflightRequest], None]
    ) -> None:
        """Note the request of an accepted command; `cancel` ends it. An earlier run of the same or an older epoch ends.

        Raises:
            StaleEpochError: a newer epoch arrived meanwhile; the request must end.
        """
        if fence is None:
            return
        self._check(fence, epoch)
        before = self._runs.get(fence)
        gone = ref(inflight, lambda _: self._over.append(fence))
        self._runs[fence] = _Run(epoch=epoch, inflight=gone, cancel=cancel)
        self._epochs.pop(fence, None)
        if before is not None:
            before.end()

    def _check(self, fence: str, epoch: int) -> None:
        self._settle()
        run = self._runs.get(fence)
        newest = self._epochs.get(fence) if run is None else run.epoch
        if newest is not None and epoch < newest:
            raise StaleEpochError(
                f"epoch {epoch} of {fence} is older than {newest}, which this node has seen", param="epoch"
            )

    def _settle(self) -> None:
        """Move the fences whose request has ended to `_epochs`, from which old ones are dropped."""
        while self._over:
            fence = self._over.popleft()
            run = self._runs.get(fence)
            if run is not None and run.inflight() is None:
                del self._runs[fence]
                self._remember(fence, run.epoch)

    def _remember(self, fence: str, epoch: int) -> None:
        self._epochs[fence] = epoch
        self._epochs.move_to_end(fence)
        if len(self._epochs) > self._keys_max:
            self._epochs.popitem(last=False)
