"""A request in flight on a node: what was asked, the tokens so far, the worker that runs it, and its reader."""

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.engines.interface import EngineOutput, EngineRequest, KvHandle
from dataplane.protocol.errors import DataplaneError
from dataplane.scheduling.prefill import PrefillRequest

JOINED_TOKENS_MAX = 256
"""Tokens of outputs that are joined into one: the most for which text is made at a time."""


class Outputs:
    """The outputs of one request, in order, for one reader, which either waits for each of them or listens."""

    __slots__ = ("_listener", "_reader", "_unread")

    def __init__(self) -> None:
        self._unread: deque[EngineOutput | DataplaneError] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def put(self, output: EngineOutput | DataplaneError) -> None:
        unread = self._unread
        if self._listener is not None:
            if not unread:
                unread.append(output)
                self._listener()
            elif (joined := _joined(unread[-1], output)) is not None:
                unread[-1] = joined
            else:
                unread.append(output)
            return
        unread.append(output)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> EngineOutput | DataplaneError:
        """Wait for the next one. Only one may wait at a time."""
        while not self._unread:
            assert self._reader is None or self._reader.done(), "an answer has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._unread.popleft()

    def listen(self, listener: Callable[[], None]) -> None:
        """From now on, call `listener` at an output that finds none unread. Outputs of tokens alone are joined
        until they are popped, so that what a slow reader leaves is little more than token ids.
        """
        self._listener = listener

    def pop(self) -> EngineOutput | DataplaneError | None:
        """The next one that is unread; None: there is none."""
        return self._unread.popleft() if self._unread else None


def _joined(last: EngineOutput | DataplaneError, output: EngineOutput | DataplaneError) -> EngineOutput | None:
    """Both outputs as one; None where more than tokens would be lost, or it would be too long."""
    if isinstance(last, DataplaneError) or isinstance(output, DataplaneError):
        return None
    ended = last.finish_reason is not None or last.error is not None or output.error is not None
    if ended or last.scores or output.scores or len(last.token_ids) + len(output.token_ids) > JOINED_TOKENS_MAX:
        return None
    return EngineOutput(
        request_id=last.request_id,
        token_ids=last.token_ids + output.token_ids,
        cached_tokens=last.cached_tokens,
        values=output.values,
        finish_reason=output.finish_reason,
    )


class InflightRequest(Struct, eq=False, kw_only=True, weakref=True):
    """A request between its admission and its last output. `outputs` ends with an error or a finish reason.

    `made` are the tokens of all workers so far, `losses` how many workers died while they ran it. `worker` is the index
    of the worker that runs it, None while none can; `waits_since_s` is since when. `queued_at` is the worker in whose
    prefill queue it is, and `kv_at` the prefill worker that keeps `kv` for it.
    """

    request: EngineRequest
    model: str
    arrived_s: float
    outputs: Outputs = field(default_factory=Outputs)
    made: list[int] = field(default_factory=list)
    losses: int = 0
    worker: int | None = None
    kv_at: int | None = None
    kv: KvHandle | None = None
    queued_at: int | None = None
    waits_since_s: float | None = None

    @property
    def request_id(self) -> str:
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
