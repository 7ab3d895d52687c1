"""The bytes of an answer, and how they get to its reader: written when outputs arrive, with no task woken for a token.

A reader that leaves much unread holds back the outputs of its own answer, for which no text is made meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from dataplane.agent.answers import Answer
from dataplane.agent.pooled_answers import PooledAnswer
from dataplane.protocol.connections import BodyWriter
from dataplane.protocol.messages import Generate, StreamEvent, Token, encode_line
from dataplane.protocol.records import MEDIA_TYPE, encode_events, encode_text

LINES_MEDIA_TYPE = "application/x-ndjson"
Encode = Callable[[Sequence[StreamEvent]], bytes]
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
    async for event in answer.events():
        yield encode((event,))


class AnswerStream:
    """Writes one answer to the body of its response."""

    def __init__(self, answer: Answer, encode: Encode, body: BodyWriter) -> None:
        self._answer = answer
        self._encode = encode
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Write the answer until it has ended, or its reader is gone.

        Raises:
            Exception: what making its text ended with.
        """
        body, answer = self._body, self._answer
        body.on_room, body.on_lost = self._advance, self._end
        answer.outputs.listen(self._wake)
        body.write(self._encode(answer.begin()))
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
        try:
            while not body.full and (output := answer.outputs.pop()) is not None:
                if data := self._encode(answer.feed(output)):
                    body.write(data)
                if answer.ended:
                    self._end()
                    return
        except Exception as error:
            self._ended.set_exception(error)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
