"""The bytes of an answer, and how they get to its reader: written when outputs arrive, with no task woken for a token.

A reader that leaves much unread holds back the outputs of its own answer, for which no text is made meanwhile. Where a
part of an answer cannot be made, that answer fails for good: a connection that broke off would be the node's fault, and
another node that is given the same tokens fails with them, too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import structlog

from dataplane.agent.answers import Answer
from dataplane.agent.pooled_answers import PooledAnswer
from dataplane.engines.interface import EngineOutput
from dataplane.protocol.connections import BodyWriter
from dataplane.protocol.errors import AnswerFailedError, DataplaneError
from dataplane.protocol.messages import Failed, Generate, StreamEvent, Token, encode_line
from dataplane.protocol.records import MEDIA_TYPE, encode_events, encode_text

LINES_MEDIA_TYPE = "application/x-ndjson"
Encode = Callable[[Sequence[StreamEvent]], bytes]
log = structlog.get_logger()
_encode_text = msgspec.json.Encoder().encode


def encoder(generate: Generate, accept: str) -> tuple[str, Encode]:
    """The media type of an answer and how it is encoded: as records where the request has a text frame and its `accept`
    header names them, else as lines.
    """
    if generate.text_frame is None or MEDIA_TYPE not in accept:
        return LINES_MEDIA_TYPE, encode_lines
    before, after = (part.encode() for part in generate.text_frame)

    def encode_records(events: Sequence[StreamEvent]) -> bytes:
        return b"".join([_encode_record(event, before, after) for event in events])

    return MEDIA_TYPE, encode_records


def encode_lines(events: Sequence[StreamEvent]) -> bytes:
    """Events as lines of JSON."""
    return b"".join(map(encode_line, events))


def _encode_record(event: StreamEvent, before: bytes, after: bytes) -> bytes:
    if not isinstance(event, Token) or event.reasoning or event.tool_calls or event.logprobs:
        return encode_events((event,))
    text = event.text
    return encode_text(event.token_ids, len(text), before + _encode_text(text) + after if text else b"")


async def parts(answer: Answer | PooledAnswer, encode: Encode) -> AsyncIterator[bytes]:
    """The parts of an answer, for a reader to whom they are sent one by one."""
    try:
        async for event in answer.events():
            yield encode((event,))
    except Exception:
        yield encode((_failure(answer),))


def _failure(answer: Answer | PooledAnswer) -> Failed:
    """The end of an answer of which a part could not be made; called where the exception is handled."""
    log.exception("an answer cannot be made", request_id=answer.request_id)
    return answer.fail(AnswerFailedError("an internal error: the node cannot make this answer of its tokens"))


class AnswerStream:
    """Writes one answer to the body of its response."""

    def __init__(self, answer: Answer, encode: Encode, body: BodyWriter) -> None:
        self._answer = answer
        self._encode = encode
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Write the answer until it has ended, or its reader is gone."""
        body, answer = self._body, self._answer
        body.on_room, body.on_lost = self._advance, self._end
        answer.outputs.listen(self._wake)
        self._write(answer.begin)
        if answer.ended or body.lost:
            return
        self._advance()
        await self._ended

    def _wake(self) -> None:
        """Go on once the report that is being read has been read."""
        self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Write what there are outputs for, as far as the reader keeps up."""
        body, answer = self._body, self._answer
        if self._ended.done():
            return
        while not body.full and (output := answer.outputs.pop()) is not None:
            self._write(answer.feed, output)
            if answer.ended:
                self._end()
                return

    def _write(self, make: Callable[..., Sequence[StreamEvent]], *of: EngineOutput | DataplaneError) -> None:
        """Write the events that are made of an output, or the failure to make them."""
        try:
            data = self._encode(make(*of))
        except Exception:
            data = self._encode((_failure(self._answer),))
        if data:
            self._body.write(data)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
