"""The answer of a node to one request: from its bytes to events, in order."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from controlplane.errors import NodeError
from dataplane.protocol.messages import (
    ANSWER_FAILED,
    INSTANCE_NOT_READY,
    Failed,
    Finished,
    Started,
    Token,
    decode_lines,
)
from dataplane.protocol.records import MEDIA_TYPE, RecordedEvent, RecordReader, TextRecord, joined

PassOn = Callable[[TextRecord], bool]
"""Takes text past whatever waits for events, at once. False: it takes none now, since the client does not keep up."""
_WAITING_BYTES_MAX = 65_536
"""Of events that nobody has taken yet; beyond it, the node is not read."""
_REFUSAL_BYTES_MAX = 1 << 20
_WHOLE_BYTES_MAX = 64 << 20
"""Of a line, and of an answer that is no stream."""
_REQUEST_AT_FAULT = frozenset({400, 413})
_STATUS_FOR_CLIENTS = {400: 400, 409: 503, 413: 413, 429: 429, 503: 503}


class NodeStream:
    """A stream of events as it arrives: `Started`, tokens, `Finished`; a `node_connections.Receiver`.

    Text goes to `pass_on` within the callback that received it if `next` waits, for then whoever takes the events is
    done with all that came before. Whatever else arrives waits for `next`. What a parser held back until the answer
    ended belongs to no token, so a node that continues the answer would send it again: it is held until `Finished`.
    """

    def __init__(self, *, first_token_s: float, idle_s: float, pass_on: PassOn | None = None) -> None:
        self.silence_s = first_token_s
        self._first_token_s, self._idle_s = first_token_s, idle_s
        self._pass_on = pass_on
        self._status = 0
        self._refusal = b""
        self._decode: Callable[[bytes], list[RecordedEvent]] = LineReader().feed
        self._has_begun = False
        self.has_finished = False
        self._held: list[RecordedEvent] = []
        self._waiting: list[RecordedEvent] = []
        self._waiting_bytes = 0
        self._failure: Exception | None = None
        self._wake: asyncio.Future[None] | None = None

    async def next(self) -> list[RecordedEvent]:
        """The events that have arrived since; those of a token or of several. None of them: the stream has ended.

        Raises:
            NodeError: the node refused, failed, or does not keep to the order of events.
            Exception: what else the connection ended with.
        """
        while not self._waiting and not self.has_finished:
            if self._failure is not None:
                raise self._failure
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        events, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return events

    def stop(self, error: NodeError) -> bool:
        """Let `next` raise an error. False: there are events that it gives first, or the stream has ended."""
        if self._waiting or self.has_finished or self._failure is not None:
            return False
        self._fail(error)
        return True

    def begun(self, status: int, media_type: str) -> None:
        self._status = status
        if media_type == MEDIA_TYPE:
            self._decode = RecordReader().feed

    def received(self, data: bytes) -> bool:
        if self._status != HTTPStatus.OK:
            self._refusal += data
            if len(self._refusal) > _REFUSAL_BYTES_MAX:
                raise refusal(b"", self._status)
            return True
        if self._failure is None and not self.has_finished and (events := self._decode(data)):
            self._note(events)
        if not self._waiting:
            return True
        self._waiting_bytes += len(data)
        return self._waiting_bytes < _WAITING_BYTES_MAX

    def ended(self, error: Exception | None) -> None:
        if error is None and self._status != HTTPStatus.OK:
            error = refusal(self._refusal, self._status)
        self._fail(error or NodeError("the node ended the stream without a finish reason"))

    def _note(self, events: list[RecordedEvent]) -> None:
        """Check events, and give them to whoever takes them."""
        if self._passes_on(events):
            return
        events, failed = _in_order(events, first=not self._has_begun)
        self._has_begun = True
        if failed is not None:
            self._fail(error_of(failed))
        last = events[-1] if events else None
        self.silence_s = self._idle_s if isinstance(last, TextRecord | Token) else self._first_token_s
        if self._held and failed is None:
            events, self._held = self._held + events, []
        if last is not None and _is_held_back(last):
            self._held.append(events.pop())
        if events:
            self._waiting += events
            self.has_finished = isinstance(last, Finished)
            self._call()

    def _passes_on(self, events: list[RecordedEvent]) -> bool:
        """Whether these events are nothing but text, which has been passed on."""
        if self._pass_on is None or self._wake is None or self._wake.done() or not self._has_begun or self._held:
            return False
        text = joined(events)
        if text is None or not self._pass_on(text):
            return False
        self.silence_s = self._idle_s
        return True

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._call()

    def _call(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class LineReader:
    """Finds events in the pieces in which lines of JSON arrive."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0

    def feed(self, data: bytes) -> list[RecordedEvent]:
        """The events whose lines are whole with this piece, in order; blank lines are nothing.

        Raises:
            msgspec.DecodeError: a line is no event, or does not end.
        """
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = b"".join((*self._rest, lines))
            self._rest, self._rest_bytes = [], 0
        if rest:  # pieces of a long line are joined once
            self._rest.append(rest)
            self._rest_bytes += len(rest)
            if self._rest_bytes > _WHOLE_BYTES_MAX:
                raise msgspec.DecodeError(f"a line is over {_WHOLE_BYTES_MAX} bytes")
        return list(decode_lines(lines)) if newline else []


class NodeReply:
    """A whole answer that is no stream; a `node_connections.Receiver`."""

    def __init__(self, *, silence_s: float) -> None:
        self.silence_s = silence_s
        self._status = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def body(self) -> bytes:
        """The body.

        Raises:
            NodeError: the node refused.
            Exception: what the connection ended with.
        """
        await self._done
        body = b"".join(self._body)
        if self._status != HTTPStatus.OK:
            raise refusal(body, self._status)
        return body

    def begun(self, status: int, media_type: str) -> None:
        self._status = status

    def received(self, data: bytes) -> bool:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > _WHOLE_BYTES_MAX:
            raise NodeError(f"the node's answer is over {_WHOLE_BYTES_MAX} bytes")
        return True

    def ended(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


def _in_order(events: list[RecordedEvent], *, first: bool) -> tuple[list[RecordedEvent], Failed | None]:
    """The events up to the stream's end, and its failure, if it failed; whatever follows the end is nothing.

    Raises:
        NodeError: `started` is missing, or is there twice.
    """
    for number, event in enumerate(events):
        if isinstance(event, Failed):
            return events[:number], event
        if isinstance(event, Started) != first:
            raise NodeError("the node's stream does not begin with its one 'started'")
        if isinstance(event, Finished):
            return events[: number + 1], None
        first = False
    return events, None


def _is_held_back(event: RecordedEvent) -> bool:
    """Whether an event is more than text, but of no token."""
    return isinstance(event, Token) and not event.token_ids and bool(event.tool_calls or event.reasoning)


def refusal(body: bytes, status: int) -> NodeError:
    """The error of a node that answers with a status of its own."""
    try:
        return error_of(msgspec.json.decode(body, type=Failed))
    except ValueError:
        return NodeError(f"the node answered {status}")


def error_of(event: Failed) -> NodeError:
    """The failure that a node reports. Only faults of the request, and answers that cannot be made of their tokens, are
    final; otherwise another node may do better.
    """
    final = event.status in _REQUEST_AT_FAULT or event.code == ANSWER_FAILED
    return NodeError(
        event.message,
        status=_STATUS_FOR_CLIENTS.get(event.status, 502),
        code=event.code,
        param=event.param,
        retryable=event.retryable or not final,
        untouched=event.code == INSTANCE_NOT_READY,
    )
