"""A request in flight on a node: what was asked, what came so far, where it is, and who waits for the rest."""

import asyncio
import time
from collections import deque

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.engines.interface import EngineOutput, EngineRequest, KvHandle
from dataplane.protocol.errors import DataplaneError
from dataplane.scheduling.prefill import PrefillRequest


class Outputs:
    """What came for one reader, in order. A queue for many would cost more to make and to fill than a token does."""

    __slots__ = ("_come", "_reader")

    def __init__(self) -> None:
        self._come: deque[EngineOutput | DataplaneError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput | DataplaneError) -> None:
        """Something came."""
        self._come.append(output)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> EngineOutput | DataplaneError:
        """Wait for the next one. Only one may wait at a time."""
        while not self._come:
            assert self._reader is None or self._reader.done(), "an answer has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._come.popleft()

    def take(self) -> list[EngineOutput | DataplaneError]:
        """All that came and was not read."""
        taken = list(self._come)
        self._come.clear()
        return taken


class InflightRequest(Struct, eq=False, kw_only=True, weakref=True):
    """A request between its admission and its last output. `outputs` ends with an error or a finish reason.

    `made` are the tokens of all workers so far, `losses` how many workers died on it. `slot` is the slot that runs it;
    None while it waits for one that can. `holder` is the prefill slot that keeps `kv` for it, and `queued_at` the one
    in whose prefill queue it stands. `waits_since_s`: since when no slot can run it.
    """

    request: EngineRequest
    model: str
    arrived_s: float = field(default_factory=time.monotonic)
    outputs: Outputs = field(default_factory=Outputs)
    made: list[int] = field(default_factory=list)
    losses: int = 0
    slot: int | None = None
    holder: int | None = None
    kv: KvHandle | None = None
    queued_at: int | None = None
    waits_since_s: float | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def continued(self) -> EngineRequest:
        """The request as another worker must get it."""
        if not self.made and self.kv is self.request.kv:
            return self.request
        return replace(self.request, generated=self.request.generated + tuple(self.made), kv=self.kv)

    def prefill(self) -> PrefillRequest:
        """The request as a prefill queue sees it."""
        return PrefillRequest(
            request_id=self.request_id,
            model=self.model,
            tokens=len(self.request.prompt) + len(self.request.generated) + len(self.made),
            tier=self.request.tier,
            arrived_s=self.arrived_s,
            ttft_s=self.request.promise.ttft_s,
        )
